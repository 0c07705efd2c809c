"""The largest of each row of logits, and whether the whole row is finite, in two launches that read the logits once.

    logits [R, V] --best_of_chunk, grid (chunks, R)--> each chunk's best, by index --best_of_row, grid (R)--> [2, R]

Values are compared as integers in their own type, since the magnitudes of floats order as their bits do. Whatever is not
finite counts as larger than every number, so that one maximum answers both questions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nybble.kernels import dependent
from nybble.kernels.dependent import let_next_start_and_wait
from nybble.kernels.launch import FLOAT_TYPES, HALF_TYPES, check, power_of_two

LOGIT_TYPES = (*HALF_TYPES, *FLOAT_TYPES)
# The bits of infinity; larger magnitudes are NaN.
INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
_INT_TYPES = {16: torch.int16, 32: torch.int32}
# One row of a real model's vocabulary is 16 programs and more.
_CHUNK = 2048

# ------------------------------------------------------------------------------------------------------------ kernel


@triton.jit
def load_bits(ptr, inside, BITS: tl.constexpr):
    """(negative, magnitude) of the floats whose bits lie at ptr as intBITS; 0 outside."""
    bits = tl.load(ptr, mask=inside, other=0).to(tl.int32)
    return bits < 0, bits & ((1 << (BITS - 1)) - 1)


@triton.jit
def _load_keys(ptr, inside, BITS: tl.constexpr, INF: tl.constexpr):
    """int32 that order as the floats do, INF where one is not finite, less than all of them outside."""
    negative, magnitude = load_bits(ptr, inside, BITS)
    key = tl.where(magnitude >= INF, INF, tl.where(negative, -magnitude, magnitude))
    return tl.where(inside, key, -INF)


@triton.jit
def best_of_chunk_kernel(
    parts_ptr,
    logits_ptr,
    stride,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (cdiv(V, CHUNK), R)."""
    let_next_start_and_wait(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    key = _load_keys(logits_ptr + row * stride + column, column < V, BITS, INF)
    first = tl.min(tl.where(key == tl.max(key, axis=0), column, V), axis=0)
    tl.store(parts_ptr + row * tl.num_programs(0) + tl.program_id(0), first)


@triton.jit
def best_of_row_kernel(
    y_ptr,
    parts_ptr,
    logits_ptr,
    stride,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (R)."""
    let_next_start_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    column = tl.load(parts_ptr + row * CHUNKS + chunk, mask=inside, other=0)
    key = _load_keys(logits_ptr + row * stride + column, inside, BITS, INF)
    most = tl.max(key, axis=0)
    tl.store(y_ptr + row, tl.min(tl.where(key == most, column, V), axis=0))
    tl.store(y_ptr + tl.num_programs(0) + row, (most < INF).to(tl.int32))


# ---------------------------------------------------------------------------------------------------------- launcher


@torch.library.custom_op("nybble::best_rows", mutates_args=())
def best_rows(logits: torch.Tensor) -> torch.Tensor:
    """int32 [2, R]: the index of each row's largest logit, the first of equals; 1 where all of the row is finite, else 0
    (then the index is any of the row's).

    logits  [R, V] float16, bfloat16 or float32, V at least 1, contiguous but for any stride of the rows

    Raises ValueError for any other shape, type or stride, before anything is launched.
    """
    check_logits(logits)
    return launch_best(logits)


@best_rows.register_fake
def _(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(2, logits.shape[0], dtype=torch.int32)


def launch_best(logits: torch.Tensor) -> torch.Tensor:
    """`best_rows` of logits that need no check, without the detour through torch's dispatcher."""
    rows, vocab = logits.shape
    y = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return y
    chunks = triton.cdiv(vocab, _CHUNK)
    parts = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    bits = bits_of(logits)
    stride = logits.stride(0)
    form = {"BITS": 8 * logits.element_size(), "INF": INFINITY[logits.dtype]}
    overlap = dependent.options(logits.device)
    best_of_chunk_kernel[(chunks, rows)](
        parts, bits, stride, V=vocab, CHUNK=_CHUNK, **form, **overlap, num_warps=4
    )
    block = power_of_two(chunks)
    best_of_row_kernel[(rows,)](
        y,
        parts,
        bits,
        stride,
        V=vocab,
        CHUNKS=chunks,
        BLOCK=block,
        **form,
        **overlap,
        num_warps=1 if block <= 256 else 4,
    )
    return y


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError unless they are [R, V], V at least 1, of a floating type that kernels here read."""
    check("logits", logits, LOGIT_TYPES, ("R", "V"), logits.device, row_stride=True)
    if logits.shape[1] == 0:
        raise ValueError("logits: given V=0, accepted at least 1")


def bits_of(logits: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return logits.view(_INT_TYPES[8 * logits.element_size()])


# --------------------------------------------------------------------------------------------------------- reference


def best_rows_reference(logits: torch.Tensor) -> torch.Tensor:
    """int32 [2, R] as `best_rows`; -1 is the index of a row that is not finite."""
    values = logits.to(torch.float32)
    finite = values.isfinite().all(dim=1)
    most = values.amax(dim=1, keepdim=True)
    first = (values == most).to(torch.int8).argmax(dim=1)  # torch promises the first of equals only on a CPU
    return torch.stack((first.where(finite, -1), finite.to(first.dtype))).to(torch.int32)
