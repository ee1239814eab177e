"""Values that the forward pass throws away (``where``, ``masked_fill``, an index), as their gradients tell of it.

Autograd gives such an element a gradient of zero, and zero times an infinite derivative is NaN: the trap of ``where``.
A zero that was there before, from a mask that is multiplied in or a saturated ``tanh``, is no trap of that kind.
"""

from __future__ import annotations

from collections.abc import Iterable

from precdoctor.diagnosis.survey.op_facts import Examined, Op, Operand

_DISCARDING = ("Where", "MaskedFill", "Index", "MaskedSelect", "Clamp", "Minimum", "Maximum", "Slice", "Select")
#: Nodes whose gradient is zero where the one that came to them is, and nowhere else.
_PASSING = (
    *("View", "UnsafeView", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Permute", "Transpose", "T", "Clone"),
    *("ToCopy", "Neg", "Add", "Sub", "Rsub", "Mul", "Div"),
)
_DEPTH = 4


def thrown_away(examined: Examined, op: Op, incoming: Operand) -> bool:
    """Whether the gradient that met an infinite derivative is zero because the forward pass threw the value away.

    Args:
        examined: the incident.
        op: of the backward pass, the first that is not finite.
        incoming: its operand that is the gradient.
    """
    if incoming.value not in (0.0, None) or not incoming.zero:
        return False
    level = list(_made_by(examined, [op]))
    for _ in range(_DEPTH):
        if any(_node(o).startswith(_DISCARDING) and _zeroes(o) for o in level):
            return True
        level = list(_made_by(examined, level))
    return False


def is_discarded(examined: Examined, op: Op) -> bool:
    """Whether a result of the forward pass that is not finite spoils its gradient because it is thrown away.

    Args:
        examined: the incident, which is about gradients.
        op: of the forward pass.
    """
    meeting = next((o for i in examined.path if i > op.index and (o := examined.ops[i]).phase == "backward"), None)
    level = list(_made_by(examined, [meeting] if meeting is not None else []))
    for _ in range(_DEPTH):
        if any(_node(o).startswith(_DISCARDING) and _zeroes(o) for o in level):
            return True
        level = list(_made_by(examined, (o for o in level if _node(o) in _PASSING)))
    return False


def _zeroes(op: Op) -> bool:
    """Whether it is this op that gives the element no gradient; true, too, where the log does not tell."""
    if not op.operands:
        return False  # it makes the zero to be put there
    result = op.results[0] if op.results else None
    if result is None or result.value is None:
        return True
    if isinstance(masked := op.settings.get("mask"), bool):
        return masked
    if isinstance(chosen := op.settings.get("condition"), bool) and len(op.operands) == 2:
        return op.operands[0 if chosen else 1].shape != result.shape
    given = [o.value for o in op.operands if o.shape == result.shape]
    return result.value == 0.0 and any(value not in (0.0, None) for value in given)


def _made_by(examined: Examined, ops: Iterable[Op]) -> Iterable[Op]:
    indices = dict.fromkeys(i for op in ops for m in op.makers for i in m if isinstance(i, int))
    return (o for i in indices if (o := examined.ops.get(i)) is not None and o.phase == "backward")


def _node(op: Op) -> str:
    return (op.node or "").rstrip("0123456789").removesuffix("Backward")
