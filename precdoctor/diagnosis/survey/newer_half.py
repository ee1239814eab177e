"""The newer half of a run as the rules see it, to find what began late and is small on average over the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.arrow_rows import KeptRows
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.survey import Survey
from precdoctor.diagnosis.survey.view import Process, RunView, remembered

#: Sampled steps that each half must have: fewer make no average.
_FEWEST = 6


class NewerHalf(RunView):
    """The steps of a run from :attr:`first` on, with the events and the totals of the whole run.

    It shares the tables of the view of the whole run: no table is read a second time.
    """

    def __init__(self, whole: RunView, first: int) -> None:
        super().__init__(whole.run)
        self._whole = whole
        self._decoded_events = whole._decoded_events
        self._extra_steps = whole._extra_steps
        self.unread, self.glances = whole.unread, whole.glances
        #: The first step of this half.
        self.first = first

    @cached_property
    def steps(self) -> pd.DataFrame:
        """As of the whole run, from :attr:`first` on."""
        steps = self._whole.steps
        return steps[steps["step"] >= self.first].reset_index(drop=True)

    @cached_property
    def step_batches(self) -> Mapping[Process, list[pa.RecordBatch]]:
        """As of the whole run: which processes are read, and their rows of all steps."""
        return self._whole.step_batches

    @cached_property
    def timeline(self) -> Mapping[Process, Sequence[StepFacts]]:
        """As of the whole run, from :attr:`first` on."""
        return {p: [s for s in steps if s.step >= self.first] for p, steps in self._whole.timeline.items()}

    @cached_property
    def events(self) -> pd.DataFrame:
        """As of the whole run, all of them."""
        return self._whole.events

    @cached_property
    def survey(self) -> Survey:
        """As of the whole run, without the steps before :attr:`first`; rows and totals are those of the whole run."""
        survey = self._whole.survey
        later = pc.field("step") >= self.first
        return replace(
            survey,
            steps_of={kind: steps[steps >= self.first] for kind, steps in survey.steps_of.items()},
            bad=survey.bad.filter(later),
            batches=survey.batches.filter(later),
        )

    def _terms(
        self, kinds: Sequence[str], steps: Sequence[int] | None, where: Sequence[tuple[str, str, Any]]
    ) -> list[tuple[str, str, Any]]:
        """As of the whole run, without the rows before :attr:`first`."""
        return [*super()._terms(kinds, steps, where), ("step", ">=", self.first)]

    @cached_property
    def _kept_rows(self) -> KeptRows:
        """Those of the whole run, whose columns are converted already."""
        return self._whole._kept_rows


@remembered
def newer_half(view: RunView) -> NewerHalf | None:
    """Return the newer half of the run, in steps; None if either half has fewer than six sampled steps."""
    sampled = view.sampled_steps
    if not sampled:
        return None
    first = (int(view.steps["step"].min()) + view.last_step) // 2 + 1
    older = sum(step < first for step in sampled)
    return NewerHalf(view, first) if min(older, len(sampled) - older) >= _FEWEST else None
