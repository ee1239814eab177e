"""The gate's flags and settings: limits, allow-lists, aggregates, baselines of several runs."""

from __future__ import annotations

import json

import pytest

from precdoctor.cli import main
from tests.support.training import Training


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A healthy run, a repeat of it, and one whose norm saturates."""
    monkeypatch.chdir(tmp_path)
    saturated = Training(steps=3).change(lambda r: r.update(at_max=400), kind="output", module="norm")
    for name, training in {"a": Training(steps=3), "b": Training(steps=3), "bad": saturated}.items():
        training.write(tmp_path / name)
    return tmp_path


def test_limits_from_flags_and_file(runs, capsys):
    assert main(["gate", "a", "--fail-if", "amax:blocks.*:100"]) == 0
    assert main(["gate", "a", "--fail-if", "amax:blocks.*:100", "--fail-if", "amax:head:0.5"]) == 1
    assert "PD815 limit-exceeded" in capsys.readouterr().out
    (runs / "precdoctor.toml").write_text('[gate]\nfail-if = ["amax:head:0.5"]\n')
    assert main(["gate", "a"]) == 1
    assert main(["gate", "a", "--fail-if", "amx:head:1"]) == 2
    assert "did you mean 'amax'?" in capsys.readouterr().err


def test_several_baseline_runs_are_learned_from(runs, capsys):
    flags = ["--baseline", "a", "--baseline", "b", "--output-format", "json"]
    assert main(["gate", "bad", *flags]) == 1
    report = json.loads(capsys.readouterr().out)
    [finding] = [f for f in report["findings"] if f["code"] == "PD802"]
    assert finding["evidence"]["baseline_runs"] == 2 and report["gate"]["suspects"] == ["norm"]
    (runs / "precdoctor.toml").write_text('[gate]\nbaseline = ["a", "b"]\naggregate = "best"\n')
    assert main(["gate", "bad", "a"]) == 0
    assert main(["gate", "bad", "a", "--aggregate", "median"]) == 1
    assert main(["gate", "bad", "--aggregate", "mean"]) == 2


def test_an_allow_list_named_in_the_file(runs, capsys):
    (runs / "allow.toml").write_text(
        '[[allow]]\ncode = "saturation-increased"\nmodule = "no*"\nreason = "clamped"\nuntil = 9999-12-31\n'
    )
    (runs / "precdoctor.toml").write_text('[gate]\nallow = "allow.toml"\nbaseline = "a"\n')
    assert main(["gate", "bad"]) == 0
    assert "saturation" in capsys.readouterr().out
    (runs / "allow.toml").write_text((runs / "allow.toml").read_text().replace("9999", "2001"))
    assert main(["gate", "bad"]) == 1
    assert "PD816 allowance-expired" in capsys.readouterr().out
    assert main(["gate", "bad", "--allow", "none.toml"]) == 2


def test_a_baseline_that_is_not_there_is_said_to_be_one_and_how_to_make_it(runs, capsys):
    assert main(["gate", "a", "--baseline", "numerics.toml"]) == 2
    said = capsys.readouterr().err
    assert "there is no baseline numerics.toml" in said and "--write-baseline numerics.toml" in said
