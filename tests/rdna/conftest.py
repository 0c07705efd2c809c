"""Machine-code tests: kernels compiled for GPUs that are not there; RDNA ones also run, in an emulator.

Compiling needs triton only. Running needs RDNA_TINYGRAD (a checkout of tinygrad/tinygrad) and Debian's clang-22, llvm-22
and lld-22.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
