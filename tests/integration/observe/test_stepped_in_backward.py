"""Steps made in a backward pass or in inference mode: no mode of ours is left half on torch's stack behind it."""

from __future__ import annotations

import json

import pytest

import precdoctor
from tests.support.processes import record, script, warm

LOOP = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizers = {p: torch.optim.SGD([p], 1e-2) for p in net.parameters()}


def hook(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in net.parameters():
    p.register_post_accumulate_grad_hook(hook)
for step in range(6):
    loss = net(torch.randn(4, 4)).square().mean()
    loss.backward()
    print(loss.item().hex(), torch._C._len_torch_dispatch_stack() * (step > 0))  # the second step is scanned
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stepped")
    script(folder, "loop.py", LOOP)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    """What the script prints by itself."""
    return record(folder, "--ranks", "9", "--", *warm("loop.py"), run=folder / "plain").out


def test_of_a_scan(folder, plain):
    ours = record(folder, "--strict", "--", *warm("loop.py"), run=folder / "scanned")
    events = precdoctor.open_run(ours.run).events()
    scans = events[events["event"] == "scan"]["data"]

    assert (ours.status, ours.out) == (0, plain)
    assert plain.decode().split()[1::2] == ["0"] * 6
    assert any('"outcome": "done"' in str(data) for data in scans), "else no mode was open"
    coverage = [data for data in map(json.loads, scans) if data["kind"] == "coverage"]
    ops = [op for data in coverage for op in data["ops"]]
    assert {op["op"] for op in ops} >= {"aten.mm.default"}
    assert "aten.add_.Tensor" not in {op["op"] for op in ops}, "the optimizer's, which is no part of the backward pass"


INFERENCE = """
import torch
from torch import nn

torch.manual_seed(0)
student, teacher = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD(student.parameters(), 1e-2)
for _ in range(4):
    x = torch.randn(4, 4)
    logits = student(x)
    with torch.inference_mode():
        targets = teacher(x).softmax(-1)
    loss = nn.functional.kl_div(logits.log_softmax(-1), targets.clone(), reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    with torch.inference_mode():
        optimizer.step()
    print(loss.item().hex())
"""


def test_of_a_step_and_of_another_call_in_inference_mode(tmp_path):
    # behind it torch's dispatch keys are as they were before it
    script(tmp_path, "loop.py", INFERENCE)
    plain = record(tmp_path, "--ranks", "9", "--", *warm("loop.py"), run=tmp_path / "plain")
    ours = record(tmp_path, "--strict", "--every", "1", "--", *warm("loop.py"), run=tmp_path / "ours")
    events = precdoctor.open_run(ours.run).events()

    assert (ours.status, ours.out) == (0, plain.out)
    assert any('"outcome": "done"' in str(data) for data in events[events["event"] == "scan"]["data"])
    assert len(precdoctor.open_run(ours.run).steps()) == 4
