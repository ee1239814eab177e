"""A run whose tensors are measured together has the same log as one whose tensors are measured one by one."""

from __future__ import annotations

import importlib.util
import json
import subprocess

import pytest

from precdoctor.runlog import open_run
from tests.support.processes import PATIENCE, PYTHON, ROOT, environment, warm

SCRIPT = """
import json, sys, torch
import precdoctor
from precdoctor.recording import kernels
from precdoctor.recording.kernels import cuda

how, depth = sys.argv[1], int(sys.argv[2])

def train():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(depth)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 8).bfloat16().float(), torch.nn.BatchNorm1d(8))
    model[0].weight.requires_grad = False
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(3):
        for micro in range(2):
            x = torch.randn(16, 8)
            if step == 2 and micro == 1:
                x[3, 4] = float("inf")
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

launches, slots = [], {}

def counted(measure):
    def together(jobs, tables):
        launches.append(len(jobs))
        measure(jobs, tables)
    return together

with precdoctor.record("alone", every=1, strict=True, on_nonfinite="observe", deep_scan=0):
    train()
takes = kernels.supports_update
kernels.supports_update = lambda *given: isinstance(given[2], torch.Tensor) and takes(*given)  # no device takes Adam
kernels.reads_memory = lambda _x: False  # nor this
if how == "faked":
    kernels.gathers = lambda *_: True
    kernels.together = counted(lambda jobs, tables: [kernels.one_by_one(job) for job in jobs])
else:  # Triton's interpreter stands for the device
    from precdoctor.recording.kernels import triton_kernel
    kernels.gathers = lambda x, *_: triton_kernel.supports(x, 15)
    kernels.together = counted(kernels.together)
with precdoctor.record("together", every=1, strict=True, on_nonfinite="observe", deep_scan=0):
    train()
print(json.dumps({"launches": launches, "failure": cuda.failure() if how == "triton" else None}))
"""


def run(folder, how, depth):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        # Triton is to be imported by an interpreter that knows that it is to interpret
        [PYTHON, script, how, str(depth)] if how == "triton" else warm(script, how, depth),
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT), TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["failure"] is None
    return said["launches"]


def tables(folder, run_name):
    """Rows by their key, without what depends on the order of launches within a kind."""
    rows = open_run(folder / run_name).tensors().drop(columns=["order", "first_bad_order"])
    return rows.sort_values(["step", "module", "kind", "name", "call"]).reset_index(drop=True)


def assert_same_log(folder):
    alone, together = tables(folder, "alone"), tables(folder, "together")
    assert {"weight", "weight_grad", "weight_grad_step", "update", "opt_state", "buffer"} <= set(alone["kind"])
    without = together["fingerprint"].isna()  # on a device, of kinds that may be large
    assert set(together[without]["kind"]) <= {"input", "output", "grad_output", "update"}
    alone.loc[without, "fingerprint"] = None
    sums = ["sum", "sum_sq"]  # the device adds in another order
    assert alone.drop(columns=sums).map(str).equals(together.drop(columns=sums).map(str))
    for column in sums:
        left, right = alone[column].astype(float), together[column].astype(float)
        assert ((left - right).abs() <= 1e-5 * left.abs() + 1e-6).sum() == left.notna().sum()


@pytest.mark.parametrize("depth", [pytest.param(2, marks=pytest.mark.slow), 6])
def test_a_step_makes_as_many_launches_however_many_tensors_it_has(tmp_path, depth):
    launches = run(tmp_path, "faked", depth)
    assert_same_log(tmp_path)
    t = 2 * depth - 1 + 2 + 2  # parameters; of the frozen layer only the bias is trained
    # Until there is an optimizer, weights are taken after each backward pass, once with the frozen weight and the two
    # buffers; gradients wait from the second on.
    first = [t + 3, t, t + 2]
    # Then a launch for the gradients of each pass, for the weights and what else stands still, for what the optimizer
    # is given, for the updates; now and then for its state.
    assert launches == [*first, t + 2, t, t, 2 * t, *[t, t, t + 2, t, t] * 2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_in_the_interpreter_writes_the_same_log(tmp_path):
    assert len(run(tmp_path, "triton", 1)) > 0
    assert_same_log(tmp_path)
