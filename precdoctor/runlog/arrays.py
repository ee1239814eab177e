"""Arrow arrays from NumPy and Python values by their buffers alone.

``pa.array`` imports pandas at its first call, which costs a process that only writes 0.1 s and tens of megabytes; it is
left for values of unexpected types, which it converts or refuses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bits: TypeAlias = npt.NDArray[np.bool_]


def numbers(values: npt.NDArray[Any], valid: Bits | None = None) -> pa.Array:
    """A numeric array that shares the memory of ``values``.

    Args:
        values: one-dimensional, of a dtype Arrow has, not bool.
        valid: false where the value is null; None: nowhere.
    """
    values = np.ascontiguousarray(values)
    kind = _arrow_type(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [_bitmap(valid), pa.py_buffer(values)])


def flags(values: Bits, valid: Bits | None = None) -> pa.Array:
    """A boolean array; ``valid`` as for :func:`numbers`."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [_bitmap(valid), _bits(values)])


def strings(values: Sequence[str | None]) -> pa.Array:
    """A string array.

    Raises:
        UnicodeEncodeError: a lone surrogate.
    """
    encoded = [b"" if value is None else value.encode() for value in values]
    valid = np.fromiter((value is not None for value in values), np.bool_, len(values))
    buffers = [_bitmap(valid), pa.py_buffer(_ends(map(len, encoded), len(encoded))), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def lists(lengths: npt.NDArray[Any] | Sequence[int], values: pa.Array, valid: Bits | None = None) -> pa.Array:
    """A list array; ``values`` are the elements of all lists, one list after the other, null ones being empty."""
    offsets = _ends(lengths, len(lengths))
    buffers = [_bitmap(valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.list_(values.type), len(lengths), buffers, children=[values])


def column(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array | None:
    """An array of type ``kind``; None where the values are not plainly of that type.

    Raises:
        UnicodeEncodeError: a lone surrogate.
    """
    if isinstance(values, np.ndarray):
        fits = values.ndim == 1 and values.dtype != np.bool_ and _numpy_type(kind) == values.dtype
        return numbers(values) if fits else None
    dtype = _numpy_type(kind)
    if dtype is not None:
        return _numbers_of(values, dtype)
    if pa.types.is_list(kind):
        return _lists_of(values, kind)
    if kind == pa.string():
        return strings(values) if _all(values, (str,)) else None
    if kind != pa.bool_() or not _all(values, (bool,)):
        return None
    filled, valid = _filled(values)
    return flags(np.array(filled, np.bool_), valid)


def _numbers_of(values: Sequence[Any], dtype: np.dtype[Any]) -> pa.Array | None:
    if not _all(values, (int,) if dtype.kind in "iu" else (float, int)):
        return None
    filled, valid = _filled(values)
    if dtype.kind == "u" and min(filled, default=0) < 0:
        return None
    try:
        return numbers(np.array(filled, dtype), valid)
    except OverflowError:
        return None


def _filled(values: Sequence[Any]) -> tuple[list[Any], Bits | None]:
    """The values with zeros for null ones, and which are not null: None where all are."""
    if None not in values:
        return list(values), None
    valid = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return [0 if value is None else value for value in values], valid


def _lists_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    if not _all(values, (list, tuple)):
        return None
    flat = list(itertools.chain.from_iterable(value for value in values if value is not None))
    inner = column(flat, kind.value_type)
    valid = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return None if inner is None else lists([len(value or ()) for value in values], inner, valid)


def _all(values: Sequence[Any], kinds: tuple[type, ...]) -> bool:
    return all(value is None or type(value) in kinds for value in values)


_arrow_type = functools.cache(pa.from_numpy_dtype)


@functools.cache
def _numpy_type(kind: pa.DataType) -> np.dtype[Any] | None:
    return np.dtype(kind.to_pandas_dtype()) if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None


def _ends(lengths: npt.NDArray[Any] | Sequence[int] | Any, count: int) -> npt.NDArray[np.int32]:
    """Offsets of ``count`` consecutive pieces: 0, and where each one ends."""
    offsets = np.zeros(count + 1, np.int32)
    some = lengths if isinstance(lengths, (np.ndarray, list, tuple)) else np.fromiter(lengths, np.int32, count)
    np.cumsum(some, out=offsets[1:])
    return offsets


def _bitmap(valid: Bits | None) -> pa.Buffer | None:
    """Arrow's validity bitmap; none where everything is valid."""
    return None if valid is None or valid.all() else _bits(valid)


def _bits(values: Bits) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
