"""What began late: rules that average over the steps look at the newer half of a run by itself."""

from pathlib import Path

import numpy as np
import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.analyses.replays import second_run_of
from precdoctor.diagnosis.engine import diagnose_view, resolve_options
from precdoctor.diagnosis.registry import RULES
from precdoctor.diagnosis.survey.newer_half import newer_half
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.runlog.files import AUTOPSY_DIR
from tests.support.counted import Counted
from tests.support.training import Training, normal


def late(first: int, steps: int = 60) -> Training:
    """Gradients in FP16, without a loss scale, that are flushed from the step ``first`` on."""
    run = Training(steps=steps, dtype="float16")
    for step in range(steps):
        small = normal(2.0**-25.5 if step >= first else 2.0**-8, "float16")
        run.change(lambda row, small=small: row.update(small), kind="grad_output", step=step)
    return run


@pytest.mark.parametrize(("first", "since"), [(10, None), (36, 30), (58, "never")])
def test_a_fault_that_fills_the_newer_half_is_found_and_dated(first, since, tmp_path: Path) -> None:
    found = [f for f in diagnose(late(first).write(tmp_path / "run")).findings if f.code == "PD201"]
    if since == "never":
        assert found == []
        return
    (finding,) = found
    assert finding.evidence.get("from_step") == since
    assert ("from step 30 on" in finding.message) == (since is not None)


def test_the_newer_half_takes_no_second_pass_over_the_log(tmp_path: Path) -> None:
    run = Counted(late(36).write(tmp_path / "run"))
    diagnosis = diagnose_view(RunView(run), RULES, resolve_options({}))
    assert any("from_step" in f.evidence for f in diagnosis.findings)
    assert (run.passes, run.asked) == (1, [])


def test_a_traced_second_run_does_not_disturb_it(tmp_path: Path) -> None:
    view = RunView(late(36).write(tmp_path / "run"))
    Training(steps=3).write(tmp_path / "run" / AUTOPSY_DIR)
    half = newer_half(view)
    assert half is not None
    again = second_run_of(half)
    assert again is not None
    assert again.sampled_steps == (0, 1, 2)
    assert half.events is view.events


def test_the_newer_half_holds_the_later_steps_only(tmp_path: Path) -> None:
    view = RunView(Training(steps=21).write(tmp_path / "run"))
    half = newer_half(view)
    assert half is not None
    assert half.sampled_steps == half.kept_steps == tuple(range(11, 21))
    assert set(half.measured((), ("output",))["step"]) == set(range(11, 21))
    assert {s.step for steps in half.timeline.values() for s in steps} == set(range(11, 21))
    assert half.tensor_count(("output",))[1] == 10
    assert np.array_equal(half.steps["step"], np.arange(11, 21))
    assert newer_half(RunView(Training(steps=7).write(tmp_path / "short"))) is None, "too few samples for an average"
