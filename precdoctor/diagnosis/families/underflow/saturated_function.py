"""PD208: a bounded function at its bound, so that hardly any gradient passes; or a softmax or sigmoid applied twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import same_module, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
A sigmoid, tanh, hardtanh, GELU, SiLU or clamp that lies at its bound, so that its slope is exactly zero in its format:
at least `lost` of the magnitude of the gradient that arrives behind it ends there, or `channels` of its channels get
none at all. A sigmoid or tanh also counts where it begins so close to its bound that its slope is below 2^-14 of the
largest. Deep scans (`record --deep-scan`) measure it in the backward pass. A softmax in a module counts if its
median row passes at most `open` of the gradient that equal scores would pass (1 - sum of squared probabilities); masked
scores are no choice. It must be so on two scanned steps or more and on half of all, the first one among them: what has
learnt saturates late, and rightly. A layer that is closed in `all_channels` at the last scan counts in any case, and so
does loss code if a weight's gradient is exactly zero then. `clamp(min=0)` is a ReLU and no bound. `round`, `floor`,
`ceil`, `trunc` and `sign` have no slope anywhere: they count only if a weight's gradient is exactly zero, because
another path may lead around them (a straight-through estimate).

Also a loss that normalises what has been normalised already: `cross_entropy` of a softmax, or
`binary_cross_entropy_with_logits` of a sigmoid. There the loss cannot come near its own bound, zero. And `nll_loss` or
`kl_div` of a softmax: they read logarithms of probabilities.
""",
    matters="""
The layers in front of it do not learn from these elements, and nothing shows it: the outputs are finite and look
decided. Mostly it is a matter of scale: inputs of thousands, weights that begin too large, scores that are not divided
by the root of their width, a clamp in front of a logarithm that cuts off exactly what is most wrong.
""",
    example="""
    scores = q @ k.mT * dim**0.5        # instead of dim**-0.5
    return scores.softmax(-1) @ v       # a hard choice from the first step on
""",
    remedy="""
Bring the input of the function to order one: normalise the data, initialise with a smaller gain, divide attention
scores by the root of the head's width. In place of a sigmoid and a clamped logarithm take
`binary_cross_entropy_with_logits`, whose gradient does not end. Give losses that normalise the logits themselves.
Pass the gradient around `round` and `sign`: `x + (x.round() - x).detach()`.
""",
    confidence="""
0.85: each element of the gradient was counted in front of the function and behind it. 0.9 for a loss that normalises
twice: the tensor was followed from one function to the other.
""",
    references=(
        "LeCun et al., Efficient BackProp, 1998, section 4 (start where the sigmoid is linear)",
        "Vaswani et al., Attention Is All You Need, arXiv:1706.03762, section 3.2.1 (why scores are scaled)",
    ),
)
#: Functions that are flat everywhere; they count only if a weight's gradient is exactly zero.
_STEP_FUNCTIONS = ("round", "floor", "ceil", "trunc", "sign")


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code with such a function, from the deep scans."""

    def guilty(fact: Fact) -> float:
        """The share of the gradient, or of its channels, that ends at the function; 0 below the limits."""
        if fact.flag("again") or fact.flag("without_log"):
            return 1.0
        lost = fact.number("lost")
        if _function(fact) == "softmax":
            return 1.0 - fact.number("open") if fact.number("open") <= options["open"] else 0.0
        channels = fact.number("channels")
        if _function(fact) in _STEP_FUNCTIONS and not fact.count("zero_gradients"):
            return 0.0  # the gradient takes another path, as with a straight-through estimate
        return max(lost, channels) if lost >= options["lost"] or channels >= options["channels"] else 0.0

    def counts(group: Group) -> bool:
        """Whether the function was at its bound on the first scan, or closes nearly all channels on the last."""
        done = group.done_steps
        last = [f for f in group.facts if f.step == done[-1] and not f.flag("near")]
        conclusive = [f for f in last if f.module or f.count("zero_gradients")]
        most = max((f.number("channels") for f in conclusive), default=0.0)
        return group.stands and (done[0] in group.steps or most >= options["all_channels"])

    return check_facts(
        view, ("closed",), guilty, lambda g: _finding(g, options), seen="no function at its bound from the start",
        keep=counts,
    )  # fmt: skip


def _function(fact: Fact) -> str:
    """The name of the bounded function: ``softmax``, ``tanh``, ``clamp`` ..."""
    return text(fact.data.get("function"))


def _finding(group: Group, options: Options) -> Finding:
    fact = group.worst
    if fact.flag("again"):
        return _twice_finding(group)
    if fact.flag("without_log"):
        return _without_log_finding(group)
    near = fact.flag("near")
    function, lost, distance = _function(fact), fact.number("lost"), fact.number("distance")
    if function == "softmax":
        passed = percent(fact.number("open"))
        title = f"softmax {fact.place_words} is a hard choice from the first step on, and passes {passed}{fact.line}"
        message = (
            f"{fact.op_words} passes {passed} of the gradient that a softmax of equal scores would (limit "
            f"{percent(options['open'])}; 1 - sum of squares, median of {fact.count('of'):,} rows): the largest score "
            f"is {distance:.3g} above the next. The layers that make the scores hardly learn."
        )
        scale = 2.0 ** -max(1, round(distance).bit_length())
        prescription = _scaled_input(
            fact,
            scale,
            f"scores times {scale:g}{fact.own_line}: distance {distance:.3g} -> {distance * scale:.2g}",
            {"distance": {"from": distance, "to": distance * scale}},
        )
    else:
        channels = percent(fact.number("channels"))
        ends = f"{percent(lost)} of the gradient"
        if lost < options["lost"]:
            ends = f"all of the gradient of {channels} of its channels"
        steps = function in _STEP_FUNCTIONS
        state = "has no slope" if steps else "is at its bound"
        slope = "zero everywhere" if steps else f"{'next to ' * near}zero there"
        title = f"{function} {fact.place_words} {state}: {ends} ends there{fact.line}"
        message = (
            f"{fact.op_words} passes {'next to ' * near}nothing on for {fact.count('closed'):,} of "
            f"{fact.count('of'):,} elements that a gradient arrives at: {percent(lost)} of its magnitude (limit "
            f"{percent(options['lost'])}), and all of it in {channels} of the channels (limit "
            f"{percent(options['channels'])}). The slope of {function} is {slope}."
        )
        prescription = _straight_through(fact, function)
        if not steps:
            what = f"bring the input of {function} to order one{fact.own_line}: gradient lost {percent(lost)} -> 0 %"
            prescription = _scaled_input(fact, 1.0 / 16, what, {"gradient_lost": {"from": lost, "to": 0.0}})
    return group.finding(
        RULE,
        title=title,
        message=f"{message}{group.elsewhere_words}",
        certain=(0.85, "each element of the gradient was counted in front of the function and behind it"),
        limits={n: options[n] for n in ("lost", "channels", "all_channels", "open")},
        prescription=prescription,
    )


def _scaled_input(fact: Fact, scale: float, title: str, predicted: Mapping[str, Any]) -> Prescription:
    """Multiply the input of the function by ``scale``."""
    return Prescription(
        title=title,
        change={"input_scale": scale, "op": fact.op},
        predicted=predicted,
        snippet=f"y = f(x * {scale:g})  # what goes into {_function(fact)}; normalise it, or begin smaller\n",
    )


def _straight_through(fact: Fact, function: str) -> Prescription:
    """Pass the gradient around a function that has no slope anywhere, at whatever scale."""
    lost = fact.number("lost")
    return Prescription(
        title=f"pass the gradient around {function}{fact.own_line} (a straight-through estimate): gradient lost "
        f"{percent(lost)} -> 0 %",
        change={"gradient": {"from": function, "to": "straight-through"}, "op": fact.op},
        predicted={"gradient_lost": {"from": lost, "to": 0.0}},
        snippet=f"y = x + (torch.{function}(x) - x).detach()  # the value of {function}, the gradient of x\n",
    )


def _twice_finding(group: Group) -> Finding:
    """The finding for a loss that reads probabilities as logits, and so normalises twice."""
    fact = group.worst
    function, classes = _function(fact), max(fact.count("classes"), 2)
    softmax = function == "softmax"
    loss = "cross_entropy" if softmax else "binary_cross_entropy_with_logits"
    # At best the right class has a probability of 1: read as logits, exp(1) for it and exp(0) for each other class.
    least = math.log1p((classes - 1) / math.e)
    among = f"over {classes:,} classes" if softmax else "with a target of 1"
    return group.finding(
        RULE,
        title=f"{loss} is given probabilities, {function} is applied twice: the loss cannot fall below {least:.2f}"
        f"{fact.line}",
        message=f"{fact.op_words} normalises {_made_words(fact)}. It lies between 0 and 1 and is taken for "
        f"logits, so that {among} the loss is {least:.3g} at best (limit of logits: 0). The more certain the model is, "
        f"the less of the gradient is left.{group.elsewhere_words}",
        certain=(0.9, "the tensor was followed from one function to the other"),
        limits={},
        prescription=Prescription(
            title=f"give {loss} the logits, without the {function}{fact.where('made_by')[1]}: least loss "
            f"{least:.2f} -> 0",
            change={"remove": function, "op": fact.op},
            predicted={"least_loss": {"from": least, "to": 0.0}},
            snippet=f"loss = F.{loss}(logits, target)  # it applies {function} itself\n",
        ),
    )


@dataclass(frozen=True)
class _LossOfLogarithms:
    """A loss that reads log-probabilities, in words: the harm of probabilities, and the remedy."""

    name: str
    harm: str
    explained: str
    remedy: str
    measured: tuple[str, float]  # with probabilities; the remedy makes it 0
    snippet: str


_NLL = _LossOfLogarithms(
    name="nll_loss",
    harm="the loss ends at -1",
    explained="So the loss is negative, -1 at best (limit of logarithms: 0), and its gradient does not grow where the "
    "model is wrong.",
    remedy="give cross_entropy the logits, or nll_loss their log_softmax: least loss -1 -> 0",
    measured=("least_loss", -1.0),
    snippet="loss = F.cross_entropy(logits, target)  # without the softmax before it\n",
)
_KL_DIV = _LossOfLogarithms(
    name="kl_div",
    harm="it is not least at the target",
    explained="It is least (limit of logarithms: 0) if all probability is on one class, whatever the target is.",
    remedy="give kl_div the log_softmax: missing logarithms 1 -> 0",
    measured=("missing_logarithms", 1.0),
    snippet="loss = F.kl_div(logits.log_softmax(-1), target, reduction='batchmean')\n",
)


def _without_log_finding(group: Group) -> Finding:
    """The finding for a loss of probabilities, which it reads as their logarithms."""
    fact = group.worst
    loss = _KL_DIV if fact.data.get("loss") == _KL_DIV.name else _NLL
    return group.finding(
        RULE,
        title=f"{loss.name} is given probabilities without their logarithm: {loss.harm}{fact.line}",
        message=f"{fact.op_words} belongs to {loss.name}. That loss reads log-probabilities, which are 0 at most, and "
        f"is given {_made_words(fact)}. {loss.explained}{group.elsewhere_words}",
        certain=(0.9, "the tensor was followed from the softmax to the loss"),
        limits={},
        prescription=Prescription(
            title=loss.remedy,
            change={"loss": {"from": f"{loss.name} of softmax", "to": f"{loss.name} of log_softmax"}, "op": fact.op},
            predicted={loss.measured[0]: {"from": loss.measured[1], "to": 0.0}},
            snippet=loss.snippet,
        ),
    )


def _made_words(fact: Fact) -> str:
    """Return ``the result of the softmax at train.py:30``; without the line in older logs."""
    return f"the result of the {_function(fact)}{fact.where('made_by')[1]}"


def stops_gradient(cause: Finding, effect: Finding) -> bool:
    """Whether ``effect`` is about the same module, a saturated layer of the root, or the weights in front of ``cause``.

    Weights are in front of a function without slope if their gradients were zero on the scanned step, and no output of
    zeros explains that.
    """
    saturated = "saturated_share" in effect.evidence and cause.location.root == effect.location.root
    zero, dead = cause.evidence.get("zero_gradients_of"), effect.evidence.get("dead_weights")
    flat = cause.evidence.get("function") in _STEP_FUNCTIONS and effect.location.kind == "weight_grad"
    behind = flat and isinstance(zero, list) and isinstance(dead, list) and bool(set(dead) & set(zero))
    return saturated or behind or same_module(cause, effect)


RULE = Rule(
    code="PD208",
    name="saturated-function",
    severity=Severity.WARNING,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=(
        fraction("lost", 0.75, "Least share of the arriving gradient's magnitude that ends there.",
                 "Chosen empirically: most of it."),
        fraction("channels", 0.5, "Least share of channels through which no gradient passes.", "Half of a layer."),
        fraction("all_channels", 0.9, "The same on the last scanned step, if it began later.",
                 "Nearly all of a layer."),
        fraction("open", 1.0 / 32, "Most of an even softmax's gradient that its median row passes.",
                 "Chosen empirically: scores with a standard deviation of 8 pass a tenth."),
    ),
    settles=True,
    sampled_steps=False,
    explains=when(stops_gradient, "PD203", "PD204"),
    check=check,
)  # fmt: skip
