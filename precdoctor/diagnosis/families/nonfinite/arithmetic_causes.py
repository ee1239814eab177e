"""Why an op made a non-finite value of finite operands: from its name, its operands' ranges, and its result in FP64.

A result that is finite in FP64 left the range of its format (a range cause). For a result that is non-finite in FP64
the operation is undefined at its operands (a domain cause). IEEE 754-2019, section 7, defines both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from precdoctor.diagnosis.analyses.op_facts import NAN, POS_INF, Op, Replay, real
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.incident import Cause
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.numerics.nonfinite import op_names

#: Phrases to search for in ``Cause.why``: the format flushed a divisor, or may have rounded it to 0; rounding made a
#: root's operand negative, which is a difference of squares.
UNDERFLOWED, MAY_BE_ROUNDED = "underflowed in", "may have rounded it to 0"
ROUNDING_ERROR, SQUARES = "by rounding alone", "a difference of squares"
#: Phrases to search for in ``Cause.why``: the op averaged over nothing.
ZERO_QUOTIENT, NO_TARGET = NOTHING_COUNTED = ("0 / 0", "no target counts")
#: Units in the last place up to which rounding explains a negative difference: two means are off by a few each.
_ROUNDING_ULPS = 8


#: The largest operand at which each logarithm is not finite.
_LOGS = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "xlogy": 0.0, "special_xlog1py": -1.0}
_EXPS = op_names("exp exp2 expm1 sinh cosh special_expm1 special_exp2")
#: Exponentials that overflow for large negative operands as well.
TWO_SIDED = op_names("sinh cosh")
_PRODUCTS = op_names(
    "mm addmm bmm baddbmm addbmm addmv mv dot vdot matmul linear convolution _convolution mkldnn_linear einsum "
    "_scaled_mm cudnn_convolution mkldnn_convolution convolution_backward mkldnn_rnn_layer _cudnn_rnn addcmul "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _trilinear "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _thnn_fused_lstm_cell"
)
_REDUCTIONS = op_names(
    "sum mean cumsum nansum logsumexp linalg_vector_norm norm var std var_mean std_mean native_layer_norm "
    "native_batch_norm native_group_norm _native_batch_norm_legit cudnn_batch_norm prod cumprod trace "
    "_cdist_forward _fused_rms_norm mse_loss smooth_l1_loss huber_loss index_add scatter_add segment_reduce avg_pool2d "
    "_adaptive_avg_pool2d add sub logcumsumexp logaddexp"
)
_CASTS = op_names("_to_copy to copy type_as convert_element_type")
_WEIGHT_NORMS = op_names("_weight_norm _weight_norm_interface")
_DOMAINS = op_names("acos asin atanh acosh erfinv logit lgamma digamma polygamma mvlgamma _ctc_loss fmod")
SOFTMAXES = op_names("_softmax _log_softmax softmax log_softmax _safe_softmax logsumexp logcumsumexp")
#: Losses that average over the targets that are not ignored, and divide by the sum of the targets' weights.
_MEAN_LOSSES = op_names("nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward nll_loss_nd cross_entropy_loss")
#: Ops in which an infinite Python scalar is a fault; as a fill value or a bound it is intended.
_WITH_SCALARS = op_names("add sub rsub mul div pow lerp addcmul")
_NORMS = op_names("linalg_vector_norm norm frobenius_norm sqrt hypot")
_SPREADS = op_names("std std_mean var var_mean")
#: Ops whose result is a norm if their operand is one.
_NORM_PRESERVING = op_names("clone _to_copy expand unsqueeze squeeze view reshape add clamp clamp_min detach")
_QUOTIENTS = op_names("div reciprocal true_divide addcdiv remainder floor_divide")


def arithmetic_cause(replay: Replay, op: Op) -> Cause | None:
    """The cause of a non-finite result of finite operands; None if the op is of no known kind."""
    first, name = op.first_operand, op.short
    if name in _WITH_SCALARS and (cause := scalar_cause(op)) is not None:
        return cause
    if name in _LOGS and first is not None:
        return _log_cause(op, first)
    if name in {"sqrt", "rsqrt"} and first is not None:
        return _root_cause(replay, op, first)
    if name == "pow":
        return _power_cause(op)
    if name in _QUOTIENTS:
        return _quotient_cause(replay, op)
    if name in _EXPS:
        return _exp_cause(op)
    if name in _DOMAINS and first is not None:
        return _domain_cause(op, first)
    if name in SOFTMAXES and any(o.pos_inf for o in op.operands):
        return Cause("inf-minus-inf", 0.7, "a softmax of +Inf subtracts Inf from Inf")
    return _inner_quotient_cause(op) or _range_cause(op)


def scalar_cause(op: Op) -> Cause | None:
    """The cause if an op on finite tensors was passed a NaN or infinite Python number; else None."""
    if any(o.bad for o in op.operands):
        return None
    scalar = next((k for k, v in op.settings.items() if (x := real(v)) is not None and not math.isfinite(x)), None)
    if scalar is None:
        return None
    return Cause("other", 0.95, f"the scalar `{scalar}` passed to {op.short} is {op.settings[scalar]}")


def _inner_quotient_cause(op: Op) -> Cause | None:
    """The cause if an op divides by zero inside: by the number of targets, or by the length of a filter; else None."""
    counts = len(op.results) < 2 or bool(op.results[1].amax)  # the second result is the sum of the targets' weights
    if op.short in _MEAN_LOSSES and op.bad_out & NAN and not counts:
        ignored = op.settings.get("ignore_index")
        why = f"{NO_TARGET} (each is ignore_index {ignored}, or has weight 0): the mean over none of them is 0/0"
        return Cause("division-by-zero", 0.95, why)
    direction = op.first_operand
    if op.short in _WEIGHT_NORMS and direction is not None and op.bad_out & NAN and direction.zero:
        zeros = f"{direction.zero:,} of {direction.numel:,} elements of the direction `v` are 0"
        return Cause("division-by-zero", 0.9, f"{zeros}: a filter of zeros has no length to divide by")
    return None


def _root_cause(replay: Replay, op: Op, operand: Operand) -> Cause:
    if operand.negative and (operand.value is None or operand.value < 0 or op.bad_out & NAN):
        why = f"its operand goes down to {short_number(operand.min)}{_difference_words(replay, op, operand)}"
        return Cause("sqrt-of-negative", 0.95, why)
    return Cause("division-by-zero", 0.95, _zero_words(replay, op, 0, "its operand"))


def _difference_words(replay: Replay, op: Op, operand: Operand) -> str:
    """Words if a root's negative operand is only the rounding error of a subtraction; else empty."""
    maker = _maker(replay, op, 0)
    while maker is not None and maker.short in {"add", "_to_copy", "clone"} and len(maker.operands) == 1:  # skip an eps
        maker = _maker(replay, maker, 0)
    if maker is None or maker.short != "sub" or len(maker.operands) != 2 or operand.min is None:
        return ""
    dtype, reach = maker.operands[0].dtype, max(o.amax or 0.0 for o in maker.operands)
    fmt = known_format(dtype)
    if fmt is None or not 0.0 < reach < math.inf:
        return ""
    ulp = math.ldexp(1.0, math.frexp(reach)[1] - 1 - fmt.mantissa_bits)
    if -operand.min > _ROUNDING_ULPS * ulp:
        return ""
    subtracted = _maker(replay, maker, 1)
    squares = subtracted is not None and (subtracted.short in {"square", "pow"} or _is_square(subtracted))
    what = SQUARES if squares else "a difference of numbers"
    return f" {ROUNDING_ERROR}: it is {what} up to {short_number(reach)}, which are {ulp:.2g} apart in {dtype}"


def _maker(replay: Replay, op: Op, at: int) -> Op | None:
    """The last op that wrote to operand number ``at`` of ``op``; None if the log lacks it, or if no replayed op did."""
    makers = op.makers[at] if at < len(op.makers) else ()
    index = makers[-1] if makers else None
    return replay.ops.get(index) if isinstance(index, int) else None


def is_norm(replay: Replay, op: Op, operand: Operand) -> bool:
    """Whether an operand of ``op`` is a norm or a square root."""
    return _maker_name(replay, op, operand) in _NORMS


def _maker_name(replay: Replay, op: Op, operand: Operand) -> str:
    """Short name of the op that made an operand, past casts, views and additions; empty if the log lacks it."""
    if operand not in op.operands:
        return ""
    maker = _maker(replay, op, op.operands.index(operand))
    while maker is not None and maker.short in _NORM_PRESERVING and maker.makers:
        maker = _maker(replay, maker, 0)
    return maker.short if maker is not None else ""


def too_large_constant(op: Op) -> float | None:
    """A finite constant in the code beyond the range of the op's format (``-1e9`` added to FP16 scores), or None."""
    fmt = op.result_format
    values = (op.settings.get(key) for key in ("other", "value", "fill_value"))
    numbers = (float(x) for x in values if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x))
    return next((x for x in numbers if fmt is not None and abs(x) > fmt.max), None)


def mask_filling(op: Op) -> float | None:
    """The fill value of a mask that a cast to a narrower format makes infinite (``finfo.min``, -1e9), or None."""
    operand = op.first_operand if op.short in _CASTS else None
    value = operand.value if operand is not None else None
    if operand is None or not value or not math.isfinite(value) or value not in (operand.min, operand.max):
        return None
    source, decade = known_format(operand.dtype), math.log10(abs(value))
    decimal = decade > 4 and abs(decade - round(decade)) < 1e-7  # four times the rounding error of FP32
    return value if decimal or (source is not None and abs(value) == source.max) else None


def _exp_cause(op: Op) -> Cause | None:
    operand = op.first_operand
    if operand is None:  # the log holds only the result
        fmt = op.result_format
        limit = f", which exp does from {math.log(fmt.max):.2f} on in {fmt.dtype}" if fmt and op.short == "exp" else ""
        why = f"it returned infinities{limit}; its operand is not in the log"
        return Cause("exp-overflow", 0.85, why) if op.bad_out & POS_INF else None
    fmt = known_format(operand.dtype)
    limit = f", {operand.dtype} ends at ln(max) {math.log(fmt.max):.2f}" if fmt is not None else ""
    lower = op.short in TWO_SIDED and operand.min is not None and -operand.min > (operand.max or 0.0)
    return Cause(
        "exp-overflow", 0.95, f"its operand reaches {short_number(operand.min if lower else operand.max)}{limit}"
    )


def _domain_cause(op: Op, operand: Operand) -> Cause:
    if op.short == "_ctc_loss":
        return Cause("other", 0.9, "no alignment of the target fits into the input: its probability is 0")
    why = f"its operand runs from {short_number(operand.min)} to {short_number(operand.max)}, past where it is defined"
    return Cause("domain-error", 0.9, why)


def _log_cause(op: Op, first: Operand) -> Cause:
    operand = op.operand("other") or first if op.short.startswith(("xlogy", "special")) else first
    if operand.min is not None and operand.min <= _LOGS[op.short]:
        counts = [plural(operand.zero, "exact zero")] if operand.zero else []
        if operand.negative:
            counts.append(f"{plural(operand.negative, 'negative value')} down to {short_number(operand.min)}")
        return Cause("log-of-nonpositive", 0.97, f"its operand holds {' and '.join(counts)}")
    return Cause("other", 0.5, f"{op.name} of positive values")


def _quotient_cause(replay: Replay, op: Op) -> Cause:
    divisor, constant = op.divisor, op.settings.get("other")
    if constant == 0:
        return Cause("division-by-zero", 0.97, "the divisor is the constant 0")
    if divisor is not None and divisor.zero:
        words = f"the divisor holds {plural(divisor.zero, 'exact zero')}"
        if divisor not in op.integers:
            words = _zero_words(replay, op, op.operands.index(divisor), "the divisor")
        words += "" if UNDERFLOWED in words else _zero_quotient_words(replay, op, divisor)
        return Cause("division-by-zero", 0.97, words)
    if constant is not None:
        return Cause("division-by-zero", 0.6, f"divided by {constant}")
    if divisor is None:
        return Cause("division-by-zero", 0.6, "the divisor is not in the log")
    why = f"the quotient left the range: the divisor's smallest magnitude is {short_number(divisor.amin_nonzero)}"
    return Cause("division-by-zero", 0.7, why)


def _zero_quotient_words(replay: Replay, op: Op, divisor: Operand) -> str:
    """Words if a quotient is 0 / 0, so that the divisor probably counted nothing; else empty.

    A norm or a standard deviation of zero does not count: its elements exist and are equal.
    """
    divided = op.operand("self")
    if _maker_name(replay, op, divisor) in _NORMS | _SPREADS:
        return ""
    if op.phase != "forward" or not op.bad_out & NAN or divided is None or divided is divisor or divided.bad:
        return ""
    both = all(o.amax == 0.0 or o.value == 0.0 for o in (divided, divisor))
    there = " there" if divisor.amax else ""
    return f", and the numerator is 0{there}: {ZERO_QUOTIENT}, a count of nothing or an empty selection" if both else ""


def _zero_words(replay: Replay, op: Op, at: int, what: str) -> str:
    """How many zeros operand number ``at`` (in words: ``what``) holds, and which op flushed them, if one did."""
    operand = op.operands[at]
    words = f"{what} holds {plural(operand.zero, 'exact zero')}"
    for index in op.makers[at] if at < len(op.makers) else ():
        maker = replay.ops.get(index) if isinstance(index, int) else None
        if maker is None or maker.reference is None or not maker.results:
            continue
        result, exact = maker.results[0], maker.reference
        if result.zero > exact.zero and exact.amin_nonzero is not None:
            return f"{words}, {UNDERFLOWED} {result.dtype} at {maker.short} (FP64 keeps {exact.amin_nonzero:.3g})"
    return words


def _range_cause(op: Op) -> Cause | None:
    """The cause for an op without a pole: overflow, Inf - Inf, a mean over nothing; None for no known kind."""
    fmt = op.result_format
    limit = f", {op.results[0].dtype} ends at {fmt.max:.6g}" if fmt is not None else ""
    reach = op.reference.amax if op.reference is not None and op.finite_in_fp64 else None
    exact = (
        f"in FP64 the result reaches {short_number(reach)}{limit}" if reach is not None else f"the range ended{limit}"
    )
    if (constant := too_large_constant(op)) is not None:
        return Cause("cast-overflow", 0.9, f"the constant {constant:g} does not fit into its operand's format{limit}")
    if op.short in _CASTS:
        widest = max((o.amax or 0.0 for o in op.operands), default=0.0)
        return Cause("cast-overflow", 0.97, f"values up to {short_number(widest)} were cast{limit}")
    if fmt is not None and reach is not None and reach <= fmt.max:
        exact = f"a number on the way left the range{limit}; the result itself reaches {short_number(reach)} in FP64"
    if op.short in _PRODUCTS:
        return Cause("matmul-overflow", 0.95, exact)
    if op.short == "square" or (op.short == "mul" and _is_square(op)):
        return Cause("square-overflow", 0.95, exact)
    if op.short == "mse_loss" and fmt is not None and _largest_difference(op) > math.sqrt(fmt.max):
        return Cause("square-overflow", 0.95, f"the square of a difference alone leaves the range: {exact}")
    if op.short in {"add", "sub"} and op.bad_out & NAN and not any(o.bad for o in op.operands):
        return Cause("inf-minus-inf", 0.7, "no two finite numbers make NaN: infinities met that the log does not show")
    out_of_range = fmt is not None and reach is not None and reach > fmt.max
    # An unknown op reduces if its result has fewer elements than an operand, as a summed loss has.
    if op.short in _REDUCTIONS or (out_of_range and any(o.numel > op.results[0].numel for o in op.operands)):
        if op.finite_in_fp64 is False and op.bad_out & NAN:
            return Cause("division-by-zero", 0.8, _empty_mean_words(op))
        return Cause("reduction-overflow", 0.9 if op.short not in {"add", "sub"} else 0.7, exact)
    if op.short == "mul" and op.bad_out & (POS_INF | NAN):
        return Cause("square-overflow", 0.6, f"a product left the range: {exact}")
    return None


def _largest_difference(op: Op) -> float:
    """A lower bound of the largest difference between elements of the op's two operands."""
    amax = [o.amax or 0.0 for o in op.operands[:2]]
    return max(amax) - min(amax) if len(amax) == 2 else 0.0


def _is_square(op: Op) -> bool:
    """Whether a product has the same tensor as both operands."""
    return len(op.makers) == 2 and op.makers[0] == op.makers[1] and len(op.operands) == 2


def _empty_mean_words(op: Op) -> str:
    first = op.first_operand
    if first is None or not first.numel:
        return "a mean over no elements is 0/0"
    outputs = op.results[0].numel if op.results else 1
    return f"{op.short} of {plural(first.numel // max(outputs, 1), 'element')} divides by zero"


def short_number(value: float | None) -> str:
    """Four significant digits, just beyond 1 (the end of many domains) eight; ``nothing finite`` for None."""
    digits = 8 if value is not None and 1.0 < abs(value) < 1.0005 else 4
    return "nothing finite" if value is None else f"{value:.{digits}g}"


# -- powers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PowerTerm:
    """Base or exponent of a power ``x ** p`` at the op's first non-finite result.

    Attributes:
        operand: the tensor; None for a Python number.
        value: its value at that element; None if unknown.
    """

    operand: Operand | None
    value: float | None

    @classmethod
    def of(cls, op: Op, name: str) -> PowerTerm:
        """Read the operand with this argument name, else the setting of that name."""
        operand = op.operand(name)
        if operand is None:
            return cls(None, real(op.settings.get(name)))
        constant = operand.min if operand.min is not None and operand.min == operand.max and not operand.bad else None
        return cls(operand, operand.value if operand.value is not None else constant)

    @property
    def zeros(self) -> bool:
        """Whether the term is 0 at the failing element; if that is unknown, whether any element is 0."""
        if self.value is not None or self.operand is None:
            return self.value == 0.0
        return self.operand.zero > 0

    @property
    def negative(self) -> bool:
        """Whether the term is negative at the failing element; if that is unknown, whether any element is."""
        if self.value is not None or self.operand is None:
            return self.value is not None and self.value < 0
        return self.operand.negative > 0

    @property
    def magnitude(self) -> float | None:
        """The magnitude of the term at the failing element, or an upper bound; None if neither is known."""
        if self.value is not None and math.isfinite(self.value):
            return abs(self.value)
        return self.operand.amax if self.operand is not None else None

    def words(self) -> str:
        """The value of the term at the failing element, or the range of its values."""
        if self.value is not None:
            return f"{self.value:.4g}"
        if self.operand is None or self.operand.min is None or self.operand.max is None:
            return "a number that is not in the log"
        return f"values from {self.operand.min:.4g} to {self.operand.max:.4g}"


def _power_cause(op: Op) -> Cause:
    """The cause of a non-finite ``x ** p`` (IEEE 754-2019, 9.2.1).

    A zero to a negative power, a negative number to a power that is no integer, a large base, or a large exponent.
    """
    base, exponent = PowerTerm.of(op, "self"), PowerTerm.of(op, "exponent")
    is_integer = exponent.value is not None and math.isfinite(exponent.value) and exponent.value == int(exponent.value)
    if base.negative and (op.bad_out & NAN) and not is_integer:
        name = "sqrt-of-negative" if exponent.value is not None and abs(exponent.value) == 0.5 else "domain-error"
        lowest = base.operand.min if base.operand is not None and base.operand.min is not None else base.value
        return Cause(name, 0.95, f"values down to {short_number(lowest)} to the power {exponent.words()}")
    if base.zeros and exponent.negative:
        count = plural(base.operand.zero, "exact zero") if base.operand is not None and base.operand.zero else "0"
        return Cause("division-by-zero", 0.95, f"{count} to the power {exponent.words()}")
    if exponent.operand is None and exponent.value is None:
        return Cause("other", 0.5, "the exponent is not in the log")
    if _exponent_overflows(base, exponent):
        return Cause("exp-overflow", 0.85, f"{base.words()} to the power {exponent.words()} left the range")
    reach = f"values up to {short_number(base.operand.amax if base.operand is not None else base.magnitude)}"
    return Cause("square-overflow", 0.9, f"{reach} to the power {exponent.words()} left the range")


def _exponent_overflows(base: PowerTerm, exponent: PowerTerm) -> bool:
    """Whether the exponent, not the base, makes the result leave the range: it exceeds ``abs(log2(base))``."""
    if base.magnitude is None or exponent.magnitude is None or base.magnitude <= 0:
        return False
    return exponent.magnitude > abs(math.log2(base.magnitude))
