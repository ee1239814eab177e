"""``precdoctor shadow``: a mistake is one sentence and exit code 2, before anything runs."""

from __future__ import annotations

import pytest

from precdoctor.cli import main


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "nothing to record"),
    (["--at", "x", "--", "python", "train.py"], "0,100,1000"),
    (["--at", "1", "--every", "2", "--", "python", "train.py"], "give one of the two"),
    (["--every", "0", "--", "python", "train.py"], "from 1"),
    (["--steps", "5:3", "--", "python", "train.py"], "holds no step"),
    (["--reference", "fp16", "--", "python", "train.py"], "fp32, fp64"),
    (["--output-format", "junit", "--", "python", "train.py"], "full, concise, json, markdown"),
    (["--worst", "-1", "--", "python", "train.py"], "--worst"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["shadow", *arguments]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_settings_are_those_of_the_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "precdoctor.toml").write_text('[shadow]\nreference = "fp128"\n')
    monkeypatch.chdir(tmp_path)
    assert main(["shadow", "--", "python", "train.py"]) == 2
    assert "fp128" in capsys.readouterr().err
