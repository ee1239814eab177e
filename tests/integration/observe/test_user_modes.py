"""What the user has switched on in torch stays the user's: none of their modes and subclasses is called for us."""

from __future__ import annotations

import json
import subprocess

import pytest

import precdoctor
from tests.support.processes import PATIENCE, environment, record, script, warm

MODES = """
import contextlib, json, sys
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

calls = 0


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        global calls
        calls += 1
        return function(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        global calls
        calls += 1
        return op(*args, **(kwargs or {}))


class Batch(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        global calls
        calls += 1
        return super().__torch_function__(function, types, args, kwargs or {})


kind = sys.argv[1]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(12):
    mode = {"functions": Functions, "ops": Ops}.get(kind, contextlib.nullcontext)
    with mode():
        x = torch.randn(4, 8)
        x = x.as_subclass(Batch) if kind == "subclass" else x
        loss = nn.functional.cross_entropy(net(x), torch.randint(0, 4, (4,)))
        loss = loss * float("nan") if step == 9 else loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if step != 9:
            optimizer.step()
        optimizer.zero_grad()
print(json.dumps([calls, [float(p.sum()) for p in net.parameters()]]))
"""


@pytest.mark.parametrize("kind", ["functions", "ops", "subclass"])
def test_the_users_modes_and_subclasses_see_what_they_would_have_seen(tmp_path, kind):
    path = script(tmp_path, "modes.py", MODES)
    plain = subprocess.run(warm(path, kind), env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert plain.returncode == 0, plain.stderr

    done = record(tmp_path, "--every", "4", "--deep-scan", "off", "--on-nonfinite", "observe", "--", *warm(path, kind))

    assert done.status == 0, done.err
    assert json.loads(done.out) == json.loads(plain.stdout)
    run = precdoctor.open_run(done.run)
    assert not (run.events()["event"] == "error").any()
    assert {"batch", "output", "weight_grad", "update"} <= set(run.tensors()["kind"])


ANOMALY = """
import json
import torch
from torch import nn

net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
seen = []
for step in range(8):
    loss = net(torch.randn(4, 8)).square().mean()
    if step == 2:
        with torch.autograd.detect_anomaly(check_nan=True):
            loss.backward()
    elif step == 3:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss.backward()
            seen.append(torch.is_anomaly_enabled())
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append(torch.is_anomaly_enabled())
print(json.dumps(seen))
"""


def test_anomaly_mode_ends_with_the_block_that_asked_for_it(tmp_path):
    done = record(tmp_path, "--", *warm(script(tmp_path, "anomaly.py", ANOMALY)))
    assert done.status == 0, done.err
    assert json.loads(done.out) == [False, False, False, True, False, False, False, False, False]


FAKE = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def train(steps):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


with FakeTensorMode():
    train(3)
train(5)
"""


def test_an_estimate_with_tensors_that_have_no_values_is_no_training(tmp_path):
    done = record(tmp_path, "--", *warm(script(tmp_path, "fake.py", FAKE)))
    assert done.status == 0, done.err
    run = precdoctor.open_run(done.run)
    assert list(run.steps()["step"]) == list(range(5))
    assert set(run.tensors()["step"]) == set(range(5))
    assert not run.events()["event"].isin(["error", "drop"]).any()


NEGATED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).conj().imag


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    y = net(torch.rand(4, 8))
    assert y.is_neg()
    print(float(y.detach().double().sum()))
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_imaginary_part_of_a_conjugate_has_the_sign_it_reads_as(tmp_path):
    done = record(tmp_path, "--every", "1", "--", *warm(script(tmp_path, "negated.py", NEGATED)))
    assert done.status == 0, done.err
    rows = precdoctor.open_run(done.run).tensors()
    sums = rows[rows["kind"] == "output"].sort_values("step")["sum"]
    assert sums.tolist() == pytest.approx([float(line) for line in done.out.split()], rel=1e-5)
