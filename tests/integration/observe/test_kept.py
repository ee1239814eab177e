"""Gradients that are never zeroed, or unscaled or divided again with each micro-batch: the log says so of no others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

import precdoctor
from precdoctor.diagnosis import diagnose
from tests.support.processes import PATIENCE, ROOT, warm
from tests.support.zeroing import LOOPS, STEPS

MISSING = {
    "missing": ("SGD#0", STEPS, 4, 4),
    "missing_with_adam_and_schedule": ("AdamW#0", 2 * STEPS, 4, 4),
    "missing_though_clipped": ("SGD#0", STEPS, 4, 4),
    "missing_in_one_of_two": ("SGD#1", STEPS, 4, 4),
    "missing_for_the_rest": ("SGD#0", STEPS, 1, 5),
    "missing_in_ddp": ("SGD#0", STEPS, 4, 4),
}

#: Loops that something else is said of.
TOLD = {"unscaled_each": None, "scale_dropped": None, "scale_dropped_sometimes": None}
#: Loops that add a loss without the scale to one with it.
MIXED = [name for name in LOOPS if name.startswith("second_loss") and "unscaled" in name.split("_")]
#: Loops that divide the sum of gradients after each backward pass, and their divisors.
DIVIDED = {"divided_after_each_pass": 4096.0, "replaced_after_each_pass": 4.0}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("zeroing")
    command = warm("-m", "tests.support.zeroing", directory)
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE)
    return directory


def told(logs, name: str) -> list[Mapping[str, Any]]:
    events = precdoctor.open_run(logs / name).events()
    assert not (events["event"] == "error").any()
    return [json.loads(data) for data in events[events["event"] == "warning"]["data"]]


@pytest.mark.parametrize("name", MISSING)
def test_gradients_that_are_never_zeroed_are_told(logs, name):
    first, last = told(logs, name)
    assert first["what"] == last["what"] == "kept-gradients"
    assert first["steps"] < last["steps"] == STEPS - 1
    assert last["since"] == (1 if name == "missing_in_one_of_two" else 0)
    assert (last["optimizer"], last["summed"], last["kept"], last["of"]) == MISSING[name]


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in {*MISSING, *TOLD, *DIVIDED, *MIXED}])
def test_nothing_is_said_of_others(logs, name):
    assert told(logs, name) == []


def test_gradients_unscaled_with_each_micro_batch_are_one_attempt(logs):
    steps = precdoctor.open_run(logs / "unscaled_each").steps()
    assert steps["micro_steps"].tolist() == [4] * STEPS
    assert not steps["skipped"].any()
    last = told(logs, "unscaled_each")[-1]
    assert (last["what"], last["optimizer"], last["times"]) == ("unscaled-again", "SGD#0", 4)
    assert last["steps"] == last["of"] == STEPS


@pytest.mark.parametrize("name", DIVIDED)
def test_sums_divided_after_each_pass_are_counted(logs, name):
    first, last = told(logs, name)
    assert first["what"] == last["what"] == "rescaled-sum"
    assert last["factor"] == pytest.approx(1.0 / DIVIDED[name], rel=1e-5)
    assert (last["optimizer"], last["passes"], last["steps"], last["of"]) == ("SGD#0", 4, STEPS - 2, STEPS - 2)
    [finding] = [f for f in diagnose(precdoctor.open_run(logs / name)).findings if f.code == "PD309"]
    assert f"divided by {DIVIDED[name]:.4g} after each of 4 backward passes" in finding.title


@pytest.mark.parametrize("name", MIXED)
def test_a_second_loss_without_the_scale_is_reported(logs, name):
    first, last = told(logs, name)
    assert first["what"] == last["what"] == "mixed-scale"
    assert (last["optimizer"], last["steps"], last["of"]) == ("SGD#0", STEPS - 1, STEPS - 1)  # not of the first step
    [finding] = [f for f in diagnose(precdoctor.open_run(logs / name)).findings if f.code == "PD309"]
    assert finding.evidence["given_share"] == 2.0**-10
    assert finding.location.source is not None
    line = (ROOT / "tests/support/zeroing.py").read_text().splitlines()[finding.location.source.line - 1]
    assert "scaler.scale" not in line and "backward(" in line


def test_gradients_and_loss_of_an_unscaled_pass_have_no_scale(logs):
    run = precdoctor.open_run(logs / "second_loss_of_its_own_head_unscaled_on_every_step")
    rows = run.tensors()
    rows = rows[(rows["step"] == 2) & (rows["kind"] == "weight_grad") & (rows["name"] == "weight")]
    scales = dict(zip(rows["root"], rows["scale"], strict=True))
    assert sorted(set(scales.values())) == [1.0, 1024.0]
    losses = [precdoctor.open_run(logs / f"second_loss_{how}").steps()["loss"][0] for how in ("scaled", "unscaled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("name", "steps"), [("scale_dropped", STEPS), ("scale_dropped_sometimes", STEPS // 2)])
def test_steps_whose_losses_went_unscaled_into_backward_are_counted(logs, name, steps):
    last = told(logs, name)[-1]
    assert (last["what"], last["steps"], last["of"]) == ("scale-unused", steps, STEPS)


def test_the_diagnosis_names_the_backward_that_was_given_the_wrong_loss(logs):
    [finding] = [f for f in diagnose(precdoctor.open_run(logs / "scale_dropped")).findings if f.code == "PD309"]
    source = finding.location.source
    assert source is not None
    assert "x.backward()" in (ROOT / "tests/support/zeroing.py").read_text().splitlines()[source.line - 1]


def test_finite_gradients_that_are_unscaled_and_thrown_away_were_an_attempt(logs):
    steps = precdoctor.open_run(logs / "three_of_four_thrown_away").steps()
    assert steps["micro_steps"].tolist() == [1] * 4 * STEPS
    assert steps["skipped"].tolist() == [True, True, True, False] * STEPS


def test_the_diagnosis_names_the_call_that_is_missing(logs):
    [finding] = [f for f in diagnose(precdoctor.open_run(logs / "missing")).findings if f.code == "PD603"]
    assert "`zero_grad()` is never called" in finding.title
    assert "optimizer.zero_grad" in finding.prescriptions[0].snippet


def test_the_diagnosis_counts_the_divisions(logs):
    [finding] = [f for f in diagnose(precdoctor.open_run(logs / "unscaled_each")).findings if f.code == "PD309"]
    assert "unscaled 4 times" in finding.title
