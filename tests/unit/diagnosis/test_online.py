"""The rules over a growing log: what is told when, and what the window hides."""

from __future__ import annotations

import json

import pyarrow.compute as pc
import pytest

from precdoctor.diagnosis.claims.finding import Finding, Location, Severity
from precdoctor.diagnosis.engine import resolve_options
from precdoctor.diagnosis.online import OnlineRules, Window, as_json
from precdoctor.errors import UsageError
from precdoctor.runlog import open_run
from precdoctor.runlog.halting import halt_requested, request_halt
from tests.rules.PD101.samples import FIRING
from tests.support.training import Training


def rules(*halt_on: str) -> OnlineRules:
    return OnlineRules(resolve_options({}), halt_on)


def test_a_finding_is_told_when_two_looks_have_made_it_and_once(tmp_path):
    path = tmp_path / "run"
    next(iter(FIRING.values())).make().write(path)
    online = rules()
    assert online.look(path) == []
    assert online.look(path) == [], "nothing was added"
    steps = open_run(path).steps()["step"].max()
    online._steps = steps - 1  # as if the log had been shorter
    [found, *_] = online.look(path)
    assert found.code == "PD101"
    online._steps = steps - 1
    assert online.look(path) == []


def test_the_last_look_is_believed_at_once(tmp_path):
    path = tmp_path / "run"
    next(iter(FIRING.values())).make().write(path)
    assert next(f.code for f in rules().look(path, last=True)) == "PD101"


def test_a_healthy_run_has_nothing_to_tell(tmp_path):
    Training(6).write(tmp_path / "run")
    online = rules("error")
    assert online.look(tmp_path / "run") == online.look(tmp_path / "run", last=True) == []


def finding(code="PD201", severity=Severity.ERROR):
    return Finding(code, "activation-gradient-underflow", severity, 0.9, "t", "m", Location(root="A#0", step=3))


@pytest.mark.parametrize(
    ("halt_on", "code", "severity", "expected"),
    [
        (["error"], "PD201", Severity.ERROR, True),
        (["error"], "PD201", Severity.WARNING, False),
        (["PD201"], "PD201", Severity.WARNING, True),
        (["PD2"], "PD202", Severity.WARNING, True),
        (["activation-gradient-underflow"], "PD201", Severity.WARNING, True),
        (["PD2"], "PD201", Severity.INFO, False),
        (["PD3", "error"], "PD201", Severity.WARNING, False),
        (["PD3"], "PD201", Severity.ERROR, False),
        ([], "PD201", Severity.ERROR, False),
    ],
)
def test_what_stops_a_run(halt_on, code, severity, expected):
    assert rules(*halt_on).halts(finding(code, severity)) is expected


def test_an_unknown_rule_is_refused():
    with pytest.raises(UsageError, match="PD999"):
        rules("PD999")


def test_a_finding_is_one_line_with_its_run(tmp_path):
    line = as_json(finding(), tmp_path)
    assert line.endswith("\n") and line.count("\n") == 1
    assert json.loads(line)["run"] == str(tmp_path) and json.loads(line)["location"]["step"] == 3


def test_a_window_hides_what_came_before(tmp_path):
    run = Training(6).write(tmp_path / "run")
    window = Window(run, 4)
    assert set(window.steps()["step"]) == {4, 5}
    forms = (
        [("kind", "==", "output")],
        [[("kind", "==", "output")], [("kind", "==", "weight")]],
        pc.field("kind") == "output",
    )
    for filters in forms:
        narrow, whole = window.tensors(filters=filters), run.tensors(filters=filters)
        assert set(narrow["step"]) == {4, 5}
        assert len(narrow) == (whole["step"] >= 4).sum() > 0
    assert len(window.events()) == len(run.events())


def test_a_request_to_halt_is_read_as_it_was_made_and_the_first_one_stands(tmp_path):
    assert halt_requested(tmp_path) is None
    request_halt(tmp_path, "--halt-on, PD201 half of it is zero")
    request_halt(tmp_path, "another")
    assert halt_requested(tmp_path) == "--halt-on, PD201 half of it is zero"
    assert [p.name for p in tmp_path.iterdir()] == ["halt.json"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"message": 3}', b"\xff"])
def test_a_damaged_request_is_none(tmp_path, content):
    (tmp_path / "halt.json").write_bytes(content)
    assert halt_requested(tmp_path) is None
