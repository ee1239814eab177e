"""``precdoctor whatif`` as a shell sees it."""

from __future__ import annotations

import io
import itertools
import json
import sys

import jsonschema
import numpy as np
import pytest
from rich.cells import cell_len

from precdoctor.cli import main
from tests.support.hostile import NAMES
from tests.support.runs import write_run
from tests.support.schemas import schema
from tests.support.tensors import row_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal((16, 64))
WIDE = NORMAL * np.where(np.arange(64) < 32, 1.0, 2.0**-20)


@pytest.fixture
def run(tmp_path):
    rows = [
        row_of(x * (1 + step), step=step, module=module, kind=kind, name=name, module_class="Linear", order=order)
        for step in range(3)
        for order, (module, kind, name, x) in enumerate(
            [
                ("norm", "output", "", NORMAL),
                ("blocks.0.up", "weight", "weight", NORMAL[:, :64]),
                ("blocks.0.up", "output", "", NORMAL),
                ("blocks.0.up", "grad_output", "", WIDE * 2.0**-12),
                ("head", "weight", "weight", NORMAL),
                ("head", "output", "", NORMAL),
            ]
        )
    ]
    facts = {"device": {"type": "cuda", "name": "A100", "capability": [8, 0]}, "autocast": ["cuda:bfloat16"]}
    return write_run(tmp_path / "run", rows, [{"step": s} for s in range(3)], facts=facts)


def whatif(capsys, *args):
    status = main(["whatif", *map(str, args)])
    done = capsys.readouterr()
    return status, done.out, done.err


def test_the_screen(capsys, run):
    status, out, err = whatif(capsys, run)
    assert status == 0 and err == ""
    assert "What if E4M3FN, with amax scaling per tensor at each step?" in out
    assert "1 of 6 tensors fails." in out and "at each of 3 recorded steps" in " ".join(out.split())
    first = next(line for line in out.splitlines() if line.startswith("blocks.0.up grad_output"))
    assert first.split()[-1] == "E5M2"
    assert "Cheapest that would hold: E5M2 per tensor (8 bits) for 1 tensor." in out
    assert "E4M3FN (needs 8.9)" in out


def test_other_questions(capsys, run):
    assert "All 6 tensors hold" in whatif(capsys, run, "--format", "bf16")[1]
    assert "with scale 64?" in whatif(capsys, run, "--scale", "2^6")[1]
    assert "loss scale 8192?" in whatif(capsys, run, "--format", "fp16", "--loss-scale", "2**13")[1]
    assert "rule up" in whatif(capsys, run, "--format", "mxfp8", "--scale-rule", "up")[1]
    out = whatif(capsys, run, "--format", "fp16", "--worst", "2")[1]
    assert len([line for line in out.splitlines() if "dB" in line and "Target" not in line]) <= 3
    concise = whatif(capsys, run, "--output-format", "concise")[1].splitlines()
    assert len(concise) == 2 and concise[0].startswith("blocks.0.up grad_output: step ")


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("options", [[], ["--plan"], ["--format", "mxfp8"], ["--format", "fp16"]])
def test_lines_fit(capsys, run, monkeypatch, width, options):
    monkeypatch.setenv("COLUMNS", str(width))
    out = whatif(capsys, run, *options)[1]
    assert max(cell_len(line) for line in out.splitlines()[1:]) <= width  # the path is not broken


def test_a_terminal_without_unicode(run, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert main(["whatif", str(run)]) == 0
    stream.flush()
    assert b"2^-9 .. 448" in stream.buffer.getvalue()


@pytest.mark.parametrize(
    "options",
    [[], ["--format", "mxfp8"], ["--format", "fp16", "--loss-scale", "0.5"], ["--steps", "1:2"], ["--scale", "1e9"]],
)
def test_json(capsys, run, options):
    status, out, _ = whatif(capsys, run, *options, "--output-format", "json")
    document = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    jsonschema.Draft202012Validator(schema("whatif")).validate(document)
    assert status == 0 and len(document["tensors"]) == document["totals"]["tensors"]
    assert document["totals"]["failing"] == sum(t["holds"] is False for t in document["tensors"])
    agreed = {
        "module",
        "kind",
        "step",
        "format",
        "scaling",
        "scale",
        "flushed",
        "saturated",
        "sqnr_db",
        "headroom_binades",
    }
    for tensor in document["tensors"]:
        assert agreed <= set(tensor)
        assert set(tensor["flushed"]) == {"low", "high", "estimate"}


def test_markdown_is_a_table(capsys, run):
    out = whatif(capsys, run, "--output-format", "markdown")[1].splitlines()
    rows = [line for line in out if line.startswith("|")]
    assert out[0].startswith("## What if") and len({row.count("|") for row in rows}) == 1 and len(rows) == 8


def test_a_plan(capsys, run, tmp_path):
    out = whatif(capsys, run, "--plan")[1]
    assert "blocks.0.up" in out and "final logits" in out and "outliers emerge late" in " ".join(out.split())
    file = tmp_path / "plan.toml"
    assert whatif(capsys, run, "--plan", "-o", file)[2] == f"Wrote {file}\n"
    toml = tomllib.loads(file.read_text())
    document = json.loads(whatif(capsys, run, "--plan", "--output-format", "json")[1])
    assert (
        [m["module"] for m in toml["modules"]] == [m["module"] for m in document["modules"]] == ["blocks.0.up", "head"]
    )
    up = toml["modules"][0]
    assert up["precision"] == "fp8" and up["weight"]["format"] == "E4M3FN" and up["grad_output"]["format"] == "E5M2"
    assert up["input"]["tensor"] == "norm output"
    assert toml["modules"][1]["precision"] == "wide"
    assert "8.9" in toml["plan"]["not_native"]
    whatif(capsys, run, "--plan", "-o", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == document


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "e4m4"], "did you mean 'E4M3FN'"),
        (["--scaling", "channel"], "not recorded"),
        (["--scaling", "tensr"], "did you mean 'tensor'"),
        (["--format", "nvfp4"], "1x16 blocks are not recorded"),
        (["--scale", "nan"], "--scale nan"),
        (["--scale", "inf"], "--scale inf"),
        (["--scale", "0"], "--scale 0"),
        (["--scale", "-1"], "--scale -1"),
        (["--scale", "2^99999"], "not a number in float64's range"),
        (["--loss-scale", "many"], "--loss-scale: 'many'"),
        (["--kind", "weights"], "did you mean 'weight'"),
        (["--module", "blocks.0.upp"], "did you mean 'blocks.0.up'"),
        (["--steps", "7:"], "in steps 7:"),
        (["--steps", "7"], "not a step range"),
        (["--worst", "-1"], "whole number"),
        (["--max-flushed", "2"], "share between 0 and 1"),
        (["--min-sqnr", "nan"], "decibels"),
        (["--output-format", "toml"], "is not one of"),
        (["--plan", "--output-format", "concise"], "is not one of"),
        (["--plan", "--format", "e4m3"], "--format has nothing to act on"),
        (["--horizon", "9"], "--horizon has nothing to act on"),
        (["--plan", "--horizon", "1"], "lies before the last recorded step, 2"),
        (["--plan", "--module", "nothing"], "no module matching 'nothing'"),
    ],
)
def test_mistakes_get_one_sentence(capsys, run, options, words):
    status, out, err = whatif(capsys, run, *options)
    assert status == 2 and out == "" and words in err and len(err.splitlines()) == 1


def test_hostile_names(capsys, tmp_path):
    rows = [
        row_of(NORMAL, module=name, kind=kind, name=name, order=n)
        for n, (name, kind) in enumerate(itertools.product(NAMES, ("weight", "output")))
    ]
    path = write_run(tmp_path / "run", rows, [{}])
    worst = ["--worst", str(len(rows))]
    for options in (worst, [*worst, "--output-format", "markdown"], ["--plan"], ["--plan", "--output-format", "toml"]):
        status, out, _ = whatif(capsys, path, *options)
        assert status == 0 and not any(c in out for c in "\x1b\r\x07\u202e")
    plan = tomllib.loads(whatif(capsys, path, "--plan", "--output-format", "toml")[1])
    assert len(plan["modules"]) == len(NAMES)


def test_an_empty_run(capsys, tmp_path):
    status, _, err = whatif(capsys, write_run(tmp_path / "run", [], [{}]))
    assert status == 2 and "no tensor" in err


@pytest.mark.parametrize(
    ("bad", "options", "last", "words"),
    [
        ({2}, (), 1, "The run is non-finite from step 2 to its end: the plan rests on the steps before."),
        ({2}, ("--steps", ":2"), 1, None),
        ({1}, (), 2, None),
        ({0, 1, 2}, (), 2, "from step 0 to its end, and the plan rests on those steps: it says nothing of a healthy"),
    ],
    ids=["to the end", "asked for the steps before", "recovered", "throughout"],
)
def test_a_plan_does_not_rest_on_steps_of_a_run_that_died(bad, options, last, words, tmp_path, capsys, run):
    steps = [{"step": s, "loss": float("nan") if s in bad else 1.0, "sampled": True} for s in range(3)]
    rows = [
        row_of(NORMAL, step=step, module=module, kind=kind, name=name, module_class="Linear", order=order)
        for step in range(3)
        for order, (module, kind, name) in enumerate(
            [("up", "input", "0"), ("up", "weight", "weight"), ("up", "grad_output", "")]
        )
    ]
    died = write_run(tmp_path / "died", rows, steps)
    _, out, _ = whatif(capsys, died, "--plan", *options, "--output-format", "json")
    plan = json.loads(out)["plan"]
    assert plan["last_step"] == last
    assert sum("non-finite" in w for w in plan["warnings"]) == (words is not None)
    _, out, _ = whatif(capsys, died, "--plan", *options)
    assert words is None or words in " ".join(out.partition("module")[0].split())
