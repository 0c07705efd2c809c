"""In a process of its own: the allocator's settings are for a whole process."""

import subprocess
import sys

SCRIPT = """
import threading
from pathlib import Path
import torch
from nybble.service.malloc import _mallopt, large_blocks_go_back

def resident_mib():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024

def read_and_drop(keep):
    # Another thread's tensors of falling and rising sizes, of which few stay: what a reader's heap sees.
    held = [torch.ones(((i % 13) + 1) << 18, dtype=torch.float32) for i in range(40)]
    keep.append(held[-1][:1].clone())

def grow():
    before, keep = resident_mib(), []
    for _ in range(3):
        thread = threading.Thread(target=read_and_drop, args=(keep,))
        thread.start()
        thread.join()
    return resident_mib() - before

with large_blocks_go_back():
    print(grow())
print(_mallopt() is not None)
"""


def test_what_is_freed_goes_back() -> None:
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    grown, glibc = out.stdout.split()
    assert glibc == "False" or float(grown) < 64, f"{grown} MiB stayed resident of 280 MiB that were freed"
