"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRAINING = """\
import pytest
import torch


def train(width=8, half=False, fault=False):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 1))
    if half:
        norm, plain = model[1], model[1].forward
        norm.forward = lambda x: plain(x).bfloat16().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        loss = model(torch.randn(16, 8)).square().mean()
        if fault and step == 2:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs the tests in ``code`` with the plugin, whether or not an installation brings it along."""

    def run(code: str, *flags: str) -> str:
        (tmp_path / "test_numerics.py").write_text(TRAINING + code)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:precdoctor"]
        command += ["-p", "precdoctor.integrations.pytest_plugin", "--basetemp", str(tmp_path / "base"), *flags]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ, check=False)
        return done.stdout + done.stderr

    return run


def test_a_baseline_is_written_then_held_against(run_pytest, tmp_path):
    code = """
@pytest.mark.parametrize("half", [False])
def test_smoke(precdoctor, half):
    with precdoctor.record():
        train(half=half)
    report = precdoctor.check(baseline="numerics.toml")
    assert report.passed
"""
    written = run_pytest(code, "--precdoctor-write-baseline")
    assert "1 passed" in written and f"precdoctor wrote {tmp_path / 'numerics.toml'}" in written
    assert "Sequential#0" in (tmp_path / "numerics.toml").read_text()
    changed = run_pytest(code.replace("[False]", "[False, True]"))
    assert "1 failed, 1 passed" in changed
    assert "PD813 rounding-increased" in changed and "Look first at: 1" in changed  # the norm is module "1"


@pytest.mark.slow
def test_findings_without_a_baseline(run_pytest):
    output = run_pytest("""
def test_nan(precdoctor):
    with precdoctor.record(on_nonfinite="observe"):
        train(fault=True)
    assert [f.code for f in precdoctor.findings][:1] == ["PD103"]
    precdoctor.check()


def test_forgot(precdoctor):
    precdoctor.check()


def test_limits(precdoctor):
    with precdoctor.record():
        train()
    with pytest.raises(pytest.fail.Exception, match="no baseline .*; pytest --precdoctor-write-baseline makes it"):
        precdoctor.check(baseline="none.toml")
    precdoctor.check(fail_if=["headroom:*:300"])


def test_nothing_trained(precdoctor):
    with precdoctor.record():
        pass
    precdoctor.check()
""")
    assert "4 failed" in output
    assert "PD103 nonfinite-loss" in output
    assert "nothing was recorded: put the training into" in output
    assert "PD815 limit-exceeded" in output
    assert "holds no training step" in output


def test_the_plugin_itself_loads_nothing_heavy():
    code = "import sys, precdoctor.integrations.pytest_plugin\nprint({'torch', 'numpy', 'pandas'} & {*sys.modules})"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "set()"
