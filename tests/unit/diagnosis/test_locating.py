"""Names of modules where a run has several models."""

from pathlib import Path

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.engine import view_of
from precdoctor.diagnosis.survey.rows import TensorRow
from precdoctor.diagnosis.survey.view import Process
from tests.support.training import FACTS, Training, normal

CRITIC = {"name": "Critic#0", "class": "Critic", "modules": [{"name": "head", "class": "Linear"}], "parameters": []}
LOSS = {"name": "MSELoss#0", "class": "MSELoss", "modules": [], "parameters": []}


def replaced(*more: dict[str, object]) -> Training:
    """The updates of the head are as large as its weights."""
    run = Training(facts={**FACTS, "roots": [*FACTS["roots"], *more]})
    return run.change(lambda r: r.update(normal(0.9)), kind="update", module="head")


def title(run: Training, path: Path) -> str:
    [finding] = [f for f in diagnose(run.write(path)).findings if f.code == "PD504"]
    return finding.title


def test_the_model_is_named_where_another_has_modules_too(tmp_path: Path) -> None:
    assert title(replaced(CRITIC), tmp_path / "run").endswith(" (in GPT#0)")


def test_nothing_is_added_for_a_model_and_its_loss(tmp_path: Path) -> None:
    assert "GPT#0" not in title(replaced(LOSS), tmp_path / "run")


def label(run: Training, path: Path) -> str:
    rows: tuple[TensorRow, ...] = view_of(run.write(path)).rows(Process(0, 0), 0)
    return next(r.label for r in rows if r.kind == "output" and r.module == "head")


def test_tensors_are_called_by_their_root_where_there_are_several(tmp_path: Path) -> None:
    assert label(replaced(CRITIC), tmp_path / "two") == "`GPT#0.head` output"
    assert label(replaced(LOSS), tmp_path / "one") == "`head` output"
