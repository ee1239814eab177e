"""Whose command ``precdoctor autopsy`` runs without asking."""

import shutil

import pytest

from precdoctor.cli import autopsy, main
from tests.support.runs import write_run

COMMAND = ["python", "train.py", "a b", "\x1b[2J; rm -rf ~"]


@pytest.fixture
def ran(monkeypatch):
    """The runs whose command was run."""
    runs = []

    def second_run(run):
        runs.append(str(run.path))
        return 0

    monkeypatch.setattr(autopsy, "second_run", second_run)
    return runs


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=[{"step": 0}], info={"command": COMMAND, "cwd": str(tmp_path)})


def test_a_run_of_ones_own_is_run_again_without_a_question(run, ran):
    assert main(["autopsy", str(run)]) == 0
    assert ran == [str(run)]


def test_a_run_from_elsewhere_is_shown_and_not_run_without_a_terminal(run, ran, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")  # as an archive unpacked by the user
    assert main(["autopsy", str(copy)]) == 2
    said = capsys.readouterr().err
    assert ran == [] and "\x1b" not in said
    assert "python train.py 'a b'" in said and f"cd {tmp_path} &&" in said and "add --yes" in said
    assert main(["autopsy", "--yes", str(copy)]) == 0
    assert ran == [str(copy)]


@pytest.mark.parametrize(("answer", "status"), [(True, 0), (False, 2)])
def test_on_a_terminal_the_user_is_asked(run, ran, tmp_path, monkeypatch, answer, status):
    copy = shutil.copytree(run, tmp_path / "copy")
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda question, err: answer)
    assert main(["autopsy", str(copy)]) == status
    assert len(ran) == (1 if answer else 0)


def test_a_dry_run_prints_the_command_and_runs_nothing(run, ran, tmp_path, capsys):
    assert main(["autopsy", "--dry-run", str(run)]) == 0
    assert ran == [] and capsys.readouterr().out.startswith(f"cd {tmp_path} && python train.py 'a b'")


def test_another_host_or_user_is_elsewhere(run, ran, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "another")
    assert main(["autopsy", str(run)]) == 2
    assert ran == []
