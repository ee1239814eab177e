"""What a run paid for being recorded, and what a longer one would pay."""

from __future__ import annotations

import pytest

from precdoctor.diagnosis.analyses.recording_cost import overhead
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.runlog import open_run
from tests.support.runs import write_run

LED = {"options": {"every": None, "budget": 0.01}}


def view(path, full, after, *, scans=(), info=LED, later_ns=1):
    """Steps of 100 ns: ``full`` recorded in full for 80 of them, then ``after`` for ``later_ns`` of them."""
    steps = [
        {"step": s, "sampled": s < full, "recorder_ns": 80 if s < full else later_ns, "step_ns": 100}
        for s in range(full + after)
    ]
    events = [{"step": s, "event": "scan", "data": '{"kind": "step", "outcome": "done"}'} for s in scans]
    return RunView(open_run(write_run(path / "run", (), steps, events, info=info)))


def test_a_short_run_shows_the_first_steps_and_no_more(tmp_path):
    assert overhead(view(tmp_path, 5, 0, scans=(0, 1))) == {
        "overhead_fraction": 0.8,
        "cost": {
            "full_steps": 5, "scanned_steps": 2, "budget": 0.01, "step_ns": 20, "settled_fraction": None,
            "settled_ns": None,
        },
    }  # fmt: skip


def test_a_longer_run_shows_what_it_settled_at(tmp_path):
    found = overhead(view(tmp_path, 64, 36, scans=(0, 1, 8, 64), later_ns=2))
    assert found["overhead_fraction"] == pytest.approx((64 * 80 + 36 * 2) / 10000)
    assert found["cost"] == {
        "full_steps": 64, "scanned_steps": 3, "budget": 0.01, "step_ns": 20, "settled_fraction": 0.02,
        "settled_ns": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("after", "later_ns", "info"),
    [(0, 1, {"options": {"every": 1, "budget": 0.01}}), (0, 1, {}), (100, 80, LED)],
    ids=["every", "no options", "later steps cost most"],
)
def test_the_first_steps_are_blamed_only_where_they_are_the_reason(tmp_path, after, later_ns, info):
    assert set(overhead(view(tmp_path, 10, after, info=info, later_ns=later_ns))) - {"between"} == {"overhead_fraction"}


@pytest.mark.parametrize(
    ("after", "later_ns", "info", "told"),
    [
        (40, 8, LED, {"fraction": 0.08, "step_ns": 100}),
        (40, 1, LED, None),
        (10, 8, LED, None),
        (40, 8, {"options": {"every": 5, "budget": 0.01}}, None),
    ],
    ids=["above the budget", "within it", "too few steps", "no budget led"],
)
def test_steps_between_samples_that_exceed_the_budget_alone_are_told(tmp_path, after, later_ns, info, told):
    assert overhead(view(tmp_path, 5, after, info=info, later_ns=later_ns)).get("between") == told


def test_what_hooks_waited_for_a_device_is_told_apart(tmp_path):
    steps = [{"step": s, "recorder_ns": 2, "wait_ns": 30 * (s % 2), "step_ns": 100} for s in range(4)]
    found = overhead(RunView(open_run(write_run(tmp_path / "run", (), steps, info=LED))))
    assert (found["overhead_fraction"], found["waited_fraction"]) == (0.02, 0.15)


def test_a_cost_that_was_not_measured_is_null(tmp_path):
    run = write_run(tmp_path / "run", (), [{"step": 0}], info=LED)
    assert overhead(RunView(open_run(run))) == {"overhead_fraction": None}
