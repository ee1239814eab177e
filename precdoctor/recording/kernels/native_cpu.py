"""The compiled CPU kernel, if this installation has it: loaded, checked and called through ctypes.

It needs neither Python's nor torch's headers, so one library serves every version of both. Without it (no compiler at
installation) the torch kernel in ``blocked.py`` gives the same numbers.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.adam_update import Adam
from precdoctor.recording.kernels.row_layout import Dimension, walk
from precdoctor.recording.kernels.tiling import is_dense
from precdoctor.recording.process import attach

#: File name of the library beside this module; made by the package build (``hatch_build.py``).
LIBRARY: Final = "_stats.so"
#: Environment variable; any value disables the library.
DISABLE_VARIABLE: Final = "PRECDOCTOR_NO_NATIVE"
#: Set to one of VARIANTS to use those instructions although the processor offers more. For tests and benchmarks.
VARIANT_VARIABLE: Final = "PRECDOCTOR_KERNEL"
VARIANTS: Final = ("baseline", "avx2", "avx512")

#: Tensors below this many elements are measured by the calling thread alone: waking others costs more.
_THREADS_FROM: Final = 256 * 1024
#: Measuring a tensor with fewer elements is faster than looking it up among the recent ones.
_LOOKED_UP_FROM: Final = 8192
#: The order of ``dtype_t`` in stats.h.
CODES: Final = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.float8_e4m3fnuz: 5,
    torch.float8_e5m2fnuz: 6,
    torch.float64: 7,
}
#: ``TILE``, ``MAX_OUTER`` and the number of fields of ``plan_t`` in stats.h.
_TILE, _MAX_OUTER, _PLAN_WIDTH = 2048, 8, 39
#: ``ABI`` in stats.h: a library built from an older version of this file is not used.
_ABI: Final = 6
#: A slot's integer row up to the first bad order, and its float row, before the first launch.
_FRESH_INTS = (ctypes.c_int64 * at.FIRST_BAD_ORDER)(
    *(at.NEVER if i == at.ORDER else 0 for i in range(at.FIRST_BAD_ORDER))
)
_FRESH_FLOATS = (ctypes.c_double * at.FLOAT_WIDTH)(-math.inf, math.inf, 0.0, 0.0)
#: The largest block: tiles are cut at its multiples.
_WIDEST: Final = 128


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library; None if it is missing, disabled, or built for another slot layout."""
    path = Path(__file__).with_name(LIBRARY)
    if os.environ.get(DISABLE_VARIABLE) or not path.is_file():
        return None
    try:
        found = ctypes.CDLL(str(path))
        found.precdoctor_layout.restype = ctypes.c_int64
        if found.precdoctor_layout() != (_ABI * 10000 + at.INT_WIDTH) * 1000 + _PLAN_WIDTH:
            return None
    except (OSError, AttributeError):
        return None
    i32, i64, u64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    types: tuple[tuple[Any, Any, list[Any]], ...] = (
        (found.precdoctor_choose, i32, [i32]),
        (found.precdoctor_use_threads, None, [pointer]),
        (found.precdoctor_stat, None, [pointer] * 5 + [i32]),
        (found.precdoctor_sample, u64, [pointer, i64]),
        (found.precdoctor_again, i32, [pointer] * 5 + [i32, i64, u64, pointer, pointer]),
        (found.precdoctor_look, None, [pointer, pointer, i64, i32, pointer, i32, i64]),
        (found.precdoctor_update, None, [pointer] * 3 + [i32] + [pointer] * 4 + [i32]),
        (found.precdoctor_adam, None, [pointer] * 9 + [i32]),
    )
    for function, result, arguments in types:
        function.restype, function.argtypes = result, arguments
    found.precdoctor_use_threads(_address_of_parallel())
    choose_variant(os.environ.get(VARIANT_VARIABLE), found)
    return found


def choose_variant(name: str | None, lib: ctypes.CDLL | None = None) -> str:
    """Select the named variant, or the best supported one if the processor lacks it or ``name`` is None or unknown.

    Returns the name of the variant in use. All variants give the same bits.
    """
    lib = lib or library()
    assert lib is not None
    wanted = VARIANTS.index(name) + 1 if name in VARIANTS else 0
    best = lib.precdoctor_choose(wanted)
    chosen = VARIANTS[(min(wanted, best) if wanted else best) - 1]
    _variant_in_use[:] = [chosen]
    return chosen


_variant_in_use: list[str] = []


def variant() -> str:
    """Return the name of the variant in use; the library must have been loaded."""
    return _variant_in_use[0]


def _address_of_parallel() -> int | None:
    """Return the entry point of torch's OpenMP runtime, so that we use its threads and start none; None without one.

    GCC's runtime defines it and LLVM's and Intel's export it as well; torch loads its own with global symbols. A torch
    that uses another thread pool, or none, leaves us single-threaded.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


_forked = False


def _forget_threads() -> None:
    """Stay single-threaded in a forked child: the OpenMP threads are the parent's, and waiting for them would hang."""
    global _forked  # noqa: PLW0603 - a fact about the process
    _forked = True


os.register_at_fork(after_in_child=_forget_threads)


def supports(x: Tensor) -> bool:
    """Whether this kernel can measure the tensor: on the CPU, of a dtype in :data:`CODES`, library present.

    A plan has room for ``_MAX_OUTER`` dimensions beside the two of a tile; a contiguous tensor needs none.
    """
    fits = x.dim() <= _MAX_OUTER + 2 or x.is_contiguous()
    return x.is_cpu and x.dtype in CODES and fits and library() is not None


def wanted(blocks: Sequence[int]) -> int:
    """Return block sizes as the bit mask that the library expects."""
    return sum(1 << at.BLOCK_SIZES.index(block) for block in blocks)


def measure_at(x: Tensor, ints: int, floats: int, counter: int, want: int, recent: Recent | None = None) -> None:
    """:func:`precdoctor.recording.kernels.reference.measure` for tensors that :func:`supports` accepts.

    The slot's rows are given by their addresses: creating views costs more than measuring small tensors.

    Args:
        want: block sizes as from :func:`wanted`.
        recent: tensors measured earlier in this step; updated. Modules often return their input, and recognising this
            (by the fingerprint) costs a third of measuring it again.
    """
    lib: Any = library()
    strides = None if x.is_contiguous() else x.stride()
    plan, numel = _plan(x.dtype, x.shape, strides, want)
    threads = 1 if numel < _THREADS_FROM or _forked else torch.get_num_threads()
    data = x.data_ptr()
    if recent is None or numel < _LOOKED_UP_FROM or strides is not None:
        lib.precdoctor_stat(data, plan, ints, floats, counter, threads)
        return
    size, earlier = numel * x.element_size(), recent.get(data)
    if earlier is not None and earlier[0] is plan:
        _, sample, *row = earlier
        if lib.precdoctor_again(data, plan, ints, floats, counter, threads, size, sample, *row):
            return
    lib.precdoctor_stat(data, plan, ints, floats, counter, threads)
    recent[data] = plan, lib.precdoctor_sample(data, size), ints, floats


def restart(ints: int, floats: int) -> None:
    """Reset a slot's rows, by their addresses, except the order of its first bad launch."""
    if not ctypes.c_int64.from_address(ints + 8 * at.LAUNCHES).value:
        return  # already reset: most often this is the step's first launch, and a row is 13 kB
    ctypes.memmove(ints, _FRESH_INTS, 8 * at.FIRST_BAD_ORDER)
    kept = 8 * (at.FIRST_BAD_ORDER + 1)
    ctypes.memset(ints + kept, 0, 8 * at.INT_WIDTH - kept)
    ctypes.memmove(floats, _FRESH_FLOATS, 8 * at.FLOAT_WIDTH)


def supports_update(before: Tensor, after: Tensor, intended: Tensor | Adam) -> bool:
    """Whether :func:`update_at` accepts these: contiguous, on the CPU, weight of at most 32 bits.

    ``intended``: in FP32 or FP64; or Adam's terms: moments in FP32, the others Python numbers.
    """
    if isinstance(intended, Adam):
        of_update: tuple[Tensor, ...] = intended.first, intended.second
        if any(isinstance(term, Tensor) for term in (intended.factor, intended.root, intended.decay)):
            return False
        if not all(m.dtype == torch.float32 and m.is_cpu and m.shape == before.shape for m in of_update):
            return False
    else:
        of_update = (intended,)
        if intended.dtype not in {torch.float32, torch.float64}:
            return False
    contiguous = all(x.is_contiguous() for x in (before, after, *of_update))
    return contiguous and before.dtype != torch.float64 and supports(before)


def update_at(before: Tensor, after: Tensor, intended: Tensor | Adam, ints: int, floats: int, counter: int) -> None:
    """:func:`precdoctor.recording.kernels.reference.measure_update` by the addresses of the slot's rows.

    Adam's terms give the same row as ``intended.update(before)``, bit for bit.
    """
    lib: Any = library()
    plan, numel = _update_plan(before.dtype, before.shape)
    rows = plan, ints, floats, counter, 1 if numel < _THREADS_FROM or _forked else torch.get_num_threads()
    weights = before.data_ptr(), after.data_ptr()
    if isinstance(intended, Adam):
        terms = float(intended.factor), float(intended.root), intended.eps, float(intended.decay or 0.0)
        moments = intended.first.data_ptr(), intended.second.data_ptr()
        lib.precdoctor_adam(*weights, *moments, (ctypes.c_float * 4)(*terms), *rows)
    else:
        lib.precdoctor_update(*weights, intended.data_ptr(), intended.dtype == torch.float64, *rows)


#: C functions, because gradients are read in every step.
_BASE: Any = torch._C.TensorBase
_DTYPE, _IS_CPU = _BASE.dtype.__get__, _BASE.is_cpu.__get__
_CONTIGUOUS, _ADDRESS, _NUMEL = _BASE.is_contiguous, _BASE.data_ptr, _BASE.numel
#: An address below this may be an offset: a tensor whose memory was freed has its byte offset as its address.
LOWEST: Final = 1 << 40


def look(tensors: Sequence[Tensor]) -> tuple[float, float] | None:
    """Return amax over plain tensors, non-finite exactly if an element is, and the sum of their squares, in FP64.

    None without the library, or if a tensor is not on the CPU, has gaps in its memory or none, or has another dtype
    than :data:`CODES`. Call outside of torch.func.
    """
    lib: Any = library()
    if lib is None or not all(map(_IS_CPU, tensors)):
        return None
    try:
        if not all(map(_CONTIGUOUS, tensors)) and not all(is_dense(x.shape, x.stride()) for x in tensors):
            return None
        dtypes = list(map(_DTYPE, tensors))
        addresses, sizes = list(map(_ADDRESS, tensors)), list(map(_NUMEL, tensors))
    except RuntimeError as error:  # sparse tensors have no memory of their own
        attach.let_through(error)
        return None
    if min(addresses, default=0) < LOWEST and any(map(_lacks_memory, tensors)):
        return None
    out = (ctypes.c_double * 2)()
    used_dtypes = set(dtypes)
    if not used_dtypes <= CODES.keys():
        return None
    for dtype in used_dtypes:
        mask = [k is dtype for k in dtypes] if len(used_dtypes) > 1 else None
        data, numel = (
            array.array("q", x if mask is None else list(itertools.compress(x, mask))) for x in (addresses, sizes)
        )
        look_at(data, numel, CODES[dtype], out)
    return out[0], out[1]


def _lacks_memory(x: Tensor) -> bool:
    """Return whether the address of a tensor with elements is that of no memory.

    If its memory was freed (FSDP does that), the address is nothing but its offset. A zero tensor has none.
    """
    return x.numel() > 0 and (x._is_zerotensor() or not x.untyped_storage().nbytes())


def look_at(data: array.array[int], numel: array.array[int], code: int, out: ctypes.Array[ctypes.c_double]) -> None:
    """Merge amax and sum of squares of some pieces of memory into ``out``.

    Args:
        data: their addresses.
        numel: number of elements of each.
        code: their dtype, as in :data:`CODES`.
        out: amax and sum of squares, in FP64.
    """
    lib: Any = library()
    threads = 1 if _forked else torch.get_num_threads()
    at_data, at_numel = data.buffer_info()[0], numel.buffer_info()[0]
    lib.precdoctor_look(at_data, at_numel, len(data), code, out, threads, _THREADS_FROM)


# --- plans -----------------------------------------------------------------------------------------------------------

Plan = tuple["ctypes.Array[ctypes.c_int64]", int]
#: By address of a tensor's memory: its plan, a sample of its bytes, and the row of the slot that it was measured into.
Recent = dict[int, "tuple[ctypes.Array[ctypes.c_int64], int, int, int]"]


@functools.lru_cache(maxsize=16384)
def _plan(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...] | None, want: int) -> Plan:
    """Return how the library iterates over a tensor (``plan_t`` in stats.h), and the tensor's number of elements.

    ``strides``: in elements; None for a contiguous tensor. ``want``: block sizes as from :func:`wanted`.
    """
    return _pack(dtype, want, reference.fingerprint_seed(dtype, shape), walk(shape, strides))


@functools.lru_cache(maxsize=4096)
def _update_plan(dtype: torch.dtype, shape: torch.Size) -> Plan:
    """Return the plan of an update: its elements as one row, its fingerprint seed that of an FP32 tensor."""
    return _pack(dtype, 0, reference.fingerprint_seed(torch.float32, shape), walk((shape.numel(),), None))


def _pack(dtype: torch.dtype, want: int, seed: int, walked: tuple[Dimension, list[Dimension]]) -> Plan:
    """Choose the tiles and lay the plan out as the library reads it."""
    (columns, column_stride, _), others = walked
    # Tiles run along the last dimension and the one nearest in memory, if that is long enough to fill them.
    room = _TILE // min(_padded(columns), _TILE)
    nearest = min(range(len(others)), key=lambda i: (-min(others[i][0], room, 16), others[i][1], -i))
    rows, row_stride, row_pitch = others.pop(nearest)
    across = row_stride < column_stride and rows > 1  # then a tile should be many rows high
    limit = _WIDEST if across else _TILE
    pieces = math.ceil(columns / limit)
    tile_columns = columns if pieces == 1 else _padded(max(math.ceil(columns / pieces), _WIDEST))
    tile_rows = min(rows, max(1, _TILE // _padded(tile_columns)))
    row_tiles, column_tiles = math.ceil(rows / tile_rows), math.ceil(columns / tile_columns)
    outer = others + [(1, 0, 0)] * (_MAX_OUTER - len(others))
    numel, tiles = rows * columns, row_tiles * column_tiles
    for size, _, _ in others:
        numel, tiles = numel * size, tiles * size
    fields = [CODES[dtype], want, numel, reference.signed64(seed), columns, column_stride, rows, row_stride, row_pitch]
    fields += [tile_rows, tile_columns, row_tiles, column_tiles, tiles, len(others)]
    for part in zip(*outer, strict=True):
        fields += part
    return (ctypes.c_int64 * _PLAN_WIDTH)(*fields), numel


def _padded(columns: int) -> int:
    """Return the length of a tile's row with the padding that blocks need, as the library computes it."""
    if columns > _WIDEST:
        return math.ceil(columns / _WIDEST) * _WIDEST
    return 1 << (columns - 1).bit_length()
