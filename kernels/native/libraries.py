"""Where the shared libraries of a GPU stack are: first of all, those that torch has already loaded.

Two copies of a HIP runtime in one process do not see each other's streams, so the one that is mapped wins.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Library:
    """An open library and where it is (its name alone where the system does not say)."""

    cdll: ctypes.CDLL
    path: str


class LibraryNotFound(RuntimeError):
    """None of the places had the library; the text names each of them."""


def open_library(what: str, stem: str, places: Iterator[str], needs: str) -> Library:
    """The first library of `places` that opens and has the function `needs`.

    what    what it is, for the error: "the run-time compiler nvrtc"
    stem    its file's name up to ".so", "libnvrtc", to find it among those that are loaded
    places  names for the dynamic loader, or absolute paths in which * stands for anything; the newest of several wins

    Raises LibraryNotFound.
    """
    tried: list[str] = []
    for place in [*mapped(stem), *places]:
        found = sorted(glob.glob(place), reverse=True) if "/" in place else [place]
        if not found:
            tried.append(f"{place} (not there)")
        for candidate in found:
            try:
                cdll = ctypes.CDLL(candidate)
            except OSError as error:
                absent = str(error).startswith(f"{candidate}: cannot open shared object file")
                tried.append(f"{candidate} ({'not there' if absent else error})")
                continue
            if hasattr(cdll, needs):
                return Library(cdll, _whereabouts(candidate))
            tried.append(f"{candidate} (has no {needs})")
    raise LibraryNotFound(f"{what} was not found; tried: " + ", ".join(dict.fromkeys(tried)))


def mapped(stem: str) -> list[str]:
    """Paths of libraries of that stem that this process has loaded (Linux; elsewhere none).

    Wheels may carry a hash in the name: libamdhip64-0a1b2c3d.so.
    """
    pattern = re.compile(rf"{re.escape(stem)}(-[0-9a-f]{{8}})?\.so(\.\d+)*")
    paths: dict[str, None] = {}
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.split(None, 5)[-1].strip() if "/" in line else ""
            if pattern.fullmatch(os.path.basename(path)):
                paths[path] = None
    return list(paths)


def _whereabouts(name: str) -> str:
    """The path of a library that has just been opened, by its path or by a name."""
    if "/" in name:
        return name
    return next((path for path in mapped(name.split(".so")[0]) if f"/{name}" in path), name)


def nvrtc_places() -> Iterator[str]:
    """torch's CUDA version first: its package, then any."""
    major = (torch.version.cuda or "").split(".")[0]
    if major:
        yield from (f"{folder}/*/lib/libnvrtc.so.{major}" for folder in _package_folders("nvidia"))
        yield f"libnvrtc.so.{major}"
    yield from (f"{folder}/*/lib/libnvrtc.so.*" for folder in _package_folders("nvidia"))
    yield from (f"{_torch_lib()}/{name}" for name in ("libnvrtc.so*", "libnvrtc-????????.so*"))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
    for home in _homes("CUDA_HOME", "CUDA_PATH", default="/usr/local/cuda"):
        yield from (f"{home}/lib64/libnvrtc.so*", f"{home}/targets/*/lib/libnvrtc.so*")


def cuda_includes() -> list[str]:
    """Folders with the toolkit's headers (cuda_fp16.h), as far as there are any."""
    folders = [f"{folder}/*/include" for folder in _package_folders("nvidia")]
    folders += [f"{home}/include" for home in _homes("CUDA_HOME", "CUDA_PATH", default="/usr/local/cuda")]
    found = [path for pattern in folders for path in sorted(glob.glob(pattern))]
    return [path for path in found if os.path.isfile(f"{path}/cuda_fp16.h")]


def hip_places() -> Iterator[str]:
    """The HIP runtime: ROCm's Python packages, torch's own folder, the system's."""
    yield from _rocm_sdk("amdhip64")
    yield f"{_torch_lib()}/libamdhip64*.so*"
    yield from ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")
    yield from (f"{home}/lib/libamdhip64.so*" for home in _rocm_homes())


def hiprtc_places() -> Iterator[str]:
    """Beside the HIP runtime in use, then as for that; up to ROCm 6 the runtime itself has the compiler."""
    yield from (f"{os.path.dirname(path)}/libhiprtc.so*" for path in mapped("libamdhip64"))
    yield from _rocm_sdk("hiprtc")
    yield f"{_torch_lib()}/libhiprtc.so*"
    yield from ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6")
    yield from (f"{home}/lib/libhiprtc.so*" for home in _rocm_homes())
    yield from mapped("libamdhip64")
    yield from hip_places()


def cuda_places() -> Iterator[str]:
    yield "libcuda.so.1"


def _package_folders(name: str) -> list[str]:
    """Every folder of a namespace package that several distributions fill."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            return list(spec.submodule_search_locations or ())
    return []


def _rocm_sdk(shortname: str) -> list[str]:
    """What ROCm's Python packages say, where they are installed."""
    with suppress(Exception):  # another package's code, which may be half-installed
        import rocm_sdk

        return [str(path) for path in rocm_sdk.find_libraries(shortname)]
    return []


def _torch_lib() -> str:
    return str(Path(torch.__file__).parent / "lib")


def _homes(*variables: str, default: str) -> list[str]:
    """The toolkit's own variables, not settings of ours."""
    return [*filter(None, map(os.environ.get, variables)), default]


def _rocm_homes() -> list[str]:
    return [*_homes("ROCM_PATH", "ROCM_HOME", "HIP_PATH", default="/opt/rocm"), "/opt/rocm-*"]
