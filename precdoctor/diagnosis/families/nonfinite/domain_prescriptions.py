"""Prescriptions at the edge of a function's domain: logs, quotients, roots, norms, powers at 0, exp above ln(max).

Outside the domain, or at a pole of the derivative, no wider format helps: the operand has to be kept inside.
"""

from __future__ import annotations

import math

from precdoctor.diagnosis.advice.narrow_formats import is_narrow, widened
from precdoctor.diagnosis.analyses.op_facts import real
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import there_are
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import SQUARES, TWO_SIDED, ZERO_QUOTIENT, is_norm
from precdoctor.diagnosis.families.nonfinite.incident import Culprit, Incident
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32, Format

#: Lower and upper end of a function's domain; functions that are missing here are defined from 0 on.
_DOMAINS: dict[str, tuple[float, float | None]] = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1.0, 1.0)),
    "logit": (0.0, 1.0),
    "acosh": (1.0, None),
}
#: Lower bound for operands that rounding made zero or negative (eigenvalues, sums of squares); below useful values.
_TINY = 1e-12
#: Eps for a divisor in FP16 or FP8; FP8 E4M3 flushes a smaller one.
_NARROW_EPS = 1e-3
#: Distance from the end of a domain that survives one rounding in FP32.
_EDGE_MARGIN = 1e-6
#: The snippet for a mask with a finite number.
FINITE_MASK = "scores = scores.masked_fill(~mask, -1e4)  # finite in FP16, BF16 and FP32; exp of it is 0\n"
#: What a snippet for an ``exp`` begins with if the log holds only the result.
_OF_UNKNOWN = """import torch

# log(exp(x) / exp(x).sum(dim)) is torch.log_softmax(x, dim); log(exp(x).sum(dim)) is x.logsumexp(dim)
# of a ratio that is clamped at c anyway: (logp - old_logp).clamp(max=math.log(c)).exp()
"""


def stop_and_inspect(_view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Stop on the first bad value, at the module or, outside of modules, at the line, and inspect the operands."""
    module, root, source = culprit.op.module, culprit.replay.root, culprit.op.source
    if module or root or source is None or culprit.op.in_library:
        return stop_at(incident, module, root, culprit.bad_elements)
    return Prescription(
        title=f"stop{culprit.at_line} on the first bad value and inspect the operands",
        change={"line": source.place},
        predicted=_stops(incident, culprit.bad_elements),
        snippet=snippets.stop_behind_line(),
    )


def stop_at(incident: Incident, module: str | None, root: str, bad: int, reach: float | None = None) -> Prescription:
    """Stop at the first non-finite output of a module.

    Args:
        bad: the number of non-finite elements; 0 if unknown.
        reach: the largest magnitude among the module's inputs; None if unknown.
    """
    inside, reached = module or root, f" (they reached {reach:.4g})" if reach is not None else ""
    return Prescription(
        title=f"stop at {f'`{inside}`' if inside else 'the model'} on the first bad value and inspect its inputs"
        + reached,
        change={"module": module, "hook": "forward"},
        predicted=_stops(incident, bad),
        snippet=snippets.halt_on_nonfinite(module or ""),
    )


def _stops(incident: Incident, bad: int) -> dict[str, int]:
    return {"stops_at_step": incident.step} | ({"nonfinite_elements": bad} if bad else {})


def clamp_log(dtype: str, at_most_zero: int | None, line: str = "") -> Prescription:
    """Clamp the operand of a logarithm at the smallest normal FP32 number.

    For a smaller p the gradient of log, 1 / p, leaves FP32's range. ``at_most_zero``: how many elements are 0 or less.
    """
    smallest = FP32.min_normal
    return Prescription(
        title=f"clamp the operand of log at {smallest:.3g}{line}, or work with log-probabilities throughout",
        change={"clamp_min": smallest},
        predicted={
            "values_at_or_below_zero": {"from": at_most_zero, "to": 0},
            "smallest_log": round(math.log(smallest), 1),
        },
        snippet=(
            "import torch\n\n"
            "# of a softmax: log_softmax of the logits; of a sigmoid: logsigmoid\n"
            "# of 1 - tanh(u)^2: 2 * (log(2) - u - softplus(-2 * u))\n"
            f"y = torch.log({widened('x', dtype)}.clamp_min(torch.finfo(torch.float32).tiny))\n"
        ),
    )


def log_target(view: RunView, culprit: Culprit) -> Prescription | None:
    """State in the call of ``kl_div`` that its target holds logarithms; None if the op is no log of such a target.

    Probabilities are never negative; logarithms of them are all at most 0.
    """
    op = culprit.op
    target = op.operand("other") or op.first_operand if op.short == "xlogy" else None
    if target is None or not target.negative or target.negative + target.zero < target.numel:
        return None
    root, module = op.root or culprit.replay.root, op.module or ""
    code = (op.source.code if op.source is not None else None) or ""
    if "kl_div" not in code and "KLDiv" not in f"{code} {root} {view.module_classes.get((root, module), '')}":
        return None
    return Prescription(
        title=f"pass log_target=True to kl_div{culprit.at_line}: its target holds logarithms, "
        f"{target.negative:,} of {target.numel:,} elements are negative",
        change={"log_target": {"from": False, "to": True}},
        predicted=culprit.predicted_effect,
        snippet=(
            "loss = F.kl_div(logp, target, reduction='batchmean', log_target=True)\n"
            "# as a module: nn.KLDivLoss(reduction='batchmean', log_target=True); or pass target.exp()\n"
        ),
    )


def clamp_exponent(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Clamp the operand of an exponential, or the exponent of a power, so that the result stays in range."""
    if culprit.op.short == "pow":
        return _clamp_power(view, incident, culprit)
    operand = culprit.op.first_operand
    fmt = known_format(operand.dtype) if operand is not None else culprit.op.result_format
    if fmt is None or (culprit.op.short != "exp" if operand is None else operand.max is None):
        return stop_and_inspect(view, incident, culprit)
    if operand is not None and culprit.op.short in TWO_SIDED:
        return _clamp_both_sides(culprit, math.floor(math.log(fmt.max)), operand)
    return clamp_exp(fmt, operand.max if operand is not None else None, culprit.bad_elements, culprit.at_line)


def clamp_exp(fmt: Format, reach: float | None, inf: int, line: str = "") -> Prescription:
    """Clamp the operand of ``exp``, which reaches ``reach`` (None if unknown) and gives ``inf`` infinities."""
    largest = math.floor(math.log(fmt.max))
    exponent = {"largest_exponent": {"from": reach, "to": largest}} if reach is not None else {}
    return Prescription(
        title=f"clamp the operand of exp at {largest}{line}, or subtract the maximum first (logsumexp)",
        change={"clamp_max": largest},
        predicted={**exponent, "inf": {"from": inf, "to": 0}},
        snippet=f"{_OF_UNKNOWN if reach is None else ''}"
        f"y = x.clamp(max={largest}).exp()  # exp({largest}) is finite in {fmt.name}\n",
    )


def _clamp_both_sides(culprit: Culprit, largest: int, operand: Operand) -> Prescription:
    name = culprit.op.short
    return Prescription(
        title=f"clamp the operand of {name} to -{largest} .. {largest}{culprit.at_line}; "
        "sinh(x) / cosh(x) is tanh(x), which never overflows",
        change={"clamp_min": -largest, "clamp_max": largest},
        predicted={
            "largest_operand": {"from": operand.amax, "to": largest},
            "inf": {"from": culprit.bad_elements, "to": 0},
        },
        snippet=f"y = x.clamp(-{largest}, {largest}).{name}()\n",
    )


def bound_operand(culprit: Culprit) -> Prescription | None:
    """Bound the operand of ``exp``, not only its result; None for other functions."""
    fmt = culprit.op.result_format
    if culprit.op.short != "exp" or fmt is None:
        return None
    largest = math.floor(math.log(fmt.max))
    return Prescription(
        title=f"bound the operand of exp{culprit.at_line}, not only its result",
        change={"clamp_max": largest, "module": culprit.op.module},
        predicted={"nonfinite_gradients": {"from": culprit.bad_elements, "to": 0}},
        snippet=(
            f"y = x.clamp(max={largest}).exp()  # behind exp it is too late: the gradient of inf is 0 * inf, NaN\n"
            "# of a ratio that is clamped at c anyway: (logp - old_logp).clamp(max=math.log(c)).exp()\n"
        ),
    )


def _clamp_power(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    exponent, base = culprit.op.operand("exponent"), culprit.op.operand("self")
    reach = base.amax if base is not None else real(culprit.op.settings.get("self"))
    fmt = culprit.op.result_format
    if exponent is None or exponent.max is None or fmt is None or reach is None or reach <= 1.0:
        return stop_and_inspect(view, incident, culprit)
    largest = math.floor(math.log(fmt.max) / math.log(reach) * 10) / 10
    return Prescription(
        title=f"clamp the exponent at {largest:g}{culprit.at_line}: its base reaches {reach:.4g}",
        change={"clamp_max": largest},
        predicted={
            "largest_exponent": {"from": exponent.max, "to": largest},
            "inf": {"from": culprit.bad_elements, "to": 0},
        },
        snippet=f"y = x ** p.clamp(max={largest!r})  # {reach:.4g} ** {largest:g} is finite in {fmt.name}\n",
    )


def _prune_magnitude(culprit: Culprit) -> Prescription:
    """Prune the magnitude ``g`` of a weight norm, not ``v``: w = g v / ||v|| has no eps.

    Salimans and Kingma, arXiv:1602.07868, equation 2.
    """
    return Prescription(
        title="keep whole filters of `v` from being zero: zero the magnitude `g` instead, or take weight_norm off",
        change={"module": culprit.op.module, "parameter": {"from": "v", "to": "g"}},
        predicted=culprit.predicted_effect,
        snippet=(
            "# prune by the magnitude; the direction keeps a length\n"
            "layer.parametrizations.weight.original0.data[pruned] = 0.0\n"
        ),
    )


def eps_inside_root(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    """Add a small constant under a root, because its derivative at 0 is infinite.

    A norm, which has no derivative at 0 and no eps argument, is written as the root of a sum of squares first.
    """
    title, inside = f"add a small constant inside the root{culprit.at_line}{_zeros_words(culprit)}", "x"
    largest, there = 0.5 / math.sqrt(_TINY), "the derivative at 0 is 5e5, not infinite"
    if culprit.cause.name == "norm-gradient-at-zero":
        name = culprit.forward_op.short if culprit.forward_op is not None else "the norm"
        title = f"write {name}{culprit.at_line} as the root of a sum of squares and a small constant"
        inside = "dx.square() + dy.square()" if name == "hypot" else "x.square().sum(-1)"
        largest, there = 1.0, "at 0 the derivative is 0, not 0 / 0"
    return Prescription(
        title=title,
        change={"eps": {"from": 0.0, "to": _TINY}, "module": culprit.op.module},
        predicted={**culprit.predicted_effect, "largest_derivative": largest},
        snippet=f"import torch\n\ny = torch.sqrt({inside} + {_TINY!r})  # {there}\n",
    )


def _clamp_off_edge(culprit: Culprit) -> Prescription:
    """Clamp the operand to the inside of the domain, where the derivative is finite."""
    name = culprit.function_name
    clamp = _limits(name)
    limits, where = _limit_words(clamp)
    return Prescription(
        title=f"clamp the operand of {name} at {where}{culprit.at_line}: at the edge its derivative is infinite"
        + _zeros_words(culprit),
        change={"clamp": clamp, "module": culprit.op.module},
        predicted={"nonfinite_gradients": {"from": culprit.bad_elements, "to": 0}},
        snippet=f"x = x.clamp({limits})  # before {name}; elements that were clamped get a gradient of 0\n",
    )


def _limits(name: str) -> dict[str, float]:
    """Bounds within which a function and its derivative are finite: a millionth inside its domain."""
    low, high = _DOMAINS.get(name, (0.0, None))
    return {"min": low + _EDGE_MARGIN} | ({} if high is None else {"max": high - _EDGE_MARGIN})


def _limit_words(clamp: dict[str, float]) -> tuple[str, str]:
    """The bounds as arguments of ``clamp``, and as words."""
    arguments = ", ".join(f"{side}={limit!r}" for side, limit in clamp.items())
    return arguments, " and ".join(f"{limit:g}" for limit in clamp.values())


def into_domain(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Clamp the operand to the function's domain: rounding alone can push it past the end."""
    name, operand = culprit.op.short, culprit.op.first_operand
    power = culprit.op.settings.get("exponent") if name == "pow" else None
    is_root = name in {"sqrt", "rsqrt"}
    if operand is None or not (name in _DOMAINS or is_root or isinstance(power, (int, float))):
        return stop_and_inspect(view, incident, culprit)
    clamp = {"min": _TINY} if is_root or name == "pow" else _limits(name)
    limits, where = _limit_words(clamp)
    call = f"pow({power})" if name == "pow" else f"{name}()"
    return Prescription(
        title=f"clamp the operand of {name} at {where}{culprit.at_line}: it is not defined beyond",
        change={"clamp": clamp, "module": culprit.op.module},
        predicted=culprit.predicted_effect,
        snippet=f"y = x.clamp({limits}).{call}  # rounding alone can push x past the end\n",
    )


def _count_at_least_one(culprit: Culprit) -> Prescription:
    """Avoid means over no elements and spreads of a single one, which have no divisor to add an eps to."""
    short = culprit.op.short
    spread = short in {"std", "var", "std_mean", "var_mean"}
    if spread:
        snippet = "loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, drop_last=True)\n"
    elif any(not o.numel for o in culprit.op.operands):
        total = f"torch.nn.functional.{short}(x, y, reduction='sum')" if short.endswith("_loss") else "x.sum()"
        snippet = f"mean = {total} / max(x.numel(), 1)  # 0 where nothing is selected, and so is its gradient\n"
    else:
        snippet = (
            "counts = (target != -100).sum().clamp_min(1)\n"
            "loss = torch.nn.functional.cross_entropy(logits, target, reduction='sum') / counts\n"
        )
    return Prescription(
        title=f"drop a last batch of one sample, which has no spread, or use correction=0{culprit.at_line}"
        if spread
        else f"skip batches without a counted target, or divide the sum by max(count, 1){culprit.at_line}",
        change={"correction": 0} if spread else {"divisor": "max(count, 1)"},
        predicted=culprit.predicted_effect,
        snippet=snippet,
    )


def constant_that_fits(constant: float, culprit: Culprit) -> Prescription:
    """Replace a constant in the code that the format of the computation cannot hold."""
    return Prescription(
        title=f"use {math.copysign(1e4, constant):g} in place of the constant {constant:g}{culprit.at_line}: "
        "it fits into every format, and exp(-1e4) is 0",
        change={"constant": {"from": constant, "to": math.copysign(1e4, constant)}},
        predicted=culprit.predicted_effect,
        snippet=FINITE_MASK,
    )


def _zeros_words(culprit: Culprit) -> str:
    """`` (3 elements are exactly 0 there)``: zeros in the operand of the forward op; empty if there are none."""
    operand = culprit.forward_op.first_operand if culprit.forward_op is not None else None
    return f" ({there_are(operand.zero, 'element')} exactly 0 there)" if operand is not None and operand.zero else ""


def _count_above_zero(culprit: Culprit, count: Operand) -> Prescription:
    """Divide by ``max(count, 1)``: the divisor is a count, and it is 0."""
    return Prescription(
        title=f"divide by max(count, 1){culprit.at_line}: {there_are(count.zero, 'count')} 0",
        change={"divisor": "max(count, 1)"},
        predicted={"zero_divisors": {"from": count.zero, "to": 0}, **culprit.predicted_effect},
        snippet="mean = total / count.clamp_min(1)  # 0 where nothing is counted, and so is its gradient\n",
    )


def _counts_nothing(culprit: Culprit, divisor: Operand) -> bool:
    """Whether a floating-point divisor of a 0 / 0 is a count: its recorded extremes are whole numbers."""
    extremes = (x for x in (divisor.amin_nonzero, divisor.max) if x is not None)
    return ZERO_QUOTIENT in culprit.cause.why and not divisor.negative and all(x == int(x) for x in extremes)


def _guard_divisor(culprit: Culprit) -> Prescription:
    """Add an eps that the format holds to a divisor that is 0; for a count, divide by ``max(count, 1)``."""
    op = culprit.op
    operand = culprit.op.first_operand if op.short == "rsqrt" else op.divisor
    if operand is not None and (operand in op.integers or _counts_nothing(culprit, operand)):
        return _count_above_zero(culprit, operand)
    fmt = known_format(operand.dtype) if operand is not None else None
    eps = _NARROW_EPS if fmt is not None and fmt.exponent_bits <= 5 else 1e-6
    zeros = operand.zero if operand is not None else None
    is_rsqrt = culprit.op.short == "rsqrt"  # code can change only its operand, not its divisor
    divisor = "norm" if operand is not None and is_norm(culprit.replay, op, operand) else "divisor"
    divided = "torch.rsqrt(x" if is_rsqrt else f"x / ({divisor}"
    return Prescription(
        title=f"add eps {eps:g} to {'the operand of rsqrt' if is_rsqrt else 'the divisor'}{culprit.at_line}"
        + (f": below {fmt.min_subnormal:.3g} an eps is 0 in {fmt.dtype}" if eps == _NARROW_EPS and fmt else ""),
        change={"eps": {"from": 0.0, "to": eps}},
        predicted={"zero_divisors": {"from": zeros, "to": 0}, **culprit.predicted_effect},
        snippet=f"y = {divided} + {eps!r})  # {eps!r} is representable in the divisor's format\n",
    )


def clamp_root(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Clamp the operand of a root, or compute a variance without the difference of squares that made it negative."""
    if SQUARES not in culprit.cause.why:
        return into_domain(view, incident, culprit)
    operand = culprit.op.first_operand
    narrow = operand is not None and is_narrow(operand.dtype)
    return Prescription(
        title=f"take the mean of squared differences{', in FP32,' if narrow else ''} as the variance{culprit.at_line}",
        change={"variance": {"from": "E[x^2] - E[x]^2", "to": "E[(x - E[x])^2]"}},
        predicted=culprit.predicted_effect,
        snippet=("x = x.float()  # outside autocast; a difference of squares cancels\n" if narrow else "")
        + "variance = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)\n",
    )


def guard_quotient(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    """Guard a division by 0, a mean over nothing, or a weight norm of a zero filter."""
    op = culprit.op
    if "weight_norm" in op.short:
        return _prune_magnitude(culprit)
    quotient = len(op.operands) > 1 or op.short in {"reciprocal", "rsqrt", "pow", "div"}
    mean = not quotient and op.phase != "backward" and bool(op.operands)
    if mean or any(not o.numel for o in op.operands):
        return _count_at_least_one(culprit)
    return _guard_divisor(culprit)


def away_from_pole(culprit: Culprit) -> Prescription:
    """Move the operand away from the point where its derivative is infinite: 0, or the edge of a domain."""
    quotient = (culprit.op.node or "").startswith(("Div", "Reciprocal"))
    return _guard_divisor(culprit) if quotient else _clamp_off_edge(culprit)
