"""What is shown of a run that `--apply` changed."""

from __future__ import annotations

import io
import json

import pytest

from precdoctor.comparison.compare import compare
from precdoctor.reporting.outputs import WRITERS, Report
from precdoctor.reporting.run_head import run_facts
from precdoctor.runlog import open_run
from tests.support.training import Training

CHANGE = {"setting": "scaler.init_scale", "from": 65536.0, "to": 1024.0}


def statement(*effects):
    return {"schema_version": 1, "prescriptions": [{"code": "PD302", "change": [CHANGE], "effect": list(effects)}]}


@pytest.fixture
def compared(tmp_path):
    def make(said):
        before = Training(4).write(tmp_path / "before")
        Training(4).write(tmp_path / "after")
        file = tmp_path / "after" / "run.json"
        more = {} if said is None else {"applied": said}
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
        found = compare(before, open_run(tmp_path / "after"))
        return Report(found.diagnosis, 0, None, comparison=found)

    return make


def written(report, shape):
    stream = io.StringIO()
    WRITERS[shape](report, stream)
    return stream.getvalue()


def test_predictions_are_shown_beside_what_came(compared):
    effects = (
        {"measure": "skipped_steps", "from": 2, "to": 0, "steps": 4},
        {"measure": "skipped_steps", "from": 2, "to": 4, "steps": 4},
        {"measure": "skipped_steps", "from": 4, "to": 2, "steps": 4},
        {"measure": "headroom_binades", "root": "x", "module": "y", "kind": "output", "from": 1.0, "to": 2.0},
    )
    report = compared(statement(*effects))
    rows = [line.split() for line in written(report, "full").splitlines() if line.strip().startswith("PD302")]
    assert [" ".join(row[-2:]) for row in rows] == ["came true", "steps missed", "went further", "not measured"]
    section = json.loads(written(report, "json"))["compare"]["applied"]
    assert section["changes"] == [{"code": "PD302", **CHANGE}]
    assert [e["came_true"] for e in section["effects"]] == [True, False, False, None]
    assert [(e["to"], e["measured"]) for e in section["effects"]] == [(0.0, 0.0), (4.0, 0.0), (2.0, 0.0), (2.0, None)]
    assert "changed by --apply (1 prescription)" in run_facts(report.diagnosis.run)


def test_json_is_what_it_was_without_apply(compared):
    document = json.loads(written(compared(None), "json"))
    assert "applied" not in document["compare"] and "applied" not in document["run"]


def test_a_statement_that_cannot_be_read_is_said(compared):
    report = compared({"schema_version": 1, "prescriptions": [{"surprise\x1b[31m": 1}]})
    assert "cannot be read" in written(report, "full") and "\x1b[31m" not in written(report, "full")
