"""The replaying modes of ``precdoctor whatif`` as a shell sees them."""

from __future__ import annotations

import json

import pytest
from rich.cells import cell_len

from precdoctor.cli import main
from tests.support.samples import RULES_DIRECTORY

RUN = str(RULES_DIRECTORY / "PD301" / "healthy" / "fresh-scaler" / "run")
GAN = str(RULES_DIRECTORY / "PD301" / "firing" / "gan-auxiliary-loss" / "run")


def run(capsys, *args):
    status = main(["whatif", *args])
    done = capsys.readouterr()
    return status, done.out, done.err


def document(capsys, *args):
    status, out, err = run(capsys, *args, "--output-format", "json")
    assert status == 0, err
    return json.loads(out)


def test_the_best_loss_scaler(capsys):
    status, out, _ = run(capsys, RUN, "--loss-scaler", "best")
    assert status == 0
    assert "0 of 48 steps would be skipped; the run itself skipped 26" in " ".join(out.split())
    assert "42 of 48 steps were not sampled" in out and "Recorded gradients are taken as they are" in out
    assert "the run: init=2^40,growth=2,interval=8,backoff=0.5" in out
    found = document(capsys, RUN, "--loss-scaler", "best")
    assert found["skipped"] == 0 and found["question"] == {"mode": "loss-scaler", "asked": "best"}
    assert len(found["steps"]) == found["updates"] == 48
    assert found["best"][0]["policy"] == found["policy"]


def test_the_scaler_the_run_had(capsys):
    found = document(capsys, RUN, "--loss-scaler", "used")
    assert all(s["scale"] == s["recorded_scale"] and s["overflow"] is s["recorded_overflow"] for s in found["steps"])
    assert found["uncertain"] == 0 and found["policy"] == found["policy_used"]
    assert found["culprits"][0] == {
        "step": 0, "scale": 2.0**40, "root": "Sequential#0", "module": "3", "kind": "grad_output", "name": "",
        "how": "recorded", "forward": False, "headroom_binades": None,
    }  # fmt: skip


def test_what_overflows_first_is_named(capsys):
    _, out, _ = run(capsys, GAN, "--loss-scaler", "used")
    assert "14 of 20 steps would be skipped; the run itself skipped 14" in " ".join(out.split())
    assert "2 grad_output" in out and "14 of 14 overflows examined" in out
    assert "The log tells of every step whether it overflows" in out


@pytest.mark.parametrize("recipe", ["current", "delayed:16:max", "delayed:16:recent:1", "mxfp8", "tile128"])
def test_recipes(capsys, recipe):
    status, out, _ = run(capsys, RUN, "--recipe", recipe, "--worst", "3")
    assert status == 0 and "of the elements saturate" in out
    found = document(capsys, RUN, "--recipe", recipe)
    assert len(found["tensors"]) == 10
    for tensor in found["tensors"]:
        for share in (tensor["flushed"], tensor["saturated"]):
            assert 0.0 <= share["low"] <= share["estimate"] <= share["high"] <= 1.0


def test_the_best_delayed_scaling_is_shown_beside_the_others(capsys):
    found = document(capsys, RUN, "--recipe", "best")
    assert found["recipe"].startswith("delayed:") and len(found["recipes"]) == 13
    _, out, _ = run(capsys, RUN, "--recipe", "best")
    assert out.count("delayed:") >= 12 and "no sample lies within the history" in out
    e5m2 = document(capsys, RUN, "--recipe", "current", "--format", "e5m2", "--module", "0", "--kind", "output")
    assert [(t["module"], t["kind"], t["format"]) for t in e5m2["tensors"]] == [("0", "output", "E5M2")]


def test_accumulators(capsys):
    status, out, _ = run(capsys, RUN, "--accumulator", "14:128")
    assert status == 0 and "promoted to FP32 every 128 products" in out and "0 weight gradient" in out
    found = document(capsys, RUN, "--accumulator", "14")
    assert [entry["length"] for entry in found["lengths"]] == [224, 56, 16, 12, 4, 3]
    assert found["lengths"][0]["same_sign"]["accumulator"]["rounding"] == "toward-zero"
    assert "5 shorter lengths not shown" in run(capsys, RUN, "--accumulator", "14", "--worst", "1")[1]


@pytest.mark.parametrize(
    ("args", "says"),
    [(["--loss-scaler", "best", "--recipe", "best"], "--loss-scaler and --recipe are different questions"),
     (["--loss-scaler", "best", "--module", "x"], "--module does not go with --loss-scaler"),
     (["--accumulator", "14", "--kind", "weight"], "--kind does not go with --accumulator"),
     (["--recipe", "current", "--scale", "4"], "--scale"),
     (["--recipe", "current", "--plan"], "--plan"),
     (["--recipe", "mxfp8", "--format", "e5m2"], "MXFP8_E4M3 names its elements"),
     (["--recipe", "current", "--output-format", "markdown"], "take full or json"),
     (["--recipe", "currant"], "did you mean 'current'"),
     (["--recipe", "current", "--module", "nothing"], "nothing can be replayed"),
     (["--loss-scaler", "gorwth=2"], "did you mean 'growth'"),
     (["--accumulator", "1"], "2 to 48 significant bits, not 1")],
)  # fmt: skip
def test_questions_that_make_no_sense(capsys, args, says):
    status, out, err = run(capsys, RUN, *args)
    assert status in (2, 3) and out == "" and says in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("args", [["--loss-scaler", "best"], ["--recipe", "best"], ["--accumulator", "14"]])
def test_screens_keep_to_the_width(capsys, monkeypatch, width, args):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(capsys, RUN, *args)
    assert max(cell_len(line) for line in out.splitlines()[1:]) <= width


def test_a_file_can_be_written(capsys, tmp_path):
    target = tmp_path / "answer.json"
    status, out, err = run(capsys, RUN, "--loss-scaler", "used", "--output-format", "json", "-o", str(target))
    assert status == 0 and out == "" and json.loads(target.read_text())["updates"] == 48
    assert "Wrote" in err
