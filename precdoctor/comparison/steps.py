"""Selects the steps of a run that can be compared, and computes the figures of whole steps: losses, skipped steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median

import pandas as pd

from precdoctor.diagnosis.survey.rows import grouped
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Bools

#: Kinds of tensors to compare.
KINDS = ("batch", "input", "output", "grad_output", "weight", "weight_grad", "weight_grad_step", "update")
#: Most steps whose tensors are compared, evenly spread over the run. Bounds the work.
MAX_STEPS = 64
#: Why two runs without a common sampled step cannot be compared.
UNSAMPLED = "no common step was sampled in both runs; record both with the same --every"


def usable_steps(view: RunView) -> dict[int, bool]:
    """Complete steps, each with whether every process sampled it."""
    usable: dict[int, bool] = {}
    for steps in view.timeline.values():
        for facts in steps:
            if facts.complete:
                usable[facts.step] = usable.get(facts.step, True) and facts.sampled
    return usable


def sampled_by_all(tables: Sequence[Mapping[int, bool]]) -> list[int]:
    """The steps that every run sampled, thinned evenly to at most :data:`MAX_STEPS`."""
    first, *others = tables
    common = sorted(s for s, sampled in first.items() if sampled and all(other.get(s) for other in others))
    return common[:: max(1, math.ceil(len(common) / MAX_STEPS))]


def step_mismatch(found: Collection[int], expected: Collection[int]) -> str | None:
    """A sentence on how the steps of two runs differ; None if they are the same."""
    if set(found) == set(expected):
        return None
    if not set(found) & set(expected):
        return (
            f"no common steps: the run has steps {span(found)}, the baseline {span(expected)}; "
            "record both from the same first step"
        )
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    words = [f"{len(missing):,} missing, first {missing[0]}"] if missing else []
    words += [f"{len(extra):,} more, first {extra[0]}"] if extra else []
    return (
        f"another step range: the run has steps {span(found)}, the baseline {span(expected)} ({', '.join(words)}); "
        "record the same steps, or write the baseline anew"
    )


def span(steps: Collection[int]) -> str:
    """First and last step, ``0 to 49``; ``none`` without steps."""
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def loss_window(steps: Sequence[int]) -> Sequence[int]:
    """The last quarter of the steps, at least one: the window in which losses are compared."""
    return steps[-max(1, len(steps) // 4) :]


def typical_loss(view: RunView, window: Collection[int]) -> float | None:
    """The median of the finite losses in ``window``; None if there are none."""
    losses = [v for s, v in mean_losses(view).items() if s in window and math.isfinite(v)]
    return median(losses) if losses else None


def bad_losses(view: RunView, steps: Collection[int]) -> list[int]:
    """The steps of ``steps`` whose loss is not finite on some rank."""
    return [s for s, v in mean_losses(view).items() if s in steps and not math.isfinite(v)]


def mean_losses(view: RunView) -> dict[int, float]:
    """Mean loss over ranks, by step; NaN if the loss of any rank is non-finite. Skipped steps are included."""
    every = ((s.step, math.nan if s.loss_is_bad else s.loss) for steps in view.timeline.values() for s in steps)
    by_step = grouped((step, loss) for step, loss in every if loss is not None)
    return {step: fmean(values) for step, values in by_step.items()}


def skipped_share(view: RunView, steps: Collection[int]) -> float:
    """The share of ``steps`` that were skipped on any rank."""
    wanted = set(steps)
    skipped = {f.step for timeline in view.timeline.values() for f in timeline if f.skipped and f.step in wanted}
    return len(skipped) / len(wanted) if wanted else 0.0


def clean_rows(
    view: RunView, measures: Sequence[str], kinds: Sequence[str], columns: Sequence[str], steps: Sequence[int]
) -> pd.DataFrame:
    """The measured rows to compare: excludes recomputed activations, and gradients of skipped steps.

    Arguments as for :meth:`.view.RunView.measured`.
    """
    frame = view.measured(measures, kinds, columns=("phase", *columns), steps=steps)
    clean: Bools = (frame["phase"] != "recompute").to_numpy()
    skipped = [(p.rank, p.attempt, f.step) for p, steps in view.timeline.items() for f in steps if f.skipped]
    if skipped:
        gradient = frame["kind"].astype(str).str.contains("grad").to_numpy()
        clean = clean & ~(gradient & pd.MultiIndex.from_frame(frame[["rank", "attempt", "step"]]).isin(skipped))
    return frame[clean]
