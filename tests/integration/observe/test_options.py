"""Sampling and choosing modules: what is left out, and what still holds."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

import precdoctor
from tests.integration.observe.conftest import BOOT
from tests.support.processes import PATIENCE, ROOT, environment, warm

#: Their gradients come into being inside ``optimizer.step(closure)``.
CLOSURES = ("closure_adam", "lbfgs")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Every second step, and of the modules only some."""
    runs = tmp_path_factory.mktemp("sampled")
    env = environment(
        PYTHONPATH=f"{BOOT}{os.pathsep}{ROOT}",
        PRECDOCTOR_RUN=str(runs),
        PRECDOCTOR_OPTIONS=json.dumps({"strict": True, "every": 2, "exclude": ["2", "head*"], "first_step": 96}),
        ZOO_RUNS=str(runs),
    )
    command = warm("-m", "tests.support.zoo", "hand_scaled", "evaluations", "gpt_fp16_scaler", *CLOSURES)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    digests = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    return digests, {name: precdoctor.open_run(runs / name) for name in digests}


def test_sampling_is_neutral_too(zoo, sampled):
    for name, line in sampled[0].items():
        assert line == zoo.plain[name], name


def test_steps_between_have_their_losses_but_no_rows(zoo, sampled):
    for name, run in sampled[1].items():
        steps, rows = run.steps().set_index("step"), run.tensors()
        assert steps.index.tolist() == list(range(96, 96 + len(zoo.steps(name))))
        assert steps["sampled"].tolist() == [step % 2 == 0 for step in steps.index]
        assert set(rows["step"]) == set(steps.index[steps["sampled"]])
        assert steps["loss"].tolist() == zoo.steps(name)["loss"].tolist(), name
        assert steps["loss_scale"].fillna(0).tolist() == zoo.steps(name)["loss_scale"].fillna(0).tolist(), name
        assert steps["found_inf"].tolist() == zoo.steps(name)["found_inf"].tolist(), name


def test_rows_of_sampled_steps_are_those_of_the_full_record(zoo, sampled):
    site = ["step", "root", "module", "kind", "name", "call"]
    for name, run in sampled[1].items():
        rows, full = run.tensors(), zoo.rows(name)
        rows["step"] -= 96
        assert not rows["module"].str.fullmatch("2|head.*").any()
        kept = full[(full["step"] % 2 == 0) & ~full["module"].str.fullmatch("2|head.*")]
        prints = [dict(zip(map(tuple, f[site].values), f["fingerprint"], strict=True)) for f in (rows, kept)]
        assert prints[1].items() <= prints[0].items(), name
        # Where a parent returns the tensor of a child that is left out, it speaks for itself.
        assert {(key[2], key[3]) for key in prints[0].keys() - prints[1].keys()} <= {
            ("", "output"),
            ("", "grad_output"),
        }


def test_gradient_norms_are_those_of_all_gradients_all_the_same(zoo, sampled):
    for name, run in sampled[1].items():
        norms = zoo.steps(name)["grad_norm"].tolist()
        assert run.steps()["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5, nan_ok=True), name


def test_a_bad_gradient_shows_between_samples(zoo, sampled):
    run = sampled[1]["gpt_fp16_scaler"]
    assert (run.steps()["non_finite"] > 0).tolist() == (zoo.steps("gpt_fp16_scaler")["non_finite"] > 0).tolist()
