"""Running one op again on FP64 copies of its operands: what it would have given in a format wide enough."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.ops.dispatched_ops import is_out_variant, tensors_in
from precdoctor.recording.process import attach

#: An op with more operand elements than this is not run again.
MAX_ELEMENTS = 1 << 26
_NARROW = frozenset((torch.float32, torch.float16, torch.bfloat16))
_FP8 = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)


def in_fp64(
    func: Any, args: Any, kwargs: Any, replaced: Mapping[int, Tensor], *, limit: int = MAX_ELEMENTS
) -> Any | None:
    """The result of an op on FP64 copies of its operands, asked for in FP64; nothing it is given is written to.

    Args:
        func: the ``OpOverload``, to be called with ``args`` and ``kwargs``.
        replaced: tensors to take in place of operands, by ``id`` of the operand.
        limit: elements of all operands together.

    Returns:
        The result; None where it cannot be had: random ops, no FP64 kernel, operands that must not be wide, too large.
    """

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = replaced.get(id(value), value)
            return value.to(torch.float64) if value.dtype in _NARROW or value.dtype in _FP8 else value.clone()
        if isinstance(value, (list, tuple)):
            return type(value)(map(widened, value))
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _NARROW or value in _FP8 else value
        return value

    if torch.Tag.nondeterministic_seeded in func.tags or is_out_variant(func):
        return None
    if sum(x.numel() for x in tensors_in((args, kwargs))) > limit:
        return None
    try:
        return func(*map(widened, args), **{k: widened(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError, NotImplementedError) as error:
        attach.let_through(error)
        return None
