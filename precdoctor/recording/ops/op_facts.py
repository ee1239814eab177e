"""Facts of one op, taken while its operands exist: their ranges, its settings, and its FP64 result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precdoctor.recording.ops.dispatched_ops import is_out_variant, named_arguments, op_name, tensors_in
from precdoctor.recording.ops.tensor_facts import describe, dtype_name, value_at
from precdoctor.recording.process import attach

#: Maximum number of operand elements for an op to be run again.
MAX_ELEMENTS = 1 << 26
_NARROW = frozenset((torch.float32, torch.float16, torch.bfloat16))
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
#: Ops whose integer operands are described: dividing by a count of 0 makes a NaN of finite numbers.
_DIVIDES = frozenset(("div", "true_divide", "floor_divide", "remainder", "fmod"))
_MAX_OPERANDS = 8
_MAX_RESULTS = 3


def in_fp64(
    func: Any, args: Any, kwargs: Any, replaced: Mapping[int, Tensor], *, limit: int = MAX_ELEMENTS
) -> Any | None:
    """Run an op on FP64 copies of its operands with FP64 as requested dtype; nothing it is given is written to.

    Args:
        replaced: tensors that replace operands, by ``id`` of the operand.
        limit: maximum number of elements of all operands together.

    Returns:
        The result; None for random ops, ``out=`` variants, operands beyond ``limit``, and ops that fail in FP64.
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


#: An element: its index, and the shape of its tensor.
Spot = tuple[list[int], torch.Size]


class Wanted(NamedTuple):
    """Indices of ops whose full facts are wanted; and an element whose value is wanted of each tensor of its shape."""

    indices: frozenset[int] = frozenset()
    spot: Spot | None = None


def closer_look(
    func: Any,
    args: Any,
    kwargs: Any,
    swapped: dict[int, Tensor],
    results: list[Tensor],
    *,
    values: bool,
    spot: Spot | None = None,
) -> dict[str, Any]:
    """Return the facts of an op that has just run.

    Args:
        swapped: copies of operands from before an in-place op, by ``id``.
        results: tensors that it returned or wrote to.
        values: whether to add the operands' elements at the result's first bad one.
        spot: the element to take instead if every result is finite.
    """
    operands: list[dict[str, Any]] = []
    integers: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    described = [describe(r) for r in results]
    at = next((i for i, r in enumerate(described) if "first_bad" in r), None)
    bad = described[at] if at is not None else None
    if bad is not None:
        spot = (bad["first_bad"], torch.Size(bad["shape"]))
    elif spot is not None and all(r.shape != spot[1] for r in results):
        spot = None
    for name, argument in named_arguments(func, args, kwargs):
        for x in _as_list(argument):
            if isinstance(x, Tensor):
                if len(operands) < _MAX_OPERANDS and (x.is_floating_point() or x.is_complex()):
                    x = swapped.get(id(x), x)  # noqa: PLW2901 - as it was before
                    operands.append({"argument": name, **describe(x)})
                    if values and spot is not None:
                        operands[-1]["value"] = value_at(x, *spot)
                elif op_name(func).rstrip("_") in _DIVIDES and not (x.is_floating_point() or x.is_complex()):
                    integers.append({"argument": name, **_integer_facts(x, spot if values else None)})
                elif x.dtype is torch.bool and values and spot is not None:  # the choice of a ``where`` there
                    settings.setdefault(name, bool(chosen) if (chosen := value_at(x, *spot)) is not None else None)
            elif (plain := plain_setting(x)) is not None:
                settings.setdefault(name, plain)
    if values and spot is not None and bad is None:
        for x, facts in zip(results, described, strict=True):
            facts["value"] = value_at(x, *spot) if x.shape == spot[1] else None
    return {
        "operands": operands,
        **({"integers": integers} if integers else {}),
        "settings": settings,
        "results": described[:_MAX_RESULTS],
        "reference": _reference(in_fp64(func, args, kwargs, swapped), at or 0, bad, values=values),
    }


def _integer_facts(x: Tensor, spot: Spot | None) -> dict[str, Any]:
    """Return the facts of a tensor of integers or Booleans."""
    real = x.double()
    facts = {**describe(real), "dtype": dtype_name(x.dtype)}
    return facts if spot is None else {**facts, "value": value_at(real, *spot)}


def _as_list(argument: Any) -> list[Any]:
    """Return a list of tensors as it is, any other argument as a list of one."""
    if isinstance(argument, (list, tuple)) and any(isinstance(x, Tensor) for x in argument):
        return list(argument)
    return [argument]


def plain_setting(value: Any) -> Any:
    """Return a number, a dtype or a list of numbers in JSON's types; None for any other argument."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)) and all(isinstance(v, (int, float)) for v in value):
        return list(value)
    return None


def _reference(result: Any, at: int, bad: dict[str, Any] | None, *, values: bool) -> dict[str, Any] | None:
    """Return the facts of the op's ``at``-th result tensor in FP64; None if there is none."""
    given = list(result) if isinstance(result, (tuple, list)) else [result]
    tensors = [x for x in given if isinstance(x, Tensor)]
    first = tensors[at] if at < len(tensors) else None
    if first is None or first.dtype != torch.float64:
        return None
    facts = describe(first)
    if values and bad is not None and list(first.shape) == bad["shape"]:
        facts["value"] = value_at(first, bad["first_bad"], first.shape)
    return facts
