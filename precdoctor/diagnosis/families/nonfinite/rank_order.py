"""Which of several ranks went non-finite first, as far as steps and clocks decide it.

:mod:`.incident_report` adds the order to the findings of the run's first non-finite step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.bad_steps import incident_steps
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_at
from precdoctor.diagnosis.survey.rows import integer
from precdoctor.diagnosis.survey.view import RunView

#: Maximum number of ranks that a sentence names.
_MAX_NAMED = 4


@dataclass(frozen=True)
class RankOrder:
    """How non-finite values spread over the ranks.

    Attributes:
        step: the first non-finite step of any rank.
        first: the ranks whose loss was non-finite at ``step``; if there are none, those whose own backward pass was;
            if there are none either, all ranks that were non-finite at ``step``.
        others: number of other ranks that went non-finite, at ``step`` or later.
        last_step: the latest first non-finite step of any rank.
        finite: number of ranks that stayed finite.
        lead: seconds between the two earliest reports of the ranks in ``first``; None for a single rank, if not all of
            them reported, or if no loss was non-finite: gradients are reported after their reduction, which all ranks
            leave together.
        earliest: the rank of the earliest report; None if ``lead`` is None.
        skew: upper bound in seconds of the difference between the clocks of the ranks in ``first``, from the ends of a
            step that all of them recorded; None without such a step, or if fewer than two had a non-finite loss.
    """

    step: int
    first: tuple[int, ...]
    others: int
    last_step: int
    finite: int
    lead: float | None
    earliest: int | None
    skew: float | None

    @property
    def is_certain(self) -> bool:
        """Whether the log decides which rank was first: only one can be, or its lead exceeds the clock skew."""
        leads = self.lead is not None and self.skew is not None and self.lead > self.skew
        return len(self.first) == 1 or leads

    def words(self, origin: int | None) -> str:
        """One to four sentences for a message.

        Args:
            origin: the rank whose batch held the values, or None. Other ranks may report the values that they received
                from it before it reports them itself.
        """
        words = f" {_rank_words(self.first)} went non-finite first, at step {self.step}."
        if len(self.first) > 1 and self.is_certain and origin not in (None, self.earliest):
            words = f" {_rank_words(self.first)} went non-finite at the same step."
        elif len(self.first) > 1 and self.is_certain:
            words = (
                f" Rank {self.earliest} reported it first, {self.lead:.2g} s before the next (clocks differ by up to "
                f"{self.skew:.2g} s)."
            )
        elif len(self.first) > 1:
            reason = "" if self.skew is None else f", because their clocks differ by up to {self.skew:.2g} s"
            words = f" {_rank_words(self.first)} went non-finite at the same step. Which came first is unknown{reason}."
        if self.others:
            words += f" {plural(self.others, 'more rank')} followed by step {self.last_step}."
        return words + (f" {plural(self.finite, 'rank')} stayed finite." if self.finite else "")

    @property
    def evidence(self) -> dict[str, Any]:
        """The order as evidence of a finding."""
        return {
            "step": self.step,
            "ranks": list(self.first),
            "later_ranks": self.others,
            "finite_ranks": self.finite,
            "lead_seconds": self.lead,
            "clock_skew_seconds": self.skew,
            "certain": self.is_certain,
        }


def rank_order(view: RunView, step: int) -> RankOrder | None:
    """The order of the ranks, if ``step`` is the run's first non-finite step; None otherwise, or with one rank."""
    ranks = {p.rank for p in view.everyone}
    firsts = _first_steps(view)
    if len(ranks) < 2 or not firsts or min(firsts.values()) != step:
        return None
    kinds = {p: steps[step] for p, steps in incident_steps(view).items() if step in steps}
    bad_loss = {p.rank for p, k in kinds.items() if "loss" in k}  # others got the values through the gradient reduction
    own = {p.rank for p in kinds if culprit_at(view, p, step) is not None} if not bad_loss else ()
    own = own or {p.rank for p, k in kinds.items() if "weight_grad" in k}
    first = tuple(sorted(bad_loss or own or {rank for rank, at in firsts.items() if at == step}))
    reports = sorted((time, rank) for rank, time in _report_times(view, step).items() if rank in bad_loss)
    comparable = len(first) > 1 and len(reports) == len(first)
    return RankOrder(
        step=step,
        first=first,
        others=len(firsts) - len(first),
        last_step=max(firsts.values()),
        finite=len(ranks) - len(firsts),
        lead=(reports[1][0] - reports[0][0]) / 1e9 if comparable else None,
        earliest=reports[0][1] if comparable else None,
        skew=_clock_skew(view, first, step) if len(bad_loss) > 1 else None,
    )


def _first_steps(view: RunView) -> dict[int, int]:
    """The first non-finite step of each rank that has one."""
    found: dict[int, int] = {}
    surveyed = [(p.rank, min(steps)) for p, steps in incident_steps(view).items() if steps]
    glanced = [g for g in view.glances if g.process not in view.timeline and math.isfinite(g.first_bad)]
    for rank, step in (*surveyed, *((g.process.rank, int(g.first_bad)) for g in glanced)):
        found[rank] = min(step, found.get(rank, step))
    return found


def _report_times(view: RunView, step: int) -> dict[int, int]:
    """The time at which each rank first reported the step, in ns since the epoch."""
    times: dict[int, int] = {}
    for event in view.nonfinite_events:
        rank, time = integer(event.get("rank")), integer(event.get("time_ns"))
        if integer(event.get("step")) == step and rank is not None and time is not None:
            times[rank] = min(time, times.get(rank, time))
    return times


def _clock_skew(view: RunView, ranks: Sequence[int], step: int) -> float | None:
    """Spread in seconds of the ranks' clocks at the end of the last step before ``step`` that all of them recorded.

    Ranks that train in step end a step within the time of one collective; any more is the difference of their clocks.
    None without such a step.
    """
    frame = view.steps[["step", "rank", "wall_time"]].dropna()
    frame = frame[(frame["step"] < step) & frame["rank"].isin(ranks)].drop_duplicates(["step", "rank"], keep="last")
    ends = frame.groupby("step")["wall_time"].agg(["min", "max", "size"])
    shared = ends[ends["size"] == len(ranks)]
    return float(shared["max"].iloc[-1] - shared["min"].iloc[-1]) if len(shared) else None


def _rank_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED:,} more" if len(ranks) > _MAX_NAMED else ""
    return f"Ranks {named}{more}"
