"""Builds Arrow arrays from NumPy and Python values directly from buffers, without ``pa.array``.

The first call of ``pa.array`` imports pandas, which costs a writing process 0.1 s and tens of megabytes. It is used
only for values of unexpected types, which it converts or refuses. ``take`` is avoided because it imports
``pyarrow.compute``, another 0.06 s.
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

_STRING = pa.string()


def numbers(values: npt.NDArray[Any], valid: Bits | None = None) -> pa.Array:
    """A numeric array that shares the memory of ``values``.

    Args:
        values: one-dimensional, of a dtype Arrow has, not bool.
        valid: False for each null; None: no nulls.
    """
    values = np.ascontiguousarray(values)
    kind = _arrow_type(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [_bitmap(valid), pa.py_buffer(values)])


def flags(values: Bits, valid: Bits | None = None) -> pa.Array:
    """A boolean Arrow array; ``valid`` as for :func:`numbers`."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [_bitmap(valid), _bits(values)])


def strings(values: Sequence[str | None]) -> pa.Array:
    """A string array; None becomes null.

    Raises:
        UnicodeEncodeError: a value holds a lone surrogate.
    """
    return _texts([b"" if value is None else value.encode() for value in values], _valid_mask(values))


def chosen(texts: Sequence[bytes], which: npt.NDArray[np.int32]) -> pa.Array:
    """A string array with the elements ``texts[i]`` (UTF-8) for each ``i`` in ``which``."""
    return _texts(list(map(texts.__getitem__, which.tolist())), None)


def _texts(encoded: list[bytes], valid: Bits | None) -> pa.Array:
    ends = _ends(list(map(len, encoded)), len(encoded))
    buffers = [_bitmap(valid), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(_STRING, len(encoded), buffers)


def lists(lengths: npt.NDArray[Any] | Sequence[int], values: pa.Array, valid: Bits | None = None) -> pa.Array:
    """A list array; ``values`` are the elements of all lists, one list after the other. A null list has length 0."""
    offsets = _ends(lengths, len(lengths))
    buffers = [_bitmap(valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.list_(values.type), len(lengths), buffers, children=[values])


def column(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array | None:
    """An array of type ``kind``; None if a value would need a conversion, which is left to ``pa.array``.

    Raises:
        UnicodeEncodeError: a value holds a lone surrogate.
    """
    dtype, types = _plain_types(kind)
    if isinstance(values, np.ndarray):
        return numbers(values) if values.ndim == 1 and dtype is not None and dtype == values.dtype else None
    if not types or not types.issuperset(map(type, values)):
        return None
    if dtype is not None:
        return _numbers_of(values, dtype)
    if kind == _STRING:
        return strings(values)
    if pa.types.is_list(kind):
        return _lists_of(values, kind)
    valid = _valid_mask(values)
    return flags(np.array(values if valid is None else [bool(value) for value in values], np.bool_), valid)


def _numbers_of(values: Sequence[Any], dtype: np.dtype[Any]) -> pa.Array | None:
    valid = _valid_mask(values)
    filled = values if valid is None else [0 if value is None else value for value in values]
    if dtype.kind == "u" and min(filled, default=0) < 0:
        return None
    try:
        return numbers(np.array(filled, dtype), valid)
    except OverflowError:
        return None


def _lists_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    flat = list(itertools.chain.from_iterable(value for value in values if value is not None))
    inner = column(flat, kind.value_type)
    return None if inner is None else lists([len(value or ()) for value in values], inner, _valid_mask(values))


def _valid_mask(values: Sequence[Any]) -> Bits | None:
    """The mask of the values that are not None; None if no value is None."""
    return np.fromiter((value is not None for value in values), np.bool_, len(values)) if None in values else None


@functools.cache
def _plain_types(kind: pa.DataType) -> tuple[np.dtype[Any] | None, frozenset[type]]:
    """``(NumPy dtype, or None if not numeric, Python types)`` of the values that become ``kind`` without conversion."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
        return dtype, frozenset((int, type(None)) if dtype.kind in "iu" else (float, int, type(None)))
    if pa.types.is_list(kind):
        return None, frozenset((list, tuple, type(None)))
    return None, frozenset({_STRING: (str, type(None)), pa.bool_(): (bool, type(None))}.get(kind, ()))


_arrow_type = functools.cache(pa.from_numpy_dtype)


def _ends(lengths: npt.NDArray[Any] | Sequence[int], count: int) -> npt.NDArray[np.int32]:
    """Offsets of ``count`` consecutive pieces: 0, then the end of each piece."""
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _bitmap(valid: Bits | None) -> pa.Buffer | None:
    """Arrow's validity bitmap; None if all values are valid."""
    return None if valid is None or valid.all() else _bits(valid)


def _bits(values: Bits) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
