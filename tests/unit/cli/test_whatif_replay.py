"""The replaying modes of ``precdoctor whatif`` as a shell sees them."""

from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len

from precdoctor.cli import main
from tests.support.hostile import NAMES
from tests.support.runs import write_run
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


def test_the_best_loss_scaler(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    status, out, _ = run(capsys, RUN, "--loss-scaler", "best")
    assert status == 0
    out = " ".join(out.split())
    assert "0 of 48 steps would be skipped; the run itself skipped 26" in out
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
    assert "The log shows for every step whether it overflows" in out


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
    out = " ".join(out.split())
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


def test_names_of_a_log_cannot_harm_a_terminal(capsys, tmp_path):
    stats = {
        "dtype": "float16",
        "numel": 8,
        "amax": 4e4,
        "amin_nonzero": 4e4,
        "exp_lo": 15,
        "exp_hist": [8],
        "scale": 2.0**16,
    }
    rows = [
        {"step": s, "root": name, "module": name, "kind": "grad_output", "name": name, "order": i, **stats}
        for s in range(3)
        for i, name in enumerate(NAMES)
    ]
    parameters = [{"module": name, "name": f"weight{name}", "shape": [64, 64]} for name in NAMES]
    facts = {"roots": [{"name": NAMES[0], "parameters": parameters}]}
    path = write_run(tmp_path / "run", rows, [{"step": s, "loss_scale": 2.0**16} for s in range(3)], facts=facts)
    for args in (["--loss-scaler", "init=2^20"], ["--recipe", "delayed:1"], ["--accumulator", "14"]):
        status, out, _ = run(capsys, str(path), *args, "--worst", "99")
        assert status == 0
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", out)
        assert not re.search(r"(?m)^\s*::|##\[|##vso\[", out)
        assert len(document(capsys, str(path), *args)["run"]) > 3


def test_a_log_without_a_step(capsys, tmp_path):
    path = write_run(tmp_path / "run", [{"amax": 1.0, "exp_lo": 0, "exp_hist": [1]}])
    status, _, err = run(capsys, str(path), "--recipe", "current")
    assert status == 3 and "no training step" in err


def test_a_file_can_be_written(capsys, tmp_path):
    target = tmp_path / "answer.json"
    status, out, err = run(capsys, RUN, "--loss-scaler", "used", "--output-format", "json", "-o", str(target))
    assert status == 0 and out == "" and json.loads(target.read_text())["updates"] == 48
    assert "Wrote" in err
