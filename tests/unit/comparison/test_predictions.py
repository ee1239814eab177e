"""When a prediction came true, and what is made of a run directory that says odd things of itself."""

from __future__ import annotations

import json

import pytest

from precdoctor.comparison.compare import compare
from precdoctor.comparison.predictions import came_true
from precdoctor.diagnosis.prescriptions.effects import Effect
from precdoctor.diagnosis.prescriptions.measures import MEASURES, Scope
from precdoctor.runlog import open_run
from tests.support.training import Training


@pytest.mark.parametrize(
    ("measure", "predicted", "measured", "of", "steps", "expected"),
    [
        ("flushed_share", 0.003, 0.008, None, 10, True),  # half a point
        ("flushed_share", 0.003, 0.0081, None, 10, False),
        ("flushed_share", 0.40, 0.50, None, 10, True),  # 20 %
        ("flushed_share", 0.39, 0.50, None, 10, False),
        ("skipped_steps", 0, 1, 200, 200, True),  # half a point of the steps
        ("skipped_steps", 0, 1, 199, 199, False),
        ("skipped_steps", 10, 100, 100, 1000, True),  # as shares of their own runs
        ("headroom_binades", 100.0, 112.0, None, 10, True),
        ("headroom_binades", 0.1, 0.5, None, 10, False),  # binades have no half point
        ("headroom_binades", 0.0, 0.0, None, 10, True),
    ],
)
def test_came_true(measure, predicted, measured, of, steps, expected):
    assert came_true(Effect(MEASURES[measure], Scope(), 1.0, predicted, of), measured, steps) is expected


def with_statement(path, statement):
    Training(3).write(path)
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "applied": statement}))
    return open_run(path)


def test_a_run_without_apply_says_nothing_of_it(tmp_path):
    found = compare(Training(3).write(tmp_path / "a"), Training(3).write(tmp_path / "b"))
    assert found.applied is None


def test_effects_are_measured_on_both_runs(tmp_path):
    effect = {"measure": "nonfinite_steps", "from": 2, "to": 0, "steps": 3}
    change = {"setting": "autocast.dtype", "to": "bfloat16"}
    statement = {"schema_version": 1, "prescriptions": [{"code": "PD101", "change": [change], "effect": [effect]}]}
    found = compare(Training(3).write(tmp_path / "a"), with_statement(tmp_path / "b", statement))
    [outcome] = found.applied.outcomes
    assert (outcome.before, outcome.measured, outcome.came_true) == (0.0, 0.0, True)


@pytest.mark.parametrize("statement", [3, [], {}, {"schema_version": 1, "prescriptions": [{"change": "x"}]}])
def test_a_hostile_statement_is_a_note_not_a_crash(tmp_path, statement):
    found = compare(Training(3).write(tmp_path / "a"), with_statement(tmp_path / "b", statement))
    assert found.applied.problem and not found.applied.outcomes
