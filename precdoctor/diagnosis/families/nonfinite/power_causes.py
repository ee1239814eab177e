"""Why a power, or its derivative, is non-finite: by its base and its exponent where it went wrong.

``x ** p`` has five ways out of the finite numbers (IEEE 754-2019, 9.2.1): a zero to a negative power, a negative number
to a power that is no integer, a large base, a large exponent; and going backward ``p * x ** (p - 1)`` of a zero where
``p < 1``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from precdoctor.diagnosis.claims.words import plural, there_are
from precdoctor.diagnosis.families.nonfinite.tensor_causes import Cause
from precdoctor.diagnosis.survey.op_facts import NAN, Op, Operand, real


@dataclass(frozen=True)
class _Number:
    """Base or exponent: a constant, or an operand with its value at the first bad element."""

    operand: Operand | None
    value: float | None

    @property
    def zeros(self) -> bool:
        """Whether it is 0 there, or may be."""
        if self.value is not None or self.operand is None:
            return self.value == 0.0
        return self.operand.zero > 0

    @property
    def negative(self) -> bool:
        """Whether it is below 0 there, or may be."""
        if self.value is not None or self.operand is None:
            return self.value is not None and self.value < 0
        return self.operand.negative > 0

    @property
    def magnitude(self) -> float | None:
        """How large it is there, or at most."""
        if self.value is not None and math.isfinite(self.value):
            return abs(self.value)
        return self.operand.amax if self.operand is not None else None

    def words(self) -> str:
        """What is known of it."""
        if self.value is not None:
            return f"{self.value:.4g}"
        if self.operand is None or self.operand.min is None or self.operand.max is None:
            return "a number that is not in the log"
        return f"values from {self.operand.min:.4g} to {self.operand.max:.4g}"


def power_cause(op: Op) -> Cause:
    """The cause of a power that is non-finite: ``pow`` with a tensor for its base, its exponent or both."""
    base, exponent = _number(op, "self"), _number(op, "exponent")
    if base.negative and (op.bad_out & NAN) and not _whole(exponent.value):
        name = "sqrt-of-negative" if exponent.value is not None and abs(exponent.value) == 0.5 else "domain-error"
        lowest = base.operand.min if base.operand is not None and base.operand.min is not None else base.value
        return Cause(name, 0.95, f"values down to {_told(lowest)} to the power {exponent.words()}")
    if base.zeros and exponent.negative:
        count = plural(base.operand.zero, "exact zero") if base.operand is not None and base.operand.zero else "0"
        return Cause("division-by-zero", 0.95, f"{count} to the power {exponent.words()}")
    if exponent.operand is None and exponent.value is None:
        return Cause("other", 0.5, "the exponent is not in the log")
    if _by_exponent(base, exponent):
        return Cause("exp-overflow", 0.85, f"{base.words()} to the power {exponent.words()} left the range")
    reach = f"values up to {_told(base.magnitude)}"
    return Cause("square-overflow", 0.9, f"{reach} to the power {exponent.words()} left the range")


def power_gradient_cause(op: Op, made: Op | None) -> Cause | None:
    """The cause of a derivative of a power; null where only the numbers of the op that computed it can tell.

    Args:
        op: of the backward pass.
        made: the power whose derivative that is.
    """
    at = op if op.short == "pow" else made
    if op.finite_in_fp64:
        return None  # the range ended
    if at is None:
        return Cause("domain-edge-gradient", 0.8, "the derivative of a power below 1 is infinite at 0")
    base, exponent = _number(at, "self"), _number(at, "exponent")
    if base.zeros:
        zeros = (
            f": {there_are(base.operand.zero, 'element')} exactly 0 there" if base.operand and base.operand.zero else ""
        )
        taken = f", where it takes 0 to the power {exponent.words()}" if at is op else ""
        why = f"the derivative of a power below 1 is infinite at 0{taken}{zeros}"
        return Cause("domain-edge-gradient", 0.9, why)
    if base.negative:
        lowest = base.operand.min if base.operand is not None else base.value
        return Cause("domain-error", 0.9, f"a derivative of powers of negative values down to {_told(lowest)}")
    return None


def is_root(op: Op, made: Op | None) -> bool:
    """Whether a power is a square root: by its exponent, or by that of its derivative, which is one less."""
    forward = _number(made, "exponent").value if made is not None else None
    return forward == 0.5 or (forward is None and op.short == "pow" and _number(op, "exponent").value == -0.5)


def _by_exponent(base: _Number, exponent: _Number) -> bool:
    """Whether a result left the range for the exponent's sake: it is larger than the base has binades."""
    if base.magnitude is None or exponent.magnitude is None or base.magnitude <= 0:
        return False
    return exponent.magnitude > abs(math.log2(base.magnitude))


def _number(op: Op, name: str) -> _Number:
    operand = op.operand(name)
    if operand is None:
        return _Number(None, real(op.settings.get(name)))
    constant = operand.min if operand.min is not None and operand.min == operand.max and not operand.bad else None
    return _Number(operand, operand.value if operand.value is not None else constant)


def _whole(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value == int(value)


def _told(value: float | None) -> str:
    return "nothing finite" if value is None else f"{value:.4g}"
