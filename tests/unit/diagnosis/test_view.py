"""What the view reads, and how little of it."""

from pathlib import Path

import pandas as pd
import pytest

from precdoctor.diagnosis.engine import describe, diagnose_view, resolve_options
from precdoctor.diagnosis.offline.whatif.forecast import Question, forecast
from precdoctor.diagnosis.offline.whatif.recipe import ask
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.diagnosis.registry import RULES
from precdoctor.diagnosis.survey.view import Process, RunView
from tests.support.counted import Counted
from tests.support.training import FACTS, Training

P0 = Process(0, 0)


def test_rules_read_the_tensors_of_a_short_log_once(tmp_path: Path) -> None:
    run = Counted(Training(dtype="float16").poison(7, "output", "head", nan=1).write(tmp_path / "run"))
    diagnose_view(RunView(run), RULES, resolve_options({}))
    assert (run.passes, run.asked) == (1, [])


def test_rows_of_a_long_log_that_were_not_kept_are_read_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precdoctor.diagnosis.survey.survey.MOST_ROWS", 100)
    training = Training(dtype="float16", steps=200).poison(150, "output", "head", nan=1)
    run = Counted(training.write(tmp_path / "run"))
    view = RunView(run)
    diagnose_view(view, RULES, resolve_options({}))
    assert len(view.kept_steps) < 100
    assert run.passes == 1
    for terms in run.asked:
        assert all(any(term[0] == "step" for term in alternative) for alternative in terms)


def test_the_facts_of_a_run_take_no_pass_over_its_tensors(tmp_path: Path) -> None:
    """``whatif`` makes a pass of its own, and heads its answer with them."""
    run = Counted(Training().write(tmp_path / "run"))
    describe(RunView(run))
    forecast(run, Question(ask("e4m3"), Target()))
    assert (run.passes, len(run.asked)) == (0, 1)


def test_steps_with_several_optimizers_are_taken_together(tmp_path: Path) -> None:
    run = Training(steps=2)
    run.step_rows[2] = run.step_rows[1] | {"optimizer": "SGD#1", "lr": 0.5, "skipped": True, "loss": float("inf")}
    view = RunView(run.write(tmp_path / "run"))
    [first, second] = view.timeline[P0]
    assert (first.lr, first.skipped, first.loss_is_bad) == (1e-3, False, False)
    assert (second.step, second.lr, second.skipped, second.loss_is_bad) == (1, 0.5, True, True)


@pytest.mark.parametrize(("loss", "bad"), [(None, False), (1.0, False), (float("nan"), True), (float("inf"), True)])
def test_a_missing_loss_is_not_a_nan_loss(loss: float | None, bad: bool, tmp_path: Path) -> None:
    run = Training(steps=1)
    run.step_rows[0]["loss"] = loss
    assert RunView(run.write(tmp_path / "run")).timeline[P0][0].loss_is_bad is bad


def test_rows_come_in_execution_order_and_belong_to_one_process(tmp_path: Path) -> None:
    run = Training(steps=2, ranks=2)
    run.tensors[1] = list(reversed(run.tensors[1]))
    rows = RunView(run.write(tmp_path / "run")).rows(Process(1, 0), 1)
    assert [r.order for r in rows] == sorted(r.order or 0 for r in rows)
    assert {(r.rank, r.step) for r in rows} == {(1, 1)}


def test_module_classes_and_device_come_from_the_facts(tmp_path: Path) -> None:
    view = RunView(Training(steps=1, facts=FACTS | {"device": {"type": "cuda"}}).write(tmp_path / "run"))
    assert view.module_classes["GPT#0", "blocks.0.attn"] == "CausalSelfAttention"
    assert view.device == "cuda"


def test_counts_of_what_was_looked_at(tmp_path: Path) -> None:
    view = RunView(Training(steps=3).write(tmp_path / "run"))
    assert view.tensor_count(("output", "input")) == (9, 3)
    assert view.tensor_count(("batch",)) == (0, 0)


def test_batches_are_filtered_and_projected(tmp_path: Path) -> None:
    view = RunView(Training(steps=4).poison(2, "output", "head", nan=1, then=False).write(tmp_path / "run"))
    frame = pd.concat(b.to_pandas() for b in view.batches(["module", "nan"], ["output"], where=[("nan", ">", 0)]))
    assert list(frame.columns) == ["step", "rank", "attempt", "module", "nan"]
    assert frame[["step", "module"]].to_numpy().tolist() == [[2, "head"]]
    assert {s for b in view.batches(["module"], ["output"], steps=[1, 3]) for s in b["step"].to_pylist()} == {1, 3}


def test_problems_that_lose_nothing_are_not_missing_data(tmp_path: Path) -> None:
    run = Training(steps=2)
    run.end = False
    view = RunView(run.write(tmp_path / "run"))
    assert view.problems
    assert view.missing is None
    assert not view.complete


def test_steps_that_are_kept_besides_are_seen_only_by_those_who_name_them(tmp_path, monkeypatch):
    monkeypatch.setattr("precdoctor.diagnosis.survey.survey.MOST_ROWS", 500)
    run = Training(steps=200).write(tmp_path / "run")
    chosen = RunView(run).kept_steps
    besides = [s for s in range(200) if s not in chosen][:3]
    view = RunView(run)
    view.keep(besides)
    assert view.kept_steps == chosen
    assert set(view.measured((), ("output",))["step"]) == set(chosen)
    assert view.survey.covers(besides)
    assert sorted(set(view.measured((), ("output",), steps=besides)["step"])) == besides
