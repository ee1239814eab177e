"""PD501: optimizer updates too small for the weights' format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.advice.wide_weights import fp32_weights, wide_weights, widened_bytes, widened_elements
from precdoctor.diagnosis.analyses.parameters import is_bare, trainable
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import memory, percent, plural
from precdoctor.diagnosis.families.updates.lost_weight_updates_counts import (
    Counts,
    Moves,
    listed_updates,
    rounding_of,
    survey,
    usable_steps,
)
from precdoctor.diagnosis.families.updates.lost_weight_updates_large import (
    large_finding,
    large_weights,
    lose_updates,
    still_finding,
    still_weights,
)
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FORMATS, FP32

PAGE = RulePage(
    finds="""
Weights kept in a 16-bit (or 8-bit) format whose optimizer updates do not stick: `round(w + dw) == w` for the *intended*
non-zero update dw. The count is exact: elements whose bits are equal after the step although an update was intended.
For SGD, Adam and AdamW the intended update is recomputed; for other optimizers "gradient is not zero" stands in for it.

Optimizers that torch does not ship may round stochastically or carry the remainder (Kahan), and then nothing is lost.
Their largest weights show which: rounded without bias they move, rarely, by a whole ulp, and the mean size of the
stored changes predicts how often. If such moves are seen, the rule passes. If none of `min_moves` expected ones is
seen, the optimizer rounds to nearest. Where the log cannot decide, the finding is information.

Updates that FP32 weights would lose as well (the exponent of dw more than 24 binades below that of w, from the recorded
histogram of exponent(dw) - exponent(w)) count neither as lost nor as intended: they are decayed moments of unused
embedding rows. Steps whose learning rate is below `lr_share` of the run's largest are left out, because warm-up and the
end of a decay lose updates everywhere.

FP32 weights are judged if half of a parameter's elements are larger than `large_weight` (map coordinates, years,
prices): numbers near 5e6 are 0.5 apart. Smaller weights lose only updates below 2^-25 of their size, which is no
rounding, but a learning rate, a clipping norm or a factor that is off by orders of magnitude: a matrix that loses
`stuck_share` of its updates is reported, lookup tables excepted. Either half of the run must lose as much, because what
has converged has nothing left to lose, and so must the last recorded step: a gate that begins at zero may open late.
""",
    matters="""
A lost update is lost for good, it does not add up over the steps. Training slows down, then stops at a loss that FP32
weights would have passed, and nothing looks wrong. BF16 keeps 8 significant bits: a step smaller than 1/512 of the
weight is gone (1/1024 just below a power of two).
""",
    example="""
AdamW at learning rate 1e-4 on weights of 0.5 in BF16: half an ulp is 2^-9 = 0.002, every update is lost.

    model = model.bfloat16()                                   # updates lost
    model = model.float()                                      # FP32 weights,
    with torch.autocast("cuda", dtype=torch.bfloat16): ...     # BF16 arithmetic
""",
    remedy="""
Keep FP32 (master) weights and compute in BF16 under autocast; frozen weights, such as the base of an adapter (LoRA),
stay in 16 bits. The finding states the memory it costs: weights, gradients and optimizer state of the trained
parameters, and the 16-bit copies that autocast makes of them. Where memory forbids it, round stochastically or sum with
compensation (Kahan). A larger learning rate hides the symptom only for small weights. Large FP32 weights: learn the
distance from a fixed offset, normalise the data, or keep that one parameter in FP64.
""",
    confidence="""
0.95 where the intended update was recomputed exactly (SGD, Adam, AdamW), 0.8 where "gradient is not zero" stood in for
it and the moves of the weights prove rounding to nearest, 0.7 where they do not. At most 0.8 below `error_share`: most
updates stick, and another fault may weigh more. 0.1 less when fewer than four steps were usable.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192 (stochastic rounding, Kahan summation)",
        "Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551, section 3 (it has no bias)",
    ),
)

_NARROW = tuple(f.dtype for f in FORMATS.values() if f.mantissa_bits < FP32.mantissa_bits)


#: Optimizers of torch.optim whose intended update is not recomputed; each of them rounds to nearest.
_DETERMINISTIC = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
                  "Rprop", "SparseAdam")  # fmt: skip


@dataclass(frozen=True)
class _Narrow:
    """Update counts of all narrow weights; ``stuck``: of those that lose `stuck_share` of their updates or more."""

    weights: Sequence[Counts]
    stuck: Sequence[Counts]

    @property
    def intended(self) -> float:
        return sum(p.intended for p in self.weights)

    @property
    def share(self) -> float:
        """Lost share of the intended updates; 0 if none was intended."""
        return sum(p.lost for p in self.weights) / self.intended if self.intended else 0.0


def check(view: RunView, options: Options) -> Checked:
    """One finding over all narrow weights (information if only some stand still), one over FP32 weights.

    The latter is about large weights, else about weights that take up almost no update.
    """
    usable = usable_steps(view, options["lr_share"])
    narrow = _narrow(view, usable, options)
    large = large_weights(view, usable, options["large_weight"])
    stuck = [(p, ulp) for p, ulp in large if lose_updates(p, options["lost_share"], options["large_steps"])]
    if stuck:
        wide = large_finding(RULE, view, stuck, options["lost_share"])
        reason = f"{percent(wide.evidence['lost_share'])} of the updates of a large FP32 weight lost"
    elif still := still_weights(view, usable, options["stuck_share"], options["large_steps"]):
        wide = still_finding(RULE, view, still, options["stuck_share"])
        reason = f"{plural(len(still), 'FP32 weight')} take up no update"
    else:
        return narrow or _without_finding(view, len(large), options)
    return Checked([*(narrow.findings if narrow else ()), wide], reason)


def _narrow(view: RunView, usable: set[tuple[Process, int]], options: Options) -> Checked | None:
    """Check the weights in 16 bits and less; None if no update of one was recorded."""
    weights = survey(view, usable, _NARROW, int(options["fp32_binades"]))
    if not weights:
        return None
    seen = f"the updates of {plural(len(weights), 'narrow weight')}"
    narrow = _Narrow(weights, [p for p in weights if p.share >= options["stuck_share"]])
    share = narrow.share
    if share < options["lost_share"] and not narrow.stuck:
        return Checked((), f"{seen}: {percent(share)} lost (limit {percent(options['lost_share'])})")
    foreign = _unknown_optimizer(view)
    moves = rounding_of(view, usable, _NARROW, options) if foreign else None
    if moves is not None and moves.unbiased:
        reason = f"{seen}: {percent(share)} leave the weight as it is, but {foreign} rounds without bias"
        return Checked((), f"{reason}: large weights moved {moves.seen:,} times ({moves.expected:,.0f} expected)")
    return Checked([_finding(view, narrow, options, moves)], f"{percent(share)} of {seen} lost")


def _without_finding(view: RunView, large: int, options: Options) -> Checked:
    """Return the outcome without a finding: indeterminate if narrow weights are trained but no update is recorded."""
    if large:
        return Checked(
            (), f"{plural(large, 'large FP32 weight')}: updates stick (limit {percent(options['lost_share'])})"
        )
    if view.tensor_count(("update",))[0]:
        least = f"all weights are FP32 or FP64 and below {options['large_weight']:g}"
        return Checked.not_applicable(f"{least}: lost updates carry nothing there")
    if dtypes := [dtype for dtype in _NARROW if trainable(view, (dtype,))]:
        return Checked.indeterminate(f"weights in {', '.join(sorted(dtypes))}, but no update was recorded")
    return Checked.not_applicable("no weight update in a 16-bit format was recorded")


def _finding(view: RunView, narrow: _Narrow, options: Options, moves: Moves | None) -> Finding:
    share, stuck = narrow.share, narrow.stuck
    general = share >= options["lost_share"]
    in_doubt = moves is not None and moves.unbiased is None
    pool = narrow.weights if general else stuck
    worst = max(pool, key=lambda p: (p.lost, p.share))
    fmt = known_format(worst.dtype)
    name = f"{worst.dtype} ({fmt.mantissa_bits + 1} significant bits)" if fmt is not None else worst.dtype
    if general:
        title = f"{percent(share)} of the weight updates are lost in {worst.dtype}"
        severity = Severity.ERROR if share >= options["error_share"] else Severity.WARNING
        severity = Severity.INFO if in_doubt else severity
    else:
        title = f"{plural(len(stuck), 'tensor')} in {worst.dtype} stand still, `{worst.name}` the largest"
        severity = Severity.INFO
    over = f"over {plural(max(p.steps for p in narrow.weights), 'step')}{worst.rate_words(view)}"
    message = f"{_share_words(narrow, worst, name, over, options)} {_fp32_words(view, moves)}"
    confidence, why = _confidence(view, worst, moves)
    if share < options["error_share"]:
        confidence, why = min(confidence, 0.8), f"{why}; most updates stick, so another fault may weigh more"
    evidence = {
        "lost_share": share,
        "limit": options["lost_share" if general else "stuck_share"],
        "worst_lost_share": worst.share,
        "stuck_tensors": len(stuck),
        **listed_updates(worst, sorted(narrow.weights, key=lambda p: -p.lost)),
        "confidence_reason": why,
    }
    if moves is not None:
        evidence["moves_of_largest_weights"] = {"expected": moves.expected, "seen": moves.seen, "steps": moves.steps}
    evidence |= worst.weight_range(view)
    return RULE.finding(
        severity=severity,
        confidence=confidence,
        title=title,
        message=message,
        location=worst.location,
        evidence=evidence,
        prescription=_prescribe(view, narrow, worst.dtype),
    )


def _share_words(narrow: _Narrow, worst: Counts, name: str, over: str, options: Options) -> str:
    """State lost share and limit in a sentence; ``name``: the format of the ``worst`` weight in words."""
    share = narrow.share
    if share >= options["lost_share"]:
        return (
            f"{percent(share)} of the intended updates of {plural(len(narrow.weights), 'weight')} in {name} left the "
            f"weight unchanged (limit {percent(options['lost_share'])}), {over}; {percent(worst.share)} in "
            f"`{worst.name}`."
        )
    return (
        f"{percent(worst.share)} of the intended updates of `{worst.name}` in {name} left it unchanged (limit of a "
        f"single weight {percent(options['stuck_share'])}), {over}. {plural(len(narrow.stuck), 'weight')} of "
        f"{len(narrow.weights):,} above that limit. Over all weights {percent(share)} of the updates are lost; from "
        f"{percent(options['lost_share'])} on that is a warning."
    )


def _unknown_optimizer(view: RunView) -> str:
    """Return the class of the first optimizer whose rounding is unknown; empty without one, as under torch's."""
    inexact = (o for o in view.optimizers if text(o.get("intended_update")) == "gradient")
    classes = ((text(o.get("class")), text(o.get("package")) in ("torch", "")) for o in inexact)
    return next((c for c, torchs in classes if not (torchs and c in _DETERMINISTIC)), "")


def _fp32_words(view: RunView, moves: Moves | None) -> str:
    """State in one or two sentences whether FP32 weights would have kept the updates."""
    if moves is None:
        return "FP32 weights would have kept them."
    if moves.unbiased is None:
        return f"Nothing is lost if {_unknown_optimizer(view)} rounds stochastically or carries the remainder."
    if moves.still:
        return f"No element of any of them moved on {plural(moves.steps, 'step')}: FP32 weights would have."
    return (
        f"{_unknown_optimizer(view)} rounds to nearest: of the largest quarter of each weight {moves.seen:,} moved, "
        f"where stochastic rounding or compensation would have moved {moves.expected:,.0f} on "
        f"{plural(moves.steps, 'step')}. FP32 weights would have kept these updates."
    )


def _confidence(view: RunView, worst: Counts, moves: Moves | None) -> tuple[float, str]:
    """Return the confidence of the finding, and the reason for it."""
    exact = bool(view.optimizers) and all(text(o.get("intended_update")) != "gradient" for o in view.optimizers)
    confidence = 0.95 if exact else 0.7
    why = "intended updates recomputed from optimizer state" if exact else "intended taken as gradient not zero"
    if moves is not None and moves.unbiased is False:
        confidence, why = 0.8, f"{why}; the large weights were counted never to move"
    if worst.steps < 4:
        return round(confidence - 0.1, 2), f"{why}; fewer than four usable steps"
    return confidence, why


def _prescribe(view: RunView, narrow: _Narrow, dtype: str) -> Prescription:
    elements = widened_elements(view, _NARROW, sum(p.numel for p in narrow.weights))
    fmt = known_format(dtype)
    extra = widened_bytes(view, elements, 2 if fmt is None or fmt.bits > 8 else 1)
    bare = all(is_bare(p.key[1], p.key[3]) for p in narrow.weights)
    fp32_lost = sum(map(_lost_in_fp32, narrow.weights))
    after = fp32_lost / narrow.intended if narrow.intended else 0.0
    return Prescription(
        title=f"keep {fp32_weights(view, _NARROW)}, compute BF16: lost {percent(narrow.share)} -> "
        f"{percent(after)}, +{memory(extra)}",
        change={"weight_dtype": {"from": dtype, "to": "float32"}},
        predicted={"lost_share": {"from": narrow.share, "to": after}, "extra_bytes": extra},
        snippet=(
            "import torch\n\n"
            "parameter = torch.nn.Parameter(parameter.detach().float())  # before the optimizer is made\n"
            "x = compute(parameter.to(torch.bfloat16))  # narrow where it is used\n"
        )
        if bare
        else wide_weights(view, _NARROW),
    )


def _lost_in_fp32(parameter: Counts) -> float:
    """Estimate how many of the counted updates FP32 would also lose: half of those 24 binades below the weight."""
    index = -(FP32.mantissa_bits + 1) - parameter.relative.lo
    inside = 0 <= index < parameter.relative.counts.size
    return math.floor(0.5 * float(parameter.relative.counts[index])) if inside else 0.0


def stalled_weights(_cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` is about weights: then it names the line of code that leaves them unchanged."""
    return effect.evidence.get("target") == "weight"


RULE = Rule(
    code="PD501",
    name="lost-weight-updates",
    severity=Severity.ERROR,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        fraction("lost_share", 0.25, "Least share of lost updates, over all narrow weights together.",
                 "Chosen empirically: healthy FP32-master runs lose under 1 %, AdamW at 1e-4 on BF16 98 %."),
        fraction("error_share", 0.5, "Share of lost updates from which the finding is an error.",
                 "Half of all updates."),
        fraction("stuck_share", 0.9, "A tensor that loses this share stands still; alone it is information.",
                 "Norm gains of 1.0 in BF16 do at any usual learning rate."),
        fraction("lr_share", 0.1, "Steps below this share of the run's largest learning rate are left out.",
                 "Ends of warm-up and decay schedules, which commonly go to a tenth."),
        RuleOption("fp32_binades", 24.0, "binades", "Updates this far below the weight are lost in FP32 too.",
                   "FP32 has 24 significant bits.", 1.0),
        RuleOption("large_weight", 1024.0, "value", "FP32 weights are judged above this size.",
                   "FP32 numbers are 1.2e-4 apart there: Adam's steps at usual rates begin to round away.", 1.0),
        RuleOption("large_steps", 8.0, "steps", "Least number of usable steps to judge an FP32 weight.", minimum=2.0),
        RuleOption("min_moves", 50.0, "moves",
                   "Expected moves of the largest weights under unbiased rounding, for their absence to be a proof.",
                   "None of 50 independent moves has a probability of e^-50.", 1.0),
        RuleOption("moved_share", 0.1, "fraction",
                   "Seen among expected moves up to which the optimizer rounds to nearest; from a half on it does not.",
                   "Chosen empirically: unbiased rounding gives 1 and more, rounding to nearest next to nothing.",
                   maximum=0.4),
        RuleOption("still_steps", 32.0, "steps",
                   "If no element moves, least distance between the first and the last examined step.",
                   "Chosen empirically: compensated sums of such updates move the smallest weights by then.", 1.0),
    ),
    explains={**when(anywhere, "PD502", "PD505"), **when(stalled_weights, "PD509")},
    check=check,
)  # fmt: skip
