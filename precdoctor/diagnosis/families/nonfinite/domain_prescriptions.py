"""What to do where a function, or its derivative, ends: exp above ln(max), roots, norms and powers at 0, acos at 1."""

from __future__ import annotations

import math

from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import there_are
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import TWO_SIDED
from precdoctor.diagnosis.families.nonfinite.culprit import Culprit
from precdoctor.diagnosis.families.nonfinite.culprit_words import bad_of, forward_of, line_words, look, operand_of
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident
from precdoctor.diagnosis.survey.op_facts import Operand, real
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView

#: Functions defined between -1 and 1, between 0 and 1, and from 1 on, by the nodes and ops of their derivatives.
_TO_ONE = frozenset(("acos", "asin", "atanh", "erfinv"))
_SHARES = frozenset(("logit",))
_FROM_ONE = frozenset(("acosh",))
#: Stands in for what rounding has made zero or negative: eigenvalues, sums of squares.
_TINY = 1e-12
#: FP32 numbers nearer to 1 than this may be equal to it after one rounding.
_NEAR_ONE = 1e-6


def clamp_exponent(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Keep what goes into an exponential, or into a power as its exponent, below where the result leaves the format."""
    if culprit.op.short == "pow":
        return _clamp_power(view, incident, culprit)
    operand = operand_of(culprit)
    fmt = known_format(operand.dtype) if operand is not None else None
    if operand is None or fmt is None or operand.max is None:
        return look(view, incident, culprit)
    largest = math.floor(math.log(fmt.max))
    if culprit.op.short in TWO_SIDED:
        return _clamp_both(culprit, largest, operand)
    return Prescription(
        title=f"clamp what goes into exp at {largest}{line_words(culprit)}, or subtract the maximum first (logsumexp)",
        change={"clamp_max": largest},
        predicted={"largest_exponent": {"from": operand.max, "to": largest}, "inf": {"from": bad_of(culprit), "to": 0}},
        snippet=f"y = x.clamp(max={largest}).exp()  # exp({largest}) is finite in {fmt.name}\n",
    )


def _clamp_both(culprit: Culprit, largest: int, operand: Operand) -> Prescription:
    name = culprit.op.short
    return Prescription(
        title=f"clamp what goes into {name} to -{largest} .. {largest}{line_words(culprit)}; "
        "sinh(x) / cosh(x) is tanh(x), which never overflows",
        change={"clamp_min": -largest, "clamp_max": largest},
        predicted={"largest_operand": {"from": operand.amax, "to": largest}, "inf": {"from": bad_of(culprit), "to": 0}},
        snippet=f"y = x.clamp(-{largest}, {largest}).{name}()\n",
    )


def bounded_before(culprit: Culprit) -> Prescription | None:
    """For an exponential whose infinity is clamped away: the bound belongs before it. Null for other functions."""
    fmt = known_format(culprit.op.results[0].dtype) if culprit.op.results else None
    if culprit.op.short != "exp" or fmt is None:
        return None
    largest = math.floor(math.log(fmt.max))
    return Prescription(
        title=f"bound what goes into exp{line_words(culprit)}, not only what comes out of it",
        change={"clamp_max": largest, "module": culprit.module},
        predicted={"nonfinite_gradients": {"from": bad_of(culprit), "to": 0}},
        snippet=(
            f"y = x.clamp(max={largest}).exp()  # behind exp it is too late: the gradient of inf is 0 * inf, NaN\n"
            "# of a ratio that is clamped at c anyway: (logp - old_logp).clamp(max=math.log(c)).exp()\n"
        ),
    )


def _clamp_power(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    exponent, base = culprit.op.operand("exponent"), culprit.op.operand("self")
    reach = base.amax if base is not None else real(culprit.op.settings.get("self"))
    fmt = known_format(culprit.op.results[0].dtype) if culprit.op.results else None
    if exponent is None or exponent.max is None or fmt is None or reach is None or reach <= 1.0:
        return look(view, incident, culprit)
    largest = math.floor(math.log(fmt.max) / math.log(reach) * 10) / 10
    return Prescription(
        title=f"clamp the exponent at {largest:g}{line_words(culprit)}: its base reaches {reach:.4g}",
        change={"clamp_max": largest},
        predicted={
            "largest_exponent": {"from": exponent.max, "to": largest},
            "inf": {"from": bad_of(culprit), "to": 0},
        },
        snippet=f"y = x ** p.clamp(max={largest!r})  # {reach:.4g} ** {largest:g} is finite in {fmt.name}\n",
    )


def prune_behind_norm(culprit: Culprit) -> Prescription:
    """Weight normalisation has no eps: w = g v / ||v|| (Salimans and Kingma, arXiv:1602.07868, equation 2)."""
    return Prescription(
        title="keep whole filters of `v` from being zero: zero the magnitude `g` instead, or take weight_norm off",
        change={"module": culprit.module, "parameter": {"from": "v", "to": "g"}},
        predicted={"nonfinite_elements": {"from": bad_of(culprit), "to": 0}},
        snippet=(
            "# prune by the magnitude; the direction keeps a length\n"
            "layer.parametrizations.weight.original0.data[pruned] = 0.0\n"
        ),
    )


def inside_root(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    """A small constant under a root, whose derivative at 0 is infinite."""
    return Prescription(
        title=f"add a small constant inside the root{line_words(culprit)}{_zeros_words(culprit)}",
        change={"eps": {"from": 0.0, "to": 1e-12}, "module": culprit.module},
        predicted={
            "nonfinite_elements": {"from": bad_of(culprit), "to": 0},
            "largest_derivative": 0.5 / math.sqrt(1e-12),
        },
        snippet="import torch\n\ny = torch.sqrt(x + 1e-12)  # the derivative at 0 is 5e5, not infinite\n",
    )


def norm_as_root(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    """A norm has no derivative at 0, and no argument for an eps: its square has one, and the root takes the eps."""
    made = forward_of(culprit)
    name = made.short if made is not None else "the norm"
    sums = "dx.square() + dy.square()" if name == "hypot" else "x.square().sum(-1)"
    return Prescription(
        title=f"write {name}{line_words(culprit)} as the root of a sum of squares and a small constant",
        change={"eps": {"from": 0.0, "to": 1e-12}, "module": culprit.module},
        predicted={"nonfinite_elements": {"from": bad_of(culprit), "to": 0}, "largest_derivative": 1.0},
        snippet=f"import torch\n\ny = torch.sqrt({sums} + 1e-12)  # at 0 the derivative is 0, not 0 / 0\n",
    )


def off_the_edge(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    """The operand kept inside the domain, where the derivative is finite."""
    made = forward_of(culprit)
    name = made.short if made is not None else (culprit.op.node or culprit.op.short).partition("Backward")[0].lower()
    clamp = _limits(name)
    limits, where = _limit_words(clamp)
    return Prescription(
        title=f"clamp what goes into {name} at {where}{line_words(culprit)}: at the edge its derivative is infinite"
        + _zeros_words(culprit),
        change={"clamp": clamp, "module": culprit.module},
        predicted={"nonfinite_gradients": {"from": bad_of(culprit), "to": 0}},
        snippet=f"x = x.clamp({limits})  # before {name}; elements that were clamped get a gradient of 0\n",
    )


def _limits(name: str) -> dict[str, float]:
    """Where a function, and its derivative, are finite: a millionth inside its domain."""
    if name in _TO_ONE:
        return {"min": -1.0 + _NEAR_ONE, "max": 1.0 - _NEAR_ONE}
    if name in _SHARES:
        return {"min": _NEAR_ONE, "max": 1.0 - _NEAR_ONE}
    return {"min": 1.0 + _NEAR_ONE} if name in _FROM_ONE else {"min": _NEAR_ONE}


def _limit_words(clamp: dict[str, float]) -> tuple[str, str]:
    """As arguments of ``clamp``, and to be read."""
    arguments = ", ".join(f"{side}={limit!r}" for side, limit in clamp.items())
    return arguments, " and ".join(f"{limit:g}" for limit in clamp.values())


def into_domain(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """The operand brought to where the function is defined: rounding alone may have led it past the end."""
    name, operand = culprit.op.short, operand_of(culprit)
    power = culprit.op.settings.get("exponent") if name == "pow" else None
    if operand is None or not (name in _TO_ONE | _SHARES | _FROM_ONE or isinstance(power, (int, float))):
        return look(view, incident, culprit)
    clamp = {"min": _TINY} if name == "pow" else _limits(name)
    limits, where = _limit_words(clamp)
    call = f"pow({power})" if name == "pow" else f"{name}()"
    return Prescription(
        title=f"clamp what goes into {name} at {where}{line_words(culprit)}: it is not defined beyond",
        change={"clamp": clamp, "module": culprit.module},
        predicted={"nonfinite_elements": {"from": bad_of(culprit), "to": 0}},
        snippet=f"y = x.clamp({limits}).{call}  # rounding alone can push x past the end\n",
    )


def nothing_to_average(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    """For means over no element, and spreads of a single one: no eps helps, as there is no divisor to add it to."""
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
    what = "a batch of one sample has no standard deviation: use correction=0, or drop_last=True in the DataLoader"
    return Prescription(
        title=(what if spread else "leave out batches in which nothing counts, or divide the sum by max(count, 1)")
        + line_words(culprit),
        change={"correction": 0} if spread else {"divisor": "max(count, 1)"},
        predicted={"nonfinite_elements": {"from": bad_of(culprit), "to": 0}},
        snippet=snippet,
    )


def constant_that_fits(constant: float, culprit: Culprit) -> Prescription:
    """For a number in the code that the format it is computed in does not hold."""
    return Prescription(
        title=f"use {math.copysign(1e4, constant):g} in place of the constant {constant:g}{line_words(culprit)}: "
        "it fits into every format, and exp(-1e4) is 0",
        change={"constant": {"from": constant, "to": math.copysign(1e4, constant)}},
        predicted={"nonfinite_elements": {"from": bad_of(culprit), "to": 0}},
        snippet="scores = scores.masked_fill(~mask, -1e4)  # finite in FP16, BF16 and FP32\n",
    )


def _zeros_words(culprit: Culprit) -> str:
    made = forward_of(culprit)
    zeros = made.operands[0].zero if made is not None and made.operands else None
    return f" ({there_are(zeros, 'element')} exactly 0 there)" if zeros else ""
