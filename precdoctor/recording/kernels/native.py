"""The compiled CPU kernel, if this installation has it: found, checked and called through ctypes.

It needs neither Python's nor torch's headers, so one library serves every version of both. Without it (no compiler at
installation) the torch kernel in ``blocked.py`` gives the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from precdoctor.recording.kernels import layout as at
from precdoctor.recording.kernels import reference

#: File name of the library beside this module; made by the package build (``hatch_build.py``).
LIBRARY = "_stats.so"
#: Set to anything to do without it.
DISABLE_VARIABLE = "PRECDOCTOR_NO_NATIVE"

#: Largest piece copied at a time from a tensor that is not contiguous.
_PIECE = 64 * 1024
#: The order of ``dtype_t`` in stats.c.
_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.float8_e4m3fnuz: 5,
    torch.float8_e5m2fnuz: 6,
    torch.float64: 7,
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or null when there is none or it was built for another slot layout."""
    path = Path(__file__).with_name(LIBRARY)
    if os.environ.get(DISABLE_VARIABLE) or not path.is_file():
        return None
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    i32, i64, u64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    found.precdoctor_layout.restype = i64
    found.precdoctor_piece.restype = i64
    found.precdoctor_piece.argtypes = [pointer, i32, i64, i64, u64, i32, pointer, pointer]
    found.precdoctor_finish.restype = None
    found.precdoctor_finish.argtypes = [i64, u64, i64, pointer, pointer]
    found.precdoctor_stat.restype = None
    found.precdoctor_stat.argtypes = [pointer, i32, i64, i64, u64, i32, pointer, pointer, pointer]
    found.precdoctor_update.restype = None
    found.precdoctor_update.argtypes = [pointer] * 3 + [i32, i32, i64, u64] + [pointer] * 3
    return found if found.precdoctor_layout() == at.INT_WIDTH else None


def supports(x: Tensor) -> bool:
    """Whether this kernel can take the tensor: on the CPU, of a dtype it knows, library present."""
    return x.device.type == "cpu" and x.dtype in _CODES and library() is not None


def measure(x: Tensor, ints: Tensor, floats: Tensor, counter: Tensor, blocks: Sequence[int]) -> None:
    """Same contract as :func:`precdoctor.recording.kernels.reference.measure`, for tensors that :func:`supports`."""
    measure_at(x, ints.data_ptr(), floats.data_ptr(), counter.data_ptr(), wanted(blocks))


def wanted(blocks: Sequence[int]) -> int:
    """Block sizes as the bit mask the library takes."""
    return sum(1 << at.BLOCK_SIZES.index(block) for block in blocks)


def measure_at(x: Tensor, ints: int, floats: int, counter: int, want: int) -> None:
    """:func:`measure` by the addresses of the slot's rows: making views costs more than measuring small tensors."""
    lib = library()
    assert lib is not None
    code = _CODES[x.dtype]
    seed = _seed(x.dtype, x.shape)
    if x.is_contiguous():
        columns = x.shape[-1] if x.dim() else 1
        lib.precdoctor_stat(x.data_ptr(), code, x.numel() // columns, columns, seed, want, ints, floats, counter)
        return
    bad = 0
    for start, piece in reference.chunks(x, _PIECE):
        rows, columns = piece.shape
        bad += lib.precdoctor_piece(piece.data_ptr(), code, rows, columns, start, want, ints, floats)
    lib.precdoctor_finish(x.numel(), seed, bad, ints, counter)


def supports_update(before: Tensor, after: Tensor, intended: Tensor) -> bool:
    """Whether :func:`update_at` can take these: contiguous, weights of at most 32 bits, intention in FP32 or FP64."""
    return (
        supports(before)
        and before.dtype != torch.float64
        and intended.dtype in {torch.float32, torch.float64}
        and all(x.is_contiguous() for x in (before, after, intended))
    )


def update_at(before: Tensor, after: Tensor, intended: Tensor, ints: int, floats: int, counter: int) -> None:
    """:func:`precdoctor.recording.kernels.reference.measure_update` by the addresses of the slot's rows."""
    lib = library()
    assert lib is not None
    wide, code = int(intended.dtype == torch.float64), _CODES[before.dtype]
    seed = _seed(torch.float32, before.shape)
    pointers = before.data_ptr(), after.data_ptr(), intended.data_ptr()
    lib.precdoctor_update(*pointers, wide, code, before.numel(), seed, ints, floats, counter)


@functools.lru_cache(maxsize=65536)
def _seed(dtype: torch.dtype, shape: torch.Size) -> int:
    return reference.fingerprint_seed(dtype, shape)
