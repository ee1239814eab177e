"""Optimizers that step inside the backward pass end a step there: no mode of ours is on torch's stack behind it."""

from __future__ import annotations

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
for _ in range(6):
    loss = net(torch.randn(4, 4)).square().mean()
    loss.backward()
    print(loss.item().hex(), torch._C._len_torch_dispatch_stack())
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
