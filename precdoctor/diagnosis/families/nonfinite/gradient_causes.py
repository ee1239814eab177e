"""Why a gradient is non-finite although the loss is finite: a derivative with a pole, or a discarded value.

If the forward pass discards an element (``where``, ``masked_fill``, an index), autograd gives it a gradient of zero.
Zero times an infinite derivative is NaN: the trap of ``where``. A gradient that is zero for another reason (a mask
multiplied in, a saturated ``tanh``) is not that trap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from precdoctor.diagnosis.analyses.op_facts import NEG_INF, Op, Replay
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.claims.words import plural, there_are
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import PowerTerm, arithmetic_cause, short_number
from precdoctor.diagnosis.families.nonfinite.incident import Cause
from precdoctor.numerics.nonfinite import op_names

#: Autograd nodes whose forward op discards elements.
_DISCARDING_NODES = ("Where", "MaskedFill", "Index", "MaskedSelect", "Clamp", "Minimum", "Maximum", "Slice", "Select")
#: Autograd nodes whose result is zero where the incoming gradient is zero.
_ZERO_PRESERVING = (
    *("View", "UnsafeView", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Permute", "Transpose", "T", "Clone"),
    *("ToCopy", "Neg", "Add", "Sub", "Rsub", "Mul", "Div"),
)
#: Maximum number of ops to go back from a gradient to a discarding op: a reshape, a cast and a sum may lie between.
_DEPTH = 4
#: Autograd nodes of norms, each with words for the point at which it has no derivative.
_NORM_NODES = {
    **dict.fromkeys(("LinalgVectorNorm", "Norm", "Dist", "Cdist", "CdistForward"), "a norm at 0"),
    "Hypot": "hypot at (0, 0)",
    "Std": "a standard deviation at 0",
}
#: Autograd nodes whose derivative is infinite or undefined at the edge of the function's domain.
_NODES_WITH_EDGES = op_names(
    "Sqrt Rsqrt Log Log2 Log10 Log1P Log1p Pow Acos Asin Atanh Acosh Reciprocal Logit Erfinv Xlogy Div "
    "LinalgVectorNorm Norm Lgamma Digamma Atan2"
)


def gradient_cause(replay: Replay, op: Op, loss_scale: float | None) -> Cause | None:
    """The cause if ``op``, a backward op, is the culprit; None if :func:`.arithmetic_cause` has to explain it."""
    node, forward_op = op.derivative_of, replay.ops.get(op.forward) if op.forward is not None else None
    scale, half = loss_scale or 1.0, any(r.dtype == "float16" and r.bad for r in op.results)
    if op.finite_in_fp64 and half and scale > 1.0:
        return Cause("loss-scale-overflow", 0.9, f"a float16 gradient left its range at loss scale {scale:g}")
    if forward_op is not None and forward_op.phase != "backward" and forward_op.bad_out & ~NEG_INF:
        if not _is_discarded(replay, forward_op) and (overflow := _overflow_cause(replay, op)) is not None:
            return overflow
        why = f"{forward_op.short} is also non-finite in the forward pass, which discards its result"
        return Cause("where-gradient-trap", 0.9, why)
    operand = forward_op.first_operand if forward_op is not None else None
    zeros = f": {there_are(operand.zero, 'element')} exactly 0 there" if operand is not None and operand.zero else ""
    incoming = op.first_operand
    if node in _NODES_WITH_EDGES and incoming is not None and _comes_from_discarding(replay, op, incoming):
        why = f"0 times the infinite derivative of {node.lower()} is NaN{zeros}{_overflow_words(op)}"
        return Cause("where-gradient-trap", 0.9, why)
    if node in {"Sqrt", "Rsqrt"} or (node == "Pow" and _is_square_root(op, forward_op)):
        return Cause("sqrt-gradient-at-zero", 0.95, f"the derivative of a square root at 0 is infinite{zeros}")
    if node in _NORM_NODES and op.finite_in_fp64 is not True:
        zeros = "" if node == "Hypot" else zeros  # ``operand`` is only the first of two
        return Cause("norm-gradient-at-zero", 0.9, f"the derivative of {_NORM_NODES[node]} is not defined{zeros}")
    if node == "Pow":
        return _power_cause(op, forward_op)
    if node not in _NODES_WITH_EDGES:
        return None
    reach = f" (operand from {short_number(operand.min)} to {short_number(operand.max)})" if operand is not None else ""
    why = f"the derivative of {node.lower()} is infinite at the edge{reach}{zeros}"
    return Cause("domain-edge-gradient", 0.9, why)


def discarded_value_cause(replay: Replay, op: Op) -> Cause:
    """The cause of non-finite gradients if ``op``, a forward op, made a non-finite value but the loss is finite."""
    if not _is_discarded(replay, op) and (overflow := _overflow_cause(replay, op)) is not None:
        return overflow
    meets_gradient = any(o.phase == "backward" for i in replay.path if (o := replay.ops.get(i)) is not None)
    if not meets_gradient and (cause := arithmetic_cause(replay, op)) is not None:
        return replace(cause, why=f"{cause.why}; the loss leaves that out, its gradient does not")
    why = f"the forward pass discards the non-finite result of {op.short}, but not its gradient"
    return Cause("where-gradient-trap", 0.9, why)


def _overflow_cause(replay: Replay, op: Op) -> Cause | None:
    """The cause of a result that overflowed but was not discarded (tanh of Inf is 1, its gradient NaN); else None."""
    cause = arithmetic_cause(replay, op) if op.finite_in_fp64 else None
    if cause is None:
        return None
    return replace(cause, why=f"{cause.why}; the forward pass still ends finite, the backward pass does not")


# -- discarded values -------------------------------------------------------------------------------------------------


def _comes_from_discarding(replay: Replay, op: Op, incoming: Operand) -> bool:
    """Whether the forward pass discarded the value, so that ``incoming``, the gradient that ``op`` read, is zero."""
    if incoming.value not in (0.0, None) or not incoming.zero:
        return False
    gathered = any(o.derivative_of == "Gather" for o in _producers(replay, [op]))  # the others have a gradient of 0
    return (gathered and incoming.value == 0.0) or _meets_discarding(replay, [op], through=None)


def _overflow_words(op: Op) -> str:
    """A clause: gradients that FP64 holds, so that the operand is too small for the format, not 0; may be empty."""
    exact, made = op.reference, next((r for r in op.results if r.bad), None)
    more = made.bad - exact.bad if exact is not None and made is not None else 0
    if more <= 0:
        return ""
    return f"; {plural(more, 'more gradient')} overflow{'s' if more == 1 else ''} where the operand is close to 0"


def _is_discarded(replay: Replay, op: Op) -> bool:
    """Whether the forward pass discards the non-finite result of ``op``, so that only its gradient is non-finite."""
    backward_ops = [o for i in replay.path if i > op.index and (o := replay.ops[i]).phase == "backward"]
    return _meets_discarding(replay, backward_ops[:1], through=_ZERO_PRESERVING)


def _meets_discarding(replay: Replay, ops: Sequence[Op], through: Sequence[str] | None) -> bool:
    """Whether a discarding op made an operand of ``ops``, at most ``_DEPTH`` ops back ``through`` nodes (None: any)."""
    level = list(_producers(replay, ops))
    for _ in range(_DEPTH):
        if any(o.derivative_of.startswith(_DISCARDING_NODES) and _zeroes_gradient(o) for o in level):
            return True
        level = list(_producers(replay, (o for o in level if through is None or o.derivative_of in through)))
    return False


def _zeroes_gradient(op: Op) -> bool:
    """Whether a backward op makes the gradient zero at the failing element; also True if the log does not show it."""
    if not op.operands:
        return False  # an op that only creates the zeros to fill in
    result = op.results[0] if op.results else None
    if result is None or result.value is None:
        return True
    if isinstance(masked := op.settings.get("mask"), bool):
        return masked
    if isinstance(condition := op.settings.get("condition"), bool) and len(op.operands) == 2:
        return op.operands[0 if condition else 1].shape != result.shape
    operand_values = [o.value for o in op.operands if o.shape == result.shape]
    return result.value == 0.0 and any(value not in (0.0, None) for value in operand_values)


def _producers(replay: Replay, ops: Iterable[Op]) -> Iterable[Op]:
    indices = dict.fromkeys(i for op in ops for m in op.makers for i in m if isinstance(i, int))
    return (o for i in indices if (o := replay.ops.get(i)) is not None and o.phase == "backward")


# -- powers -----------------------------------------------------------------------------------------------------------


def _power_cause(op: Op, power: Op | None) -> Cause | None:
    """The cause if ``op`` made a non-finite derivative ``p * x ** (p - 1)`` of the forward op ``power``.

    None if :func:`.arithmetic_cause` has to explain it.
    """
    at = op if op.short == "pow" else power
    if op.finite_in_fp64:
        return None  # an overflow
    if at is None:
        return Cause("domain-edge-gradient", 0.8, "the derivative of a power below 1 is infinite at 0")
    base, exponent = PowerTerm.of(at, "self"), PowerTerm.of(at, "exponent")
    if base.zeros:
        zeros = base.operand.zero if base.operand is not None else 0
        there = f": {there_are(zeros, 'element')} exactly 0 there" if zeros else ""
        shown = f", where it takes 0 to the power {exponent.words()}" if at is op else ""
        return Cause("domain-edge-gradient", 0.9, f"the derivative of a power below 1 is infinite at 0{shown}{there}")
    if base.negative:
        lowest = base.operand.min if base.operand is not None else base.value
        why = f"a derivative of powers of negative values down to {short_number(lowest)}"
        return Cause("domain-error", 0.9, why)
    return None


def _is_square_root(op: Op, power: Op | None) -> bool:
    """Whether a power is a square root: its exponent is 0.5, or that of its derivative ``op`` is -0.5."""
    exponent = PowerTerm.of(power, "exponent").value if power is not None else None
    return exponent == 0.5 or (exponent is None and op.short == "pow" and PowerTerm.of(op, "exponent").value == -0.5)
