"""Why an op made a non-finite value of finite operands: from its name, its operands' ranges, and its result in FP64.

Finite in FP64 means the format was left (a range cause); non-finite in FP64, too, means the operation itself is not
defined there (a domain cause). IEEE 754-2019, section 7, for which operations do what.
"""

from __future__ import annotations

import math
from dataclasses import replace

from precdoctor.diagnosis.claims.words import plural, there_are
from precdoctor.diagnosis.families.nonfinite.culprit_op import Blame
from precdoctor.diagnosis.families.nonfinite.gradient_causes import is_discarded, thrown_away
from precdoctor.diagnosis.families.nonfinite.optimizer_causes import optimizer_cause, scalar_cause, settings_cause
from precdoctor.diagnosis.families.nonfinite.power_causes import is_root, power_cause, power_gradient_cause
from precdoctor.diagnosis.families.nonfinite.tensor_causes import Cause
from precdoctor.diagnosis.survey.op_facts import NAN, NEG_INF, POS_INF, Examined, Op, Operand
from precdoctor.diagnosis.survey.rows import known_format

#: Words for zeros that a wider format would not have made.
UNDERFLOWED = "underflowed in"
_LOGS = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "xlogy": 0.0, "special_xlog1py": -1.0}


def _names(spaced: str) -> frozenset[str]:
    return frozenset(spaced.split())


_EXPS = _names("exp exp2 expm1 sinh cosh special_expm1 special_exp2")
#: Of those, what overflows at either end.
TWO_SIDED = _names("sinh cosh")
_PRODUCTS = _names(
    "mm addmm bmm baddbmm addbmm addmv mv dot vdot matmul linear convolution _convolution mkldnn_linear einsum "
    "_scaled_mm cudnn_convolution mkldnn_convolution convolution_backward mkldnn_rnn_layer _cudnn_rnn addcmul "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _trilinear "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _thnn_fused_lstm_cell"
)
_REDUCTIONS = _names(
    "sum mean cumsum nansum logsumexp linalg_vector_norm norm var std var_mean std_mean native_layer_norm "
    "native_batch_norm native_group_norm _native_batch_norm_legit cudnn_batch_norm prod cumprod trace "
    "_cdist_forward _fused_rms_norm mse_loss smooth_l1_loss huber_loss index_add scatter_add segment_reduce avg_pool2d "
    "_adaptive_avg_pool2d add sub logcumsumexp logaddexp"
)
_CASTS = _names("_to_copy to copy type_as convert_element_type")
_WEIGHT_NORMS = _names("_weight_norm _weight_norm_interface")
_DOMAINS = _names("acos asin atanh acosh erfinv logit lgamma digamma polygamma mvlgamma _ctc_loss fmod")
_SOFTMAXES = _names("_softmax _log_softmax softmax log_softmax _safe_softmax logsumexp logcumsumexp")
#: Means over the targets that count: those that are not ignored, by their weights.
_COUNTED = _names("nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward nll_loss_nd cross_entropy_loss")
_OVERFLOWS = frozenset(
    ("matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow", "exp-overflow", "other")
)
#: An infinite number is a fault in these; in a mask, a bound or a fill it is meant.
_WITH_SCALARS = _names("add sub rsub mul div pow lerp addcmul")
_QUOTIENTS = _names("div reciprocal true_divide addcdiv remainder floor_divide")


def op_cause(examined: Examined, blamed: Blame, loss_scale: float | None) -> Cause:
    """The cause of an examined incident in the vocabulary of findings; ``other`` when none fits."""
    op = blamed.op
    if examined.phase == "optimizer":
        if (bad_setting := settings_cause(op, examined.bad_settings)) is not None:
            return bad_setting
        return (
            optimizer_cause(op) if op.name.startswith("optim.") else _of_optimizer(_arithmetic_cause(examined, op), op)
        )
    if blamed.external is not None:
        return _external_cause(blamed)
    if blamed.mask is not None:
        return _mask_cause(op)
    if examined.phase == "backward" and op.phase != "backward" and not examined.by_hand:
        if not is_discarded(examined, op) and (ended := _range_ended(examined, op)) is not None:
            return ended
        if not _ends_in_gradients(examined) and (told := _arithmetic_cause(examined, op)) is not None:
            return replace(told, why=f"{told.why}; the loss leaves that out, its gradient does not")
        why = f"{op.short} is non-finite where the forward pass throws its result away, and its gradient is not"
        return Cause("where-gradient-trap", 0.9, why)
    found = _backward_cause(examined, op, loss_scale) if op.phase == "backward" else None
    return found or _arithmetic_cause(examined, op) or _untold(op)


def _ends_in_gradients(examined: Examined) -> bool:
    """Whether non-finite values met a gradient inside the pass that was run again, and did not come to its end."""
    return any(o.phase == "backward" for i in examined.path if (o := examined.ops.get(i)) is not None)


def _untold(op: Op) -> Cause:
    if op.operands:
        return Cause("other", 0.5, f"{op.name} made it of finite operands")
    return Cause("other", 0.4, f"{op.name} returned it; what went in is not in the log, and may have been so already")


def _of_optimizer(cause: Cause | None, op: Op) -> Cause:
    """An operation of an optimizer's step, by the names optimizers' faults have."""
    if cause is None or cause.name in _OVERFLOWS or (cause.name == "division-by-zero" and not _divides_by_zero(op)):
        reach = op.reference.amax if op.reference is not None else None
        exact = f": in FP64 the result reaches {_number(reach)}" if reach is not None else ""
        return Cause("optimizer-overflow", 0.9, f"{op.short} left the range of its format{exact}")
    if cause.name == "division-by-zero":
        return Cause("optimizer-division-by-zero", cause.confidence, cause.why)
    return cause


def _divides_by_zero(op: Op) -> bool:
    return op.settings.get("other") == 0 or any(o.zero for o in op.operands)


def _external_cause(blamed: Blame) -> Cause:
    kind, name = blamed.external or ("", "")
    if blamed.of_target:
        return Cause("nonfinite-input-batch", 0.9, f"the target of {blamed.op.short} held non-finite values")
    if kind == "data":
        return Cause("nonfinite-input-batch", 0.85, f"`{name}`, which the loss code was given, held non-finite values")
    if kind == "batch":
        return Cause(
            "nonfinite-input-batch", 0.97, f"argument `{name}` held non-finite values when the model was called"
        )
    if kind == "argument":
        return Cause(None, 0.9, f"argument `{name}` was made by code between two top-level modules")
    if (
        not name or kind == "variable"
    ):  # neither a weight nor a buffer: made by code that leaves no graph, before the op that reads it
        what = f"`{name}`" if name else f"a tensor that {blamed.op.short} reads"
        return Cause(None, 0.9, f"{what} was made without a gradient, and non-finite")
    what = {"weight": "weight", "buffer": "buffer"}.get(kind, "tensor")
    return Cause("nonfinite-weights", 0.95, f"the {what} `{name}` was non-finite before the step's forward pass")


def _mask_cause(op: Op) -> Cause:
    if op.short in _SOFTMAXES or "attention" in op.short:
        return Cause("softmax-fully-masked", 0.95, "a row of its input holds nothing but -inf")
    if op.short in {"mul", "mm", "bmm", "addmm", "baddbmm"}:
        return Cause("zero-times-inf", 0.9, "a zero met an infinity put there on purpose")
    if op.short in {"add", "sub", "sum", "mean"}:
        return Cause("inf-minus-inf", 0.9, "infinities put there on purpose cancelled")
    return Cause("other", 0.5, f"{op.name} turned an intended -inf into something else")


# -- forward arithmetic -----------------------------------------------------------------------------------------------


def _arithmetic_cause(examined: Examined, op: Op) -> Cause | None:
    first = op.operands[0] if op.operands else None
    name = op.short
    if name in _WITH_SCALARS and (given := scalar_cause(op)) is not None:
        return given
    if name in _LOGS and op.operands:
        return _log_cause(op)
    if name in {"sqrt", "rsqrt"} and first is not None:
        return _root_cause(examined, op, first)
    if name == "pow":
        return power_cause(op)
    if name in _QUOTIENTS:
        return _quotient_cause(examined, op)
    if name in _EXPS:
        return _exp_cause(op)
    if name in _DOMAINS and first is not None:
        return _domain_cause(op, first)
    if name in _SOFTMAXES and any(o.pos_inf for o in op.operands):
        return Cause("inf-minus-inf", 0.7, "a softmax of +Inf subtracts Inf from Inf")
    return _of_nothing(op) or _range_cause(op)


def _of_nothing(op: Op) -> Cause | None:
    """Quotients that an op takes inside itself: by the number of targets, by the length of a filter."""
    if op.short in _COUNTED and op.bad_out & NAN and not _counts(op):
        ignored = op.settings.get("ignore_index")
        why = f"no target counts (each is ignore_index {ignored}, or has weight 0): the mean over none of them is 0/0"
        return Cause("division-by-zero", 0.95, why)
    direction = op.operands[0] if op.operands else None
    if op.short in _WEIGHT_NORMS and direction is not None and op.bad_out & NAN and direction.zero:
        zeros = f"{direction.zero:,} of {direction.numel:,} elements of the direction `v` are 0"
        return Cause("division-by-zero", 0.9, f"{zeros}: a filter of zeros has no length to divide by")
    return None


def _root_cause(examined: Examined, op: Op, operand: Operand) -> Cause:
    if operand.negative and (operand.value is None or operand.value < 0 or op.bad_out & NAN):
        return Cause("sqrt-of-negative", 0.95, f"its operand goes down to {_number(operand.min)}")
    return Cause("division-by-zero", 0.95, _zero_words(examined, op, 0, "its operand"))


def _counts(op: Op) -> bool:
    """Whether any target does: the second result is the sum of their weights."""
    return len(op.results) < 2 or bool(op.results[1].amax)


def too_large_constant(op: Op) -> float | None:
    """A number in the code that lies outside of the format it is computed in: ``-1e9`` added to FP16 scores."""
    fmt = known_format(op.results[0].dtype) if op.results else None
    found = (op.settings.get(key) for key in ("other", "value", "fill_value"))
    numbers = (float(x) for x in found if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x))
    return next((x for x in numbers if fmt is not None and abs(x) > fmt.max), None)


def mask_filling(op: Op) -> float | None:
    """What a mask is filled with, where a cast to a narrower format makes it infinite: ``finfo.min``, or -1e9."""
    operand = op.operands[0] if op.short in _CASTS and op.operands else None
    value = operand.value if operand is not None else None
    if operand is None or not value or not math.isfinite(value) or value not in (operand.min, operand.max):
        return None
    source, decade = known_format(operand.dtype), math.log10(abs(value))
    written = decade > 4 and abs(decade - round(decade)) < 1e-7  # FP32 holds a power of ten to half of that
    return value if written or (source is not None and abs(value) == source.max) else None


def _exp_cause(op: Op) -> Cause | None:
    operand = op.operands[0] if op.operands else None
    if operand is None:  # only its result is known
        why = "it returned infinities; its operand is not in the log"
        return Cause("exp-overflow", 0.85, why) if op.bad_out & POS_INF else None
    fmt = known_format(operand.dtype)
    limit = f", {operand.dtype} ends at ln(max) {math.log(fmt.max):.2f}" if fmt is not None else ""
    lower = op.short in TWO_SIDED and operand.min is not None and -operand.min > (operand.max or 0.0)
    return Cause("exp-overflow", 0.95, f"its operand reaches {_number(operand.min if lower else operand.max)}{limit}")


def _domain_cause(op: Op, operand: Operand) -> Cause:
    if op.short == "_ctc_loss":
        return Cause("other", 0.9, "no alignment of the target fits into the input: its probability is 0")
    why = f"its operand runs from {_number(operand.min)} to {_number(operand.max)}, past where it is defined"
    return Cause("domain-error", 0.9, why)


def _log_cause(op: Op) -> Cause:
    operand = op.operand("other") or op.operands[0] if op.short.startswith(("xlogy", "special")) else op.operands[0]
    assert operand is not None, "checked by the caller"
    if operand.min is not None and operand.min <= _LOGS[op.short]:
        zeros = plural(operand.zero, "exact zero") if operand.zero else ""
        below = (
            f"{plural(operand.negative, 'negative value')} down to {_number(operand.min)}" if operand.negative else ""
        )
        return Cause("log-of-nonpositive", 0.97, f"its operand holds {' and '.join(filter(None, (zeros, below)))}")
    return Cause("other", 0.5, f"{op.name} of positive values")


def _quotient_cause(examined: Examined, op: Op) -> Cause:
    at = 0 if op.short == "reciprocal" else len(op.operands) - 1
    divisor = op.operands[at] if op.operands else None
    constant = op.settings.get("other")
    if constant == 0:
        return Cause("division-by-zero", 0.97, "the divisor is the constant 0")
    if divisor is not None and divisor.zero and (len(op.operands) > 1 or op.short == "reciprocal"):
        return Cause("division-by-zero", 0.97, _zero_words(examined, op, at, "the divisor"))
    if divisor is None:
        return Cause("division-by-zero", 0.6, "the divisor is not in the log")
    if constant is not None:
        return Cause("division-by-zero", 0.6, f"divided by {constant}")
    why = f"the quotient left the range: the divisor's smallest magnitude is {_number(divisor.amin_nonzero)}"
    return Cause("division-by-zero", 0.7, why)


def _zero_words(examined: Examined, op: Op, at: int, what: str) -> str:
    """How the zeros came about: from an op that would not have made them in FP64, or as they are."""
    operand = op.operands[at]
    words = f"{what} holds {plural(operand.zero, 'exact zero')}"
    makers = op.makers[at] if at < len(op.makers) else ()
    for index in makers:
        maker = examined.ops.get(index) if isinstance(index, int) else None
        if maker is None or maker.reference is None or not maker.results:
            continue
        made, exact = maker.results[0], maker.reference
        if made.zero > exact.zero and exact.amin_nonzero is not None:
            return f"{words}, {UNDERFLOWED} {made.dtype} at {maker.short} (FP64 keeps {exact.amin_nonzero:.3g})"
    return words


def _range_cause(op: Op) -> Cause | None:
    """Finite operands, an infinite result, and nothing undefined about the operation."""
    dtype = op.results[0].dtype if op.results else ""
    fmt = known_format(dtype)
    limit = f", {dtype} ends at {fmt.max:.6g}" if fmt is not None else ""
    reach = op.reference.amax if op.reference is not None and op.finite_in_fp64 else None
    exact = f"in FP64 the result reaches {_number(reach)}{limit}" if reach is not None else f"the range ended{limit}"
    if (constant := too_large_constant(op)) is not None:
        return Cause("cast-overflow", 0.9, f"the constant {constant:g} does not fit into its operand's format{limit}")
    if op.short in _CASTS:
        widest = max((o.amax or 0.0 for o in op.operands), default=0.0)
        return Cause("cast-overflow", 0.97, f"values up to {_number(widest)} were cast{limit}")
    if fmt is not None and reach is not None and reach <= fmt.max:
        exact = f"a number on the way left the range{limit}; the result itself reaches {_number(reach)} in FP64"
    if op.short in _PRODUCTS:
        return Cause("matmul-overflow", 0.95, exact)
    if op.short == "square" or (op.short == "mul" and _is_square(op)):
        return Cause("square-overflow", 0.95, exact)
    if op.short == "mse_loss" and fmt is not None and _farthest(op) > math.sqrt(fmt.max):
        return Cause("square-overflow", 0.95, f"the square of a difference alone leaves the range: {exact}")
    if op.short in {"add", "sub"} and op.bad_out & NAN and not any(o.bad for o in op.operands):
        return Cause("inf-minus-inf", 0.7, "no two finite numbers make NaN: infinities met that the log does not show")
    if op.short in _REDUCTIONS:
        if op.finite_in_fp64 is False and op.bad_out & NAN:
            return Cause("division-by-zero", 0.8, _empty_words(op))
        return Cause("reduction-overflow", 0.9 if op.short not in {"add", "sub"} else 0.7, exact)
    if op.short == "mul" and op.bad_out & (POS_INF | NAN):
        return Cause("square-overflow", 0.6, f"a product left the range: {exact}")
    return None


def _farthest(op: Op) -> float:
    """At least how far apart two elements of the operands are that the op compares."""
    amax = [o.amax or 0.0 for o in op.operands[:2]]
    return max(amax) - min(amax) if len(amax) == 2 else 0.0


def _is_square(op: Op) -> bool:
    return len(op.makers) == 2 and op.makers[0] == op.makers[1] and len(op.operands) == 2


def _empty_words(op: Op) -> str:
    count = op.operands[0].numel if op.operands else 0
    return "a mean over no elements is 0/0" if not count else f"{op.short} of {count:,} elements divides by zero"


def _range_ended(examined: Examined, op: Op) -> Cause | None:
    """What looks like a result thrown away, and is only too large: tanh of an infinity is 1, its gradient NaN."""
    ended = _arithmetic_cause(examined, op) if op.finite_in_fp64 else None
    if ended is None:
        return None
    return replace(ended, why=f"{ended.why}; the forward pass ends finite all the same, the backward pass does not")


# -- backward ---------------------------------------------------------------------------------------------------------


def _backward_cause(examined: Examined, op: Op, loss_scale: float | None) -> Cause | None:
    node = (op.node or "").rstrip("0123456789").removesuffix("Backward")
    made = examined.ops.get(op.forward) if op.forward is not None else None
    before = made.operands[0] if made is not None and made.operands else None
    if op.finite_in_fp64 and _half_overflow(op):
        scale = loss_scale or 1.0
        if scale > 1.0:
            return Cause("loss-scale-overflow", 0.9, f"a float16 gradient left its range at loss scale {scale:g}")
    if made is not None and made.phase != "backward" and made.bad_out & ~NEG_INF:
        if not is_discarded(examined, made) and (ended := _range_ended(examined, op)) is not None:
            return ended
        why = f"{made.short} is non-finite in the forward pass, too, where its result is thrown away"
        return Cause("where-gradient-trap", 0.9, why)
    zeros = f": {there_are(before.zero, 'element')} exactly 0 there" if before is not None and before.zero else ""
    incoming = op.operands[0] if op.operands else None
    if node in _EDGES and incoming is not None and thrown_away(examined, op, incoming):
        return Cause("where-gradient-trap", 0.9, f"0 times the infinite derivative of {node.lower()} is NaN{zeros}")
    if node in {"Sqrt", "Rsqrt"} or (node == "Pow" and is_root(op, made)):
        return Cause("sqrt-gradient-at-zero", 0.95, f"the derivative of a square root at 0 is infinite{zeros}")
    if node in _NORMS and op.finite_in_fp64 is not True:
        zeros = "" if node == "Hypot" else zeros  # of one of two operands
        return Cause("norm-gradient-at-zero", 0.9, f"the derivative of {_NORMS[node]} is not defined{zeros}")
    if node == "Pow":
        return power_gradient_cause(op, made)
    if node in _EDGES:
        edge = f" (operand from {_number(before.min)} to {_number(before.max)})" if before is not None else ""
        return Cause(
            "domain-edge-gradient", 0.9, f"the derivative of {node.lower()} is infinite at the edge{edge}{zeros}"
        )
    return None


#: Nodes of functions that are norms of their operands, and what to call those.
_NORMS = {
    **dict.fromkeys(("LinalgVectorNorm", "Norm", "Dist", "Cdist", "CdistForward"), "a norm at 0"),
    "Hypot": "hypot at (0, 0)",
    "Std": "a standard deviation at 0",
}

#: Nodes whose derivative is infinite or undefined at the edge of the function's domain.
_EDGES = _names(
    "Sqrt Rsqrt Log Log2 Log10 Log1P Log1p Pow Acos Asin Atanh Acosh Reciprocal Logit Erfinv Xlogy Div "
    "LinalgVectorNorm Norm Lgamma Digamma Atan2"
)


def _half_overflow(op: Op) -> bool:
    return any(r.dtype == "float16" and r.bad for r in op.results)


def _number(value: float | None) -> str:
    return "nothing finite" if value is None else f"{value:.4g}"
