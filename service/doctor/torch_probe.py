"""What torch says of itself and of the GPUs, asked in a process of its own: a broken ROCm may hang or end whoever
imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

LIMIT_S = 180.0
_MARK = "nybble-torch "


@dataclass(frozen=True, slots=True)
class TorchGpu:
    """arch: gfx1151 or sm_90."""

    name: str
    arch: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Torch:
    """problem: why it does not import, "" where it does. hip, cuda: what it was built for, "" for neither. blas: the
    library that it prefers for GEMMs, "cublaslt" being hipBLASLt on ROCm; "" where it does not say."""

    problem: str = ""
    version: str = ""
    hip: str = ""
    cuda: str = ""
    gpus: tuple[TorchGpu, ...] = ()
    gpu_problem: str = ""
    blas: str = ""

    @property
    def build(self) -> str:
        return "ROCm" if self.hip else "CUDA" if self.cuda else "CPU"


def probe_torch(command: list[str] | None = None, limit_s: float = LIMIT_S) -> Torch:
    """Ask a fresh Python. command: what to run instead, for tests."""
    command = command or [sys.executable, "-P", "-m", "nybble.service.doctor.torch_probe"]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as error:
        return Torch(problem=f"{command[0]} does not start: {error}")
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: what hangs inside the driver cannot be ended
        return Torch(problem=f"`import torch` had not ended after {limit_s:g} s")
    said = [line for line in out.splitlines() if line.startswith(_MARK)]
    try:
        answer = json.loads(said[-1].removeprefix(_MARK))
        gpus = tuple(TorchGpu(**gpu) for gpu in answer.pop("gpus"))
        return Torch(gpus=gpus, **answer)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError):
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        return Torch(problem=f"`import torch` ended with {how}: {lines[-1][:300] if lines else 'no message'}")


def _ask() -> dict[str, Any]:
    import torch

    answer: dict[str, Any] = {
        "version": str(torch.__version__),
        "hip": torch.version.hip or "",
        "cuda": torch.version.cuda or "",
        "gpus": [],
    }
    try:
        if torch.cuda.is_available():
            answer["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
            answer["blas"] = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    except (RuntimeError, AttributeError) as error:
        answer["gpu_problem"] = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return answer


def _gpu(index: int) -> dict[str, Any]:
    import torch

    from nybble.kernels.target import detect

    target = detect(torch.device("cuda", index))
    free, total = torch.cuda.mem_get_info(index)
    return {"name": target.name, "arch": target.arch, "free_bytes": free, "total_bytes": total}


if __name__ == "__main__":
    print(_MARK + json.dumps(_ask()), flush=True)
