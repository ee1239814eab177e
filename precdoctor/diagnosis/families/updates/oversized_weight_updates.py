"""PD504: updates as large as the weights they change, step after step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from precdoctor.diagnosis.analyses.healthy_steps import is_well
from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.analyses.parameters import parameter_label, worst_parameters
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, grown_since, thrown_off_before, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.updates.oversized_weight_updates_rates import (
    Rates,
    came_back,
    gentler_start,
    left_of,
    losses_of,
    lower_rate,
    never_came_back,
    never_was_below,
    nothing_learnt,
    rates_of,
    stable_rate_of,
    start_words,
    warmed_up,
)
from precdoctor.diagnosis.families.updates.oversized_weight_updates_weights import (
    Weight,
    decay_finding,
    penalty_finding,
    strongest_decay,
    strongest_penalty,
    survey_weights,
)
from precdoctor.diagnosis.survey.rows import Parameter, tensor_evidence, tensor_location
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Weight matrices whose update is not small against the weight: RMS(dw) / RMS(w), both as stored, is `ratio` or more in
the median of the newer half of the recorded steps. About 1e-3 is usual, 1e-2 is brisk. The first half of the run does
not count, and neither does the first half of their optimizer's steps: by then zero-initialised weights, whose first
updates are infinitely large, have found their size. Weights that were initialised to almost nothing (below `sized`)
count only if the share is 1.5 times that of as many updates in random directions. Biases and gains are not judged.

The first `early_steps` steps, of the run or at half of the largest learning rate or more (behind a warm-up), count
alone if they threw the run off: the median of their updates is `early_ratio` or more of the weight's initial RMS, and
the loss went wrong afterwards. Either it more than doubled, or it did not fall. It did not fall if the older or the
newer half of the run, without its first eighth, is less than `learnt` below the first losses; or if the next three
times as many steps are less than `stays` below the first of them, and `most` of all weight matrices are replaced so.
Then the weight must also have grown to `outgrown` times its initial RMS, so that nothing is left of its initialisation.

The few steps behind the first ones do not count if the run ended well and made up for them. Either the newer half of
its losses is at most a tenth of the first loss. Or the loss more than doubled, came back below the first within three
times as many steps, and is `learnt` below it in the newer half.

Weights that were initialised to nothing (RMS times the square root of the fan-in below `sized`) have no size of their
own. Their first updates, and their growth, are compared with the size of a usual initialisation, 1 / sqrt(fan-in). If
the loss was above its first value in each quarter of the run, a quarter of `sized` is enough for an own size.

The rule also reports weight decay that outruns the gradient. The optimizer takes the share `decay` of every weight or
more away per step (learning rate times weight decay, over 1 - momentum under SGD), and half of the weight matrices have
shrunk to the fraction `shrunk` of their first size. Optimizers that add the decay to the gradient and divide by the
size of the sum (Adam, RMSprop, Adagrad) take no fixed share. There the penalty, weight decay times the weight's RMS,
must be `outweighs` times the gradient's RMS or more for half of the matrices, in the median of the newer half, and
these must have shrunk as much.
""",
    matters="""
A weight that is replaced by a third of itself on every step follows the newest batch, not the data. The loss stays on a
plateau or jumps about, and the next unlucky batch throws the run off.
""",
    example="""
Adam moves every element by about the learning rate whatever its gradient: at lr 0.1, weights of 0.05 are replaced
outright.

    torch.optim.Adam(model.parameters(), lr=0.1)    # ratio 1 and above
    torch.optim.Adam(model.parameters(), lr=1e-3)   # 0.02
""",
    remedy="""
Lower the learning rate by the factor in the finding, at least for the named weights. The ratio is proportional to the
learning rate under Adam, and under SGD while the gradient stays what it is. Where SGD at one rate diverges, the growth
of its gradient from step to step gives the largest stable rate, and half of that is proposed. Where only the first
steps were too large, a warm-up is enough; where there already is one, a longer one or a lower peak. Where nothing was
learnt, or the run never came back, at a rate that stayed at half of the first or more, the rate itself is too large: a
warm-up would end at the same rate and comes second. Weights that decay want a smaller weight decay: a weight is an
average over 1 / (learning rate x weight decay) steps, which should be thousands.
""",
    confidence="""
0.85; 0.7 when fewer than eight steps of the newer half were recorded.
""",
    references=(
        "Bottou, Curtis, Nocedal, Optimization Methods for Large-Scale Machine Learning, arXiv:1606.04838",
        "Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability, arXiv:2103.00065",
        "Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, section 2",
        "Wang and Aitchison, How to set AdamW's weight decay as you scale model and dataset size, arXiv:2405.13698",
        "You et al., Large Batch Training of Convolutional Networks (LARS), arXiv:1708.03888",
    ),
)


#: Share of the first loss that is left in a run that has learnt, whatever its first steps did. Chosen empirically.
_LEFT = 0.1


class _Start(NamedTuple):
    """Weights that the first steps replaced, and the harm it did.

    Attributes:
        harm: the harm, as a sentence.
        behind: `` at the full rate`` if the first steps after a warm-up are meant, else empty.
        rate_itself: the rate stays too large after the first steps, so that a gentler start does not help.
    """

    weights: Mapping[Parameter, Weight]
    harm: str
    behind: str
    rate_itself: bool = False


def check(view: RunView, options: Options) -> Checked:
    """One finding: the weight that is replaced fastest."""
    weights = survey_weights(view)
    if not weights:
        return Checked.not_applicable("no weight matrix was recorded together with its update")
    steps = max(w.ratios.size for w in weights.values())
    seen = f"the updates of {plural(len(weights), 'weight matrix')} on {plural(steps, 'step')}"
    if (decayed := _find_decay(view, options)) is not None:
        return Checked([decayed], f"{seen}: weights decay to nothing")
    large = {p: w for p, w in weights.items() if w.ratios.size >= options["min_steps"] and w.ratio >= options["ratio"]}
    guilty: Mapping[Parameter, Weight] = {p: w for p, w in large.items() if not w.finds_its_size(options["sized"])}
    start = None if guilty else _replaced_at_start(view, options)
    if not guilty and start is None:
        if steps < options["min_steps"]:
            return Checked.not_applicable(f"{seen}, too few for a median")
        return Checked((), f"{seen}: at most {max(w.ratio for w in weights.values()):.2g} of the weight")
    guilty = start.weights if start is not None else guilty
    finding = _finding(view, guilty, len(weights), options, start)
    limit = options["ratio" if start is None else "early_ratio"]
    return Checked([finding], f"{plural(len(guilty), 'weight')} of {seen} above {limit:g}")


def _find_decay(view: RunView, options: Options) -> Finding | None:
    """Return the finding about weight decay; None unless decay explains that at least half of the matrices shrank."""
    decay, penalty = strongest_decay(view), strongest_penalty(view)
    decay = decay if decay is not None and decay.share >= options["decay"] else None
    if decay is None and penalty is None:
        return None
    sizes = {p: w for p, w in survey_weights(view, first=int(options["min_steps"])).items() if w.first > 0.0}
    shrunk = {p: w for p, w in sizes.items() if w.final <= options["shrunk"] * w.first}
    if not shrunk or 2 * len(shrunk) < len(sizes):
        return None
    if decay is not None:
        return decay_finding(RULE, view, decay, shrunk, options["decay"])
    least = (len(sizes) + 1) // 2
    return None if penalty is None else penalty_finding(RULE, view, penalty, shrunk, least, options["outweighs"])


def _replaced_at_start(view: RunView, options: Options) -> _Start | None:
    """Return the weights that the run's first steps, or else those after a warm-up, replaced; None without harm."""
    first, full = int(view.steps["step"].min()), warmed_up(view)
    return _replaced_since(view, options, first) or (_replaced_since(view, options, full) if full > first else None)


def _replaced_since(view: RunView, options: Options, since: int) -> _Start | None:
    """Return the weights that the first steps from ``since`` on replaced; None if that did no harm."""
    count, behind = int(options["early_steps"]), " at the full rate" if since > view.steps["step"].min() else ""
    worse_from, stayed = math.inf, False
    for (process, _), steps in by_optimizer(view).items():
        later = [s for s in steps if s.step >= since]
        early = later[: 3 * count + 1]
        well = losses_of(view, process, later)
        losses = well[: len(losses_of(view, process, early))]
        few = 1 if any(not is_well(view, process, s) for s in early[: 2 * count + 1]) else count
        ended_well = not never_came_back(view, process)
        if len(losses) > few and losses[0] > 0.0 and not (ended_well and left_of(well) <= _LEFT):
            doubled = median(losses[1 : count + 1]) > 2.0 * losses[0]
            if doubled and not (ended_well and came_back(well, count, options["learnt"])):
                worse_from = min(worse_from, early[0].step)
            stayed = stayed or median(losses[1:]) > (1.0 - options["stays"]) * losses[0]
    least = options["sized"] * (0.25 if never_was_below(view) else 1.0)
    every = survey_weights(view, first=count, since=since, sized=least)
    sized = sum(not w.from_nothing for w in every.values())
    large = {p: w for p, w in every.items() if w.ratio >= options["early_ratio"]}
    if worse_from < math.inf:
        large = {p: w for p, w in large.items() if w.last[1] >= worse_from}  # not of an optimizer that ended before
        return _Start(large, "The loss more than doubled after these steps.", behind) if large else None
    outgrown = {p: w for p, w in large.items() if w.final >= options["outgrown"] * w.base}
    if not outgrown:
        return None
    most = max(outgrown.values(), key=lambda w: w.final / w.base)
    size = f"{most.final / most.base:.2g} times {'a usual' if most.from_nothing else 'its'} initial RMS"
    left = f"nothing is left of {plural(len(outgrown), 'weight matrix')}: one ends at {size}"
    if nothing_learnt(view, int(options["min_steps"]), options["learnt"]):
        return _Start(outgrown, f"For half of the run the loss did not fall, and {left}.", behind)
    if stayed and sum(not w.from_nothing for w in outgrown.values()) >= options["most"] * max(1, sized):
        fell = f"the loss fell by less than {percent(options['stays'])}"
        return _Start(
            outgrown, f"In the next {plural(3 * count, 'step')} {fell}, and {left}.", behind, rate_itself=True
        )
    return None


def _finding(
    view: RunView, guilty: Mapping[Parameter, Weight], total: int, options: Options, start: _Start | None
) -> Finding:
    """Return the finding about ``guilty`` weights; ``start``: None if it is not about the first steps."""
    place, weight = max(guilty.items(), key=lambda item: item[1].ratio)
    process, step = weight.last
    row = next((r for r in view.rows(process, step) if r.kind == "update" and r.owner == place), None)
    name, measured, one = parameter_label(place), weight.rows[:, 2].tolist(), weight.ratios.size == 1
    rates, diverging = rates_of(view, *weight.middle, guilty), stable_rate_of(view, process)
    if start is None:
        limit, size, harm = options["ratio"], "its own RMS", ""
        which = f"In the median of {plural(weight.ratios.size, 'step')} in the newer half, each step"
        title = f"each step replaces `{name}` by {weight.ratio:.2g} of itself"
    else:
        limit, harm, whose = options["early_ratio"], f" {start.harm}", "a usual" if weight.from_nothing else "its"
        size = f"{whose} initial RMS{f' of {weight.base:.2g}' if weight.from_nothing else ''}"
        subject, which = start_words(view, measured, start.behind)
        which = f"{which[0].upper()}{which[1:]}" if one else f"In the median of {which}, each step"
        title = f"{subject} {'changes' if one else 'change'} `{name}` by {weight.ratio:.2g} times {whose} initial size"
        title += "" if one else " each"
    at_rate, in_group = (rates.words, rates.group_words) if rates is not None else ("", "")
    return RULE.finding(
        confidence=0.85 if weight.ratios.size >= 8 else 0.7,
        title=title,
        message=f"{which} changed `{name}` by {weight.ratio:.2g} of {size} (limit {limit:g}; about 1e-3 is "
        f"usual){at_rate}. {plural(len(guilty), 'weight matrix')} of {total:,} above the "
        f"limit{in_group}.{harm}{f' {diverging.words}' if diverging is not None else ''}",
        location=tensor_location(place, weight.module_class, "update", Phase.OPTIMIZER, process, step),
        evidence={
            "update_to_weight": weight.ratio,
            "limit": limit,
            "first_steps": measured if start is not None and not start.behind else None,
            "lr": rates.measured if rates is not None else None,
            "parameter_group": rates.group if rates is not None else None,
            "warm_up_steps": rates.warm_up if rates is not None else 0,
            "weights": worst_parameters("update_to_weight", {p: w.ratio for p, w in guilty.items()}),
            "confidence_reason": "weights and updates are recorded as stored",
            **(diverging.evidence if diverging is not None else {}),
            **tensor_evidence(row),
        },
        prescriptions=(diverging.prescription,)
        if diverging is not None
        else _prescribe(view, process, weight, rates, options, start),
    )


def _prescribe(
    view: RunView, process: Process, weight: Weight, rates: Rates | None, options: Options, start: _Start | None
) -> tuple[Prescription, ...]:
    """Prescribe a lower rate first if the rate itself is too large, a warm-up if only the first updates were."""
    what = "update / weight" if start is None else "first updates / initial weight"
    lower = lower_rate(view, rates, weight.ratio, options["target"], what)
    if start is None:
        return (lower,)
    gentler = gentler_start(rates, weight.ratio, options["target"])
    stayed = rates is not None and rates.last >= 0.5 * rates.measured
    unlearnt = stayed and nothing_learnt(view, int(options["min_steps"]), options["learnt"])
    if start.rate_itself or never_came_back(view, process) or unlearnt:
        return lower, gentler
    return (gentler, lower) if rates is not None and rates.warm_up else (gentler,)


RULE = Rule(
    code="PD504",
    name="oversized-weight-updates",
    severity=Severity.WARNING,
    triage=Triage.LEARNING_RATE,
    page=PAGE,
    options=(
        RuleOption("ratio", 0.3, "RMS of update / RMS of weight", "Median over the newer half of the recorded steps.",
                   "Chosen empirically: small healthy networks at brisk rates reach 0.1."),
        RuleOption("target", 0.02, "RMS of update / RMS of weight", "Ratio that the proposed learning rate is to give.",
                   "Chosen empirically: brisk, but a usual ratio.", 1e-6, maximum=0.1),
        RuleOption("early_ratio", 0.5, "RMS of update / RMS of initial weight",
                   "Median over the first steps, if the loss went wrong after them.",
                   "Chosen empirically: first updates may be large; half a weight, with harm done, is too much."),
        fraction("learnt", 0.05,
                 "The loss has not fallen if a half of the run is less than this below the first steps.",
                 "Chosen empirically: a loss over four classes begins at 1.39, and chance moves it by hundredths."),
        fraction("stays", 0.2,
                 "The loss has not fallen if the steps behind the first ones are less than this below the first.",
                 "Chosen empirically: raw targets of 1e6 fall by 0.3, at weights that have to grow."),
        fraction("most", 0.75, "Share of the weight matrices that must be replaced then.",
                 "Chosen empirically: not all layers of a network are as large."),
        RuleOption("outgrown", 3.0, "times the initial RMS",
                   "Growth of a weight in a run that learnt nothing; below it some of the initialisation is left.",
                   "Chosen empirically: nine tenths of the energy are new.", 1.0),
        RuleOption("sized", 0.2, "RMS x sqrt(fan-in)", "Weights below it were initialised to almost nothing.",
                   "Usual initialisations keep a signal's size: about 1; PyTorch's 0.6; N(0, 0.02) at width 256 0.3."),
        RuleOption("decay", 0.005, "fraction per step",
                   "Least product of learning rate and weight decay to explain weights that shrink.",
                   "Fifty times the strongest usual in pre-training, 1e-4 (Wang and Aitchison, arXiv:2405.13698).",
                   maximum=1.0),
        fraction("shrunk", 0.5, "Half of the weight matrices must be down to this share of their first RMS.",
                 "Chosen empirically: sizes that training finds by itself stay within a factor of two."),
        RuleOption("outweighs", 3.0, "RMS of weight_decay x weight / RMS of gradient",
                   "Least size of an L2 penalty under Adam and its like to explain weights that shrink.",
                   "Chosen empirically: weights come to rest where both are equal."),
        RuleOption("early_steps", 3.0, "steps", "Number of recorded steps that count as the first ones.", minimum=1.0),
        RuleOption("min_steps", 6.0, "steps", "Least number of recorded steps in the newer half.", minimum=2.0),
    ),
    explains={**when(anywhere, "PD203", "PD204"), **when(thrown_off_before, "PD603", "PD605"), "PD606": grown_since},
    check=check,
)  # fmt: skip
