"""What ``precdoctor trial`` makes of its arguments, before anything runs."""

from __future__ import annotations

import pytest

from precdoctor.cli import main

PLAN = """
schema_version = 1
[[modules]]
root = "Net#0"
module = "up"
precision = "bf16"
[modules.weight]
format = "BF16"
scaling = "none"
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing.toml", "--", "train.py"],
        ["nothing.toml", "--steps", "3", "--force", "--", "train.py", "--steps", "x"],
        ["--steps", "3", "nothing.toml", "train.py", "--steps", "x"],
        ["--steps", "3", "nothing.toml", "--format", "json", "-m", "project.train", "--steps", "x"],
        ["--output-format=json", "--", "nothing.toml", "train.py"],
    ],
)
def test_the_plan_comes_before_or_between_options_and_the_command_last(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["trial", *arguments]) == 2
    assert "there is no plan nothing.toml; write one with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "PLAN"),
        (["plan.toml"], "nothing to record"),
        (["plan.toml", "--steps", "0", "--", "train.py"], "--steps takes 1 to 1,000 steps, got 0"),
        (["plan.toml", "--steps", "many", "--", "train.py"], "many"),
        (["plan.toml", "--format", "xml", "--", "train.py"], "xml"),
        (["plan.toml", "--max-loss-gap", "x", "--", "train.py"], "x"),
        (["plan.toml", "--", "missing.py"], "no script 'missing.py'"),
        (["plan.toml", "-o", "plan.toml", "--", "train.py"], "plan.toml is already there"),
    ],
)
def test_what_cannot_be_taken_is_one_sentence(arguments, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "plan.toml").write_text(PLAN)
    assert main(["trial", *arguments]) == 2
    said = capsys.readouterr()
    assert reason in said.err and not said.out and "Traceback" not in said.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.toml", "train.py"]
