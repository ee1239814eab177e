"""Why an optimizer step made a weight non-finite of finite gradients: its settings and its state at that element."""

from __future__ import annotations

import math
from collections.abc import Sequence

from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.tensor_causes import Cause
from precdoctor.diagnosis.survey.op_facts import BadSetting, Op, Operand, real
from precdoctor.diagnosis.survey.rows import known_format

#: State tensors whose root the update divides by.
_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "v")


def settings_cause(op: Op, settings: Sequence[BadSetting]) -> Cause | None:
    """A hyper-parameter that is NaN or infinite, by its name or as the scalar that the operation was given.

    The vocabulary of causes has no name for it: it is ``other``, and the words say which.
    """
    if (given := op.operand("grad")) is not None and given.bad:
        return None
    if settings:
        same = [s for s in settings if s.name == settings[0].name]
        return Cause("other", 0.97, f"{words_of(same)}, and every weight that it is multiplied with becomes so")
    return None if op.name.startswith("optim.") else scalar_cause(op)


def scalar_cause(op: Op) -> Cause | None:
    """A NaN or an infinity that the user's code computed with Python's numbers and gave to an operation on tensors."""
    if any(o.bad for o in op.operands):
        return None
    scalar = next((k for k, v in op.settings.items() if (x := real(v)) is not None and not math.isfinite(x)), None)
    if scalar is None:
        return None
    return Cause("other", 0.95, f"the scalar `{scalar}` that {op.short} was given is {op.settings[scalar]}")


def words_of(settings: Sequence[BadSetting]) -> str:
    """``the learning rate of parameter group 0 is NaN``."""
    first = settings[0]
    more = f" (and of group{'s' if len(settings) > 2 else ''} {', '.join(str(s.group) for s in settings[1:])})"
    return f"{first.words}{more if len(settings) > 1 else ''} is {first.is_words}"


def optimizer_cause(op: Op) -> Cause:
    """The cause of one bad parameter, from the facts of its step."""
    bad_state = next((o for o in op.operands if o.bad and o.argument not in {"weight", "grad"}), None)
    if (given := op.operand("grad")) is not None and given.bad:
        why = (
            f"after the step the gradient holds {given.count_words()}: a closure made it anew, or the step wrote to it"
        )
        return Cause("other", 0.5, why)
    if (weight := op.operand("weight")) is not None and weight.bad:
        return Cause("nonfinite-weights", 0.9, "the weight was non-finite before the step")
    if bad_state is not None and not bad_state.nan:
        return Cause("optimizer-overflow", 0.95, _overflow_words(op, bad_state))
    divisor = next((o for name in _SECOND_MOMENTS if (o := op.operand(name)) is not None), None)
    if divisor is not None and (words := _division(op, divisor)) is not None:
        return Cause("optimizer-division-by-zero", 0.95, words)
    if bad_state is not None:
        return Cause("optimizer-overflow", 0.7, _overflow_words(op, bad_state))
    return Cause("optimizer-overflow", 0.8, f"the update left the range of the weight{_rate(op)}")


def _division(op: Op, divisor: Operand) -> str | None:
    """In words why the root of the second moment plus eps is zero; None when it is not."""
    zero_there = divisor.value == 0.0 if divisor.value is not None else divisor.zero > 0
    if not zero_there:
        return None
    eps, fmt = op.settings.get("eps"), known_format(divisor.dtype)
    flushed = isinstance(eps, (int, float)) and fmt is not None and 0.0 < eps <= fmt.flush_limit
    if isinstance(eps, (int, float)) and eps != 0 and not flushed:
        return None
    reason = f"eps {eps:g} is 0 in {divisor.dtype}" if flushed else "eps is 0"
    return f"`{divisor.argument}` holds {plural(divisor.zero, 'exact zero')} ({divisor.dtype}) and {reason}"


def _overflow_words(op: Op, state: Operand) -> str:
    grad = op.operand("grad")
    reach = f" from gradients up to {grad.amax:.4g}" if grad is not None and grad.amax is not None else ""
    fmt = known_format(state.dtype)
    limit = f", whose range ends at {fmt.max:.6g}" if fmt is not None else ""
    return f"state `{state.argument}` ({state.dtype}{limit}) holds {state.count_words()}{reach}"


def _rate(op: Op) -> str:
    rate = op.settings.get("lr")
    return f": the learning rate is {rate:g}" if isinstance(rate, (int, float)) and math.isfinite(rate) else ""
