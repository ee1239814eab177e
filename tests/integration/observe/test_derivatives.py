"""Gradients and tangents that torch would round in another way with a mode on the stack: they stay what they were."""

from __future__ import annotations

import json
import subprocess

import pytest

import precdoctor
from tests.support.processes import PATIENCE, ROOT, environment, record, warm

NAMES = (
    "product_of_gates",
    "gradient_penalty_of_products",
    "gradient_penalty_of_determinants",
    "gradient_inside_forward",
    "tangents",
    "batched_gradients",
)


@pytest.fixture(scope="module")
def plain():
    env = environment(PYTHONPATH=str(ROOT))
    command = warm("-m", "tests.support.derivatives", *NAMES)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_scanned_steps_are_the_same_bit_for_bit(tmp_path, plain, name):
    env = environment(PYTHONPATH=str(ROOT))
    done = record(tmp_path, "--deep-scan", "8", "--", *warm("-m", "tests.support.derivatives", name), env=env)

    assert done.status == 0, done.err
    assert "internal error" not in done.err
    assert json.loads(done.out) == {name: plain[name]}
    events = precdoctor.open_run(done.run).events()
    assert not {"error", "drop"} & {*events["event"]}
    scans = [json.loads(data) for data in events[events["event"] == "scan"]["data"]]
    is_scanned = any(e["kind"] == "step" and e["outcome"] != "refused" for e in scans)
    assert is_scanned or name == "batched_gradients"  # its model is called inside a custom function
