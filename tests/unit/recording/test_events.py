"""Events that follow from a step's numbers."""

import json
import math

import pytest

from precdoctor.recording.output.step_rows import EventLog
from precdoctor.recording.slots.step_batch import StepBatch, StepFacts


def unsampled(loss: float, non_finite: int) -> tuple[StepBatch, dict]:
    batch = StepBatch(StepFacts(3, losses=[loss]), [], {})
    return batch, {"non_finite": non_finite, "loss": loss, "loss_scale": None, "clipped_before_unscale": None}


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [(0.5, ["weight_grad"]), (math.nan, ["loss"]), (math.inf, ["loss"])],
    ids=["gradient", "nan", "inf"],
)
def test_between_samples_only_what_is_known_to_be_bad_is_named(loss, kinds):
    batch, step = unsampled(loss, 1)
    [event] = EventLog(0, redact=False).of_step(batch, [], step, None)
    assert event["event"] == "nonfinite"
    assert set(json.loads(event["data"])["kinds"]) == set(kinds)


def test_a_step_with_nothing_bad_has_no_event():
    batch, step = unsampled(0.5, 0)
    assert EventLog(0, redact=False).of_step(batch, [], step, None) == []


def test_a_run_that_stays_broken_is_not_repeated_for_ever():
    log = EventLog(0, redact=False)
    batch, step = unsampled(math.nan, 1)
    events = [event for _ in range(500) for event in log.of_step(batch, [], step, None)]
    assert 0 < len(events) <= 100
    assert len({event["id"] for event in events}) == len(events)
