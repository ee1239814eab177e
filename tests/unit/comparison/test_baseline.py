"""Baselines: what is learned from healthy repeats, the file it is kept in, and runs held against it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.cli import main
from precdoctor.comparison.baseline import Baseline, Expected, Learned, learn_from
from precdoctor.comparison.baseline_file import read_baseline, text_of
from precdoctor.comparison.gate import gate
from precdoctor.comparison.summary import Start
from precdoctor.errors import CorruptRunError, IncomparableRunsError, NewerSchemaError, UsageError
from tests.support.training import Training, histogram


def repeat(seed: int, steps: int = 6, spread: float = 0.05) -> Training:
    """A healthy repeat: every tensor's values anew, its scale a little different."""
    random = np.random.default_rng(seed)

    def anew(row):
        if row["kind"] != "loss":
            row.update(histogram((random.normal(0, 2.0 ** random.normal(0, spread), 4096)).astype(np.float32)))

    training = Training(steps=steps).change(anew)
    for row in training.step_rows.values():
        row["loss"] = 2.5 + 0.02 * random.normal()
    return training


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("repeats")
    return [repeat(seed).write(directory / f"run-{seed}") for seed in range(5)]


@pytest.fixture(scope="module")
def learned(runs):
    return learn_from(runs[:4])


def test_the_spread_is_that_of_the_repeats(learned):
    spreads = [e.metrics["rms"].spread for k, e in learned.tensors.items() if k[2] == "output"]
    assert 0.01 < np.median(spreads) < 0.06  # of medians over six steps, each 0.05 apart
    assert all(abs(e.metrics["rms"].center) < 0.15 for k, e in learned.tensors.items() if k[2] != "loss")
    assert learned.loss.center == pytest.approx(2.5, abs=0.05)
    assert learned.repeats == 4 and learned.sampled == tuple(range(6))


def test_a_further_repeat_passes_and_a_changed_one_does_not(runs, learned, tmp_path):
    assert gate([runs[4]], learned).exit_code == 0
    grown = repeat(7).change(lambda r: r.update(sum_sq=r["sum_sq"] * 64, amax=r["amax"] * 8), module="norm")
    report = gate([grown.write(tmp_path / "grown")], learned)
    worst = next(c for c in report.checks if c.fails)
    assert report.exit_code == 1
    assert worst.check == "PD811 magnitude-changed" and "norm" in worst.subject
    assert "±" in worst.expected and worst.limit.startswith("±")


def test_one_run_has_wide_limits(runs):
    single = learn_from(runs[:1])
    assert all(gate([run], single).exit_code == 0 for run in runs[1:4])
    assert min(e.metrics["rms"].spread for e in single.tensors.values() if "rms" in e.metrics) >= 0.25


def test_a_loss_that_may_be_non_finite_may_be_so_after_the_file_as_well(learned, tmp_path):
    file = tmp_path / "numerics.toml"
    file.write_text(text_of(dataclasses.replace(learned, bad_losses=frozenset({3, 4, 5, 9}))))
    assert read_baseline(file).bad_losses == {3, 4, 5, 9}


def test_the_file_says_the_same(learned, tmp_path):
    file = tmp_path / "numerics.toml"
    file.write_text(text_of(learned))
    again = read_baseline(file)
    assert text_of(again) == file.read_text()
    assert again.bad_losses == learned.bad_losses
    assert again.tensors.keys() == learned.tensors.keys()
    for key, expected in learned.tensors.items():
        found = again.tensors[key]
        assert (found.dtype, found.shape, found.order) == (expected.dtype, expected.shape, expected.order)
        assert found.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert found.metrics[name].center == pytest.approx(value.center, abs=0.02 * value.spread)
            assert found.metrics[name].spread == pytest.approx(value.spread, rel=0.06)


def test_the_file_is_for_reading(learned):
    text = text_of(learned)
    lines = [line for line in text.splitlines() if line.startswith('"blocks.0.attn.qkv output"')]
    assert "run-to-run spread" in text and "binades" in text
    assert len([line for line in lines if "dtype" in line]) == 1
    assert max(map(len, text.splitlines())) < 400
    table = tomli.loads(text)
    assert table["provenance"]["runs"] and table["steps"] == [[0, 6, 1]]
    assert table["provenance"]["roots"]["GPT#0"].startswith("13 modules")


names = st.text(min_size=0, max_size=12)
finite = st.floats(-1e9, 1e9)


@given(
    st.dictionaries(
        st.tuples(names, names, st.sampled_from(["output", "weight"]), names, st.integers(0, 9)), finite, min_size=1
    ),
    st.sets(st.integers(0, 500), min_size=1).map(lambda s: tuple(sorted(s))),
)
def test_any_name_survives_the_file(tmp_path_factory, tensors, steps):
    def clean(text: str) -> str:
        return "".join("?" if 0xD800 <= ord(c) < 0xE000 else c for c in text)

    tensors = {(clean(r), clean(m), k, clean(n), c): v for (r, m, k, n, c), v in tensors.items()}
    made = {
        key: Expected("float32", (4,), "Linear", 1, frozenset({"nan"}), {"rms": Learned(v, 0.5)}, (Start(1.0, v, 2.0),))
        for key, v in tensors.items()
    }
    baseline = Baseline(
        "x", 2, steps, steps, made, None, Learned(0.0, 0.1), provenance={"runs": ['a "b" \\ \x00 é 🙂']}
    )
    file = tmp_path_factory.mktemp("names") / "b.toml"
    file.write_text(text_of(baseline), encoding="utf-8")
    again = read_baseline(file)
    assert again.tensors.keys() == made.keys()
    assert (again.steps, again.sampled) == (steps, steps)
    assert again.provenance["runs"] == ['a "b" \\ \x00 é 🙂']


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("schema_version = 1", "schema_version = 2", NewerSchemaError),
        ("schema_version = 1", "", UsageError),
        ("repeats = 4", "repeats = 0", CorruptRunError),
        ("skipped = [0", 'skipped = ["x"', CorruptRunError),
        ("skipped = [0", "skipped = [nan", CorruptRunError),
        ("steps = [[0, 6, 1]]", "steps = [[0, 999999999999, 1]]", CorruptRunError),
        ('dtype = "float32"', "dtyp = 1", CorruptRunError),
        ("[provenance]", "[provenance", UsageError),
    ],
)
def test_a_damaged_file_is_told(learned, tmp_path, old, new, error):
    file = tmp_path / "b.toml"
    text = text_of(learned)
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(error) as caught:
        read_baseline(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "words"),
    [(4, "another step range: the run has steps 0 to 3, the baseline 0 to 5 (2 missing, first 4)"), (8, "2 more")],
)
def test_other_steps_are_never_green(learned, tmp_path, steps, words):
    report = gate([repeat(8, steps=steps).write(tmp_path / "run")], learned)
    assert report.exit_code == 3
    assert words in report.untrustworthy[0]


def test_repeats_must_cover_the_same_steps(runs, tmp_path):
    with pytest.raises(IncomparableRunsError, match="is no repeat of"):
        learn_from([runs[0], repeat(9, steps=3).write(tmp_path / "short")])


def test_another_torch_is_remarked(learned, runs):
    other = Baseline(**{**learned.__dict__, "provenance": {"versions": {"torch": "0.0.1"}}})
    facts = runs[4].ranks[0].facts
    facts["versions"] = {"torch": "9.9.9"}
    assert "recorded with torch 0.0.1, the run with 9.9.9" in gate([runs[4]], other).notes[0]


def test_another_size_of_the_model_is_remarked_and_odd_provenance_is_none(learned, runs):
    name, size = next(iter(learned.provenance["roots"].items()))
    other = Baseline(**{**learned.__dict__, "provenance": {"roots": {name: "1 modules, 1 parameters"}, "runs": ["a"]}})
    report = gate([runs[4]], other)
    assert f"the model changed: {name} has {size}; in the baseline 1 modules, 1 parameters" in report.notes
    assert report.baseline_runs == ("a",)
    odd = Baseline(**{**learned.__dict__, "provenance": {"roots": 3, "runs": 4, "versions": "x"}})
    assert gate([runs[4]], odd).baseline_runs == ()
    assert not [note for note in gate([runs[4]], learned).notes if "model changed" in note]


def test_a_first_step_that_was_not_compared_is_remarked(learned, runs, tmp_path):
    def notes(run):
        return [note for note in gate([run], learned).notes if note.startswith("PD813 ")]

    assert notes(runs[0]) == []
    [note] = notes(repeat(77).write(tmp_path / "other-seed"))
    assert "begins from other weights or data" in note
    assert [n for n in gate([runs[4]], learned, ignore=["PD813"]).notes if n.startswith("PD813 ")] == []


def test_another_batch_shape_is_remarked_beside_a_failure(learned, tmp_path):
    def give(run, rms):
        first = {"module": "emb", "kind": "output"}
        run.change(lambda row: row.update(shape=[2, 9]), **first)
        return run.change(lambda row: row.update(histogram(rms * np.ones(4096, dtype=np.float32))), **first)

    found = gate([give(repeat(8), 1e6).write(tmp_path / "bad")], learned)
    assert found.exit_code == 1
    assert [note for note in found.notes if "output has the shape [2, 9], in the baseline [" in note]


def test_the_command_writes_only_what_passes(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    healthy = [str(run.path) for run in runs[:3]]
    assert main(["gate", *healthy, "--write-baseline", "b.toml"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "Wrote b.toml" in captured.err
    assert main(["gate", str(runs[3].path), "--baseline", "b.toml", "--aggregate", "median"]) == 0
    assert main(["gate", *healthy, "--write-baseline", "b.toml"]) == 2  # there already
    sick = Training().poison(7, "output", "head", nan=1).write(tmp_path / "sick")
    assert main(["gate", str(sick.path), "--write-baseline", "c.toml"]) == 1
    assert not Path("c.toml").exists() and "only runs that pass" in capsys.readouterr().err
    assert main(["gate", healthy[0], "--baseline", "b.toml", "--baseline", healthy[1]]) == 2
    assert math.isfinite(read_baseline(Path("b.toml")).loss.center)
