"""What is not ours is read without running its code: a zoo whose special methods refuse precdoctor."""

from __future__ import annotations

import subprocess

import pytest

import precdoctor
from tests.support.processes import PATIENCE, PYTHON, ROOT, environment, record, warm

ZOO = ROOT / "tests" / "support" / "hostile_zoo.py"
#: Of the training: how it steps, and the step that comes to a NaN; and options of ``record``.
RUNS = {
    "healthy": ("plain", -1, ()),
    "nan": ("plain", 7, ()),
    "scaler": ("scaler", 7, ()),
    "wrapper": ("wrapper", 7, ()),
    "traced": ("plain", 7, ("--arm-next", "2", "--every", "1", "--deep-scan", "8")),
}


def trained(folder, kind, bad):
    command = warm(ZOO, "no-package", folder / "nobody", "12", kind, bad)
    return subprocess.run(command, env=environment(), capture_output=True, timeout=PATIENCE, check=True).stdout


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_a_stranger_is_called_and_everything_is_recorded(tmp_path, name):
    kind, bad, options = RUNS[name]
    notes = tmp_path / "notes"
    command = warm(ZOO, ROOT / "precdoctor", notes, "12", kind, bad)

    done = record(tmp_path, *options, "--", *command, run=tmp_path / "run")

    assert done.status == 0, done.err
    assert not notes.exists(), notes.read_text()
    assert done.out == trained(tmp_path, kind, bad)
    run = precdoctor.open_run(done.run)
    assert list(run.steps()["step"]) == list(range(12))
    events = run.events()
    assert not (events["event"] == "error").any()
    rows = run.tensors()
    assert {"batch", "output", "grad_output", "weight", "weight_grad", "update", "opt_state"} <= set(rows["kind"])
    assert rows["name"].str.len().max() <= 128
    if bad >= 0:
        assert (events["event"] == "incident").any()


def test_shadowed_steps_call_nothing_of_a_stranger(tmp_path):
    notes = tmp_path / "notes"
    command = warm(ZOO, ROOT / "precdoctor", notes, "2", "plain", "-1")
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from precdoctor.cli import main; sys.exit(main())"
    shadow = [PYTHON, "-c", start, "shadow", "-o", str(tmp_path / "run"), "--", *command]

    done = subprocess.run(shadow, env=environment(), capture_output=True, timeout=PATIENCE, check=False)

    assert not notes.exists(), notes.read_text()
    run = precdoctor.open_run(tmp_path / "run")
    assert list(run.steps()["step"]) == [0, 1], done.stderr
    assert not (run.events()["event"] == "error").any()
