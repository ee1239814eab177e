"""PD501, FP32 weights: large ones (coordinates, years, prices), and weights with negligible updates all run long.

FP32 has 24 significant bits: numbers near 5e6 are 0.5 apart, and a step of 0.1 leaves them where they are. A network's
own weights are of order one: an update below 2^-25 of such a weight is a vanishing gradient, not a matter of rounding
(Goldberg, What Every Computer Scientist Should Know About Floating-Point Arithmetic, 1991: the spacing grows with the
number). If nearly all updates of a weight are that small from the first steps on, nothing trains it: a learning rate, a
clipping norm or a factor in front of it is off by orders of magnitude.
"""

from __future__ import annotations

import numpy as np

from precdoctor.diagnosis.analyses.parameters import states_per_parameter
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import and_more, memory, percent, plural
from precdoctor.diagnosis.families.updates.lost_weight_updates_counts import (
    Counts,
    is_update_guessed,
    listed_updates,
    survey,
)
from precdoctor.diagnosis.survey.frames import firsts, groups, histograms, keys
from precdoctor.diagnosis.survey.measures import share
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView
from precdoctor.numerics.formats import FP32, FP64
from precdoctor.numerics.histogram import bin_of

#: Usual exponent of an update relative to its weight.
_USUAL = -10


def large_weights(view: RunView, usable: set[tuple[Process, int]], least: float) -> list[tuple[Counts, float]]:
    """Return FP32 parameters with at least half of their elements above ``least``, in the log's order.

    Each with the spacing of FP32 numbers at its largest element.
    """
    edge = bin_of(least) + 1  # a bin includes its upper end, a power of two: ``least`` itself does not count
    columns = ("exp_lo", "exp_hist")
    frame = view.measured((), ("weight",), columns=columns, where=[("dtype", "in", ("float32",))])
    some = histograms(frame)
    frame = frame[some.total > some.below(edge)].assign(kind="update")
    ids = groups(frame, IDENTITY)
    named = frame.iloc[firsts(ids)]
    values = histograms(frame).merged(ids, len(named))
    mostly = 2 * (values.total - values.below(edge)) >= values.total
    largest = (values.row(i).trimmed() for i in range(len(named)))
    ulps = (2.0 ** (v.lo + v.counts.size - 1 - FP32.mantissa_bits) for v in largest)
    large = {key: ulp for key, ulp, judged in zip(keys(named), ulps, mostly, strict=True) if judged}
    return [(c, large[c.key]) for c in survey(view, usable, ("float32",)) if c.key in large] if large else []


def still_weights(view: RunView, usable: set[tuple[Process, int]], limit: float, least_steps: float) -> list[Counts]:
    """Return FP32 matrices that lose nearly all updates in both halves of the run and on their last recorded step.

    A weight behind a gate that begins at zero (ReZero, SkipInit) is trained once the gate has opened. That is often
    after the first steps, which are all recorded and would outweigh the rest; hence the last step.

    Lookup tables are left out, because the rows that a batch does not use should stand still. So are runs in which the
    gradient stands in for the intended update.
    """
    if is_update_guessed(view):
        return []
    frame = view.measured(("dimensions",), ("update",), where=[("dtype", "in", ("float32",))])
    matrices = set(keys(frame[frame["dimensions"] >= 2]))
    counts = [c for c in survey(view, usable, ("float32",)) if c.key in matrices and "Embedding" not in c.module_class]
    still = [c for c in counts if c.relative.total and lose_updates(c, limit, least_steps)]
    return [c for c in still if c.by_step[-1, 0] >= limit * c.by_step[-1, 1]]


def still_finding(rule: Rule, view: RunView, still: list[Counts], limit: float) -> Finding:
    """Return one finding about all ``still`` weights, located at the largest."""
    worst = max(still, key=lambda c: (c.numel, c.share))
    norms = [s.clip_norm for s in view.timeline.get(worst.last[0], ()) if s.clip_norm]
    more = and_more(len(still), "weight")
    relative = worst.relative
    binade = relative.lo + int(np.searchsorted(np.cumsum(relative.counts), relative.total / 2))
    rates = worst.rate_words(view)
    clipped = f", clipped to a norm of {min(norms):.3g}" if norms and rates else ""
    factor = 2.0 ** (_USUAL - binade)
    return rule.finding(
        severity=Severity.WARNING,
        confidence=0.8,
        title=f"`{worst.name}`{more} stands still: its updates are 2^{binade} of it, too small for FP32",
        message=f"{percent(worst.share)} of the intended updates of `{worst.name}`{more} left the FP32 weight "
        f"unchanged (limit {percent(limit)} in either half of the run), over "
        f"{plural(worst.steps, 'step')}{rates}{clipped}. The median update is 2^{binade} of its weight; half a unit in "
        "the last place is 2^-25 to 2^-24. Training is usual at 2^-10.",
        location=worst.location,
        evidence={
            "lost_share": worst.share,
            "limit": limit,
            "is_negligible": True,
            **listed_updates(worst, still),
            "confidence_reason": "intended updates recomputed from optimizer state",
        },
        prescription=Prescription(
            title=f"larger updates: the learning rate, the clipping norm or the factor in front of `{worst.name}` "
            f"times {factor:.1g}: lost {percent(worst.share)} -> 0 %",
            change={"update_factor": factor, "parameter": worst.name},
            predicted={"lost_share": {"from": worst.share, "to": 0.0}},
            snippet=f"for group in optimizer.param_groups:\n    group['lr'] *= {factor:.1g}\n",
        ),
    )


def lose_updates(parameter: Counts, limit: float, least_steps: float) -> bool:
    """Return whether the parameter loses ``limit`` of its updates in both halves of the run.

    A weight that has converged loses them only in the newer half. False with fewer than ``least_steps`` usable steps.
    """
    steps = parameter.by_step
    if len(steps) < least_steps:
        return False
    middle = len(steps) // 2
    lost, intended = np.stack([steps[:middle].sum(axis=0), steps[middle:].sum(axis=0)], axis=1)
    return bool((np.nan_to_num(share(lost, intended)) >= limit).all())


def large_finding(rule: Rule, view: RunView, stuck: list[tuple[Counts, float]], limit: float) -> Finding:
    """Return one finding about all ``stuck`` weights, located at the one that loses most."""
    worst, ulp = max(stuck, key=lambda both: (both[0].share, both[0].lost))
    more = and_more(len(stuck), "parameter")
    exact = not is_update_guessed(view)
    return rule.finding(
        severity=Severity.WARNING,
        confidence=0.9 if exact else 0.7,
        title=f"{percent(worst.share)} of the updates of `{worst.name}` are lost in FP32: "
        f"its values are {ulp:.3g} apart",
        message=f"{percent(worst.share)} of the intended updates of `{worst.name}`{more} left the FP32 weight "
        f"unchanged (limit {percent(limit)}), over {plural(worst.steps, 'step')}{worst.rate_words(view)}: its largest "
        f"elements are {ulp:.3g} apart in FP32, and a step of less than half of that is gone. Lost updates do not add "
        "up.",
        location=worst.location,
        evidence={
            "lost_share": worst.share,
            "limit": limit,
            "spacing": ulp,
            **listed_updates(worst, [counts for counts, _ in stuck]),
            "confidence_reason": "intended updates recomputed from optimizer state"
            if exact
            else "intended taken as gradient not zero",
            **worst.weight_range(view),
        },
        prescriptions=(_offset(worst), _float64(view, worst)),
    )


def _offset(parameter: Counts) -> Prescription:
    """Prescribe a fixed offset and a learnt residual: FP32 resolves the residual, because it is a sum of updates."""
    leaf = parameter.key[3]
    return Prescription(
        title=f"learn the distance from a fixed offset: lost {percent(parameter.share)} -> 0 %",
        change={"parametrisation": {"module": parameter.key[1], "from": leaf, "to": f"{leaf}_offset + residual"}},
        predicted={"lost_share": {"from": parameter.share, "to": 0.0}},
        snippet=(
            "# in __init__: the large part is fixed, the small part is learnt\n"
            f'self.register_buffer("{leaf}_offset", initial)\n'
            f"self.{leaf} = torch.nn.Parameter(torch.zeros_like(initial))\n\n"
            "# in forward: subtract the offset from the data first, then the residual, so that nothing cancels\n"
            f"difference = (data - self.{leaf}_offset) - self.{leaf}\n"
        ),
    )


def _float64(view: RunView, parameter: Counts) -> Prescription:
    """Prescribe FP64 for this parameter, with the bytes it costs."""
    total = parameter.relative.total
    after = parameter.relative[: -FP64.mantissa_bits - 2].total / total if total else 0.0
    extra = 4 * parameter.numel * (2 + states_per_parameter(view))  # weight, gradient and state become wider
    return Prescription(
        title=f"keep `{parameter.name}` in FP64: lost {percent(parameter.share)} -> {percent(after)}, +{memory(extra)}",
        change={"weight_dtype": {"parameter": parameter.name, "from": "float32", "to": "float64"}},
        predicted={"lost_share": {"from": parameter.share, "to": after}, "extra_bytes": extra},
        snippet=f"self.{parameter.key[3]} = torch.nn.Parameter(initial.double())  # and the data it is compared with\n",
    )
