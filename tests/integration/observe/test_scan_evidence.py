"""Scans that recorded numbers give reason for, in recorded processes."""

from __future__ import annotations

import json
from typing import Any

import precdoctor
from tests.support.processes import record, script, warm

#: From step 20 on squares overflow inside a module in FP16; `rsqrt` makes zeros of that, and every output stays finite.
HIDDEN = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 32), Norm(), nn.Linear(32, 4)

    def forward(self, x, gain):
        return self.b(self.norm((self.a(x) * gain).half()).float())


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(200):
    gain = 1.0 if step < 20 else 1000.0
    loss = F.cross_entropy(net(torch.randn(32, 16), gain), torch.randint(0, 4, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
#: Batches and targets whose size changes by up to three decades from step to step.
NOISY = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(400):
    size = 10 ** (3 * torch.rand(2) - 1.5)
    loss = F.mse_loss(net(torch.randn(32, 16) * size[0]), torch.randn(32, 1) * size[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def scans(done) -> list[dict[str, Any]]:
    assert done.status == 0, done.err
    events = precdoctor.open_run(done.run).events()
    assert not set(events["event"]) & {"error", "warning"}
    found = [{**json.loads(e.data), "at": e.step, "module": e.module, "op": e.op} for e in events.itertuples()
             if e.event == "scan"]  # fmt: skip
    return [f for f in found if f["kind"] != "coverage"]


def test_an_overflow_that_begins_between_two_scans_is_scanned_and_named(tmp_path):
    script(tmp_path, "hidden.py", HIDDEN)
    found = scans(record(tmp_path, "--strict", "--", *warm("hidden.py")))
    armed = next(f for f in found if f["kind"] == "step" and f["reason"] == "evidence")
    first = armed["evidence"][0]
    assert (first["what"], first["step"], first["tensor"]) == ("squares", 20, "Net#0/norm:input:0")
    assert first["before"] < 256.0 < first["now"]
    assert armed["at"] > 20
    overflow = next(f for f in found if f["kind"] == "overflow")
    assert (overflow["module"], overflow["op"]) == ("norm", "aten.mul.Tensor")


def test_a_noisy_run_is_not_scanned_forever(tmp_path):
    script(tmp_path, "noisy.py", NOISY)
    found = [f for f in scans(record(tmp_path, "--", *warm("noisy.py"))) if f["kind"] == "step"]
    armed = [f for f in found if f["reason"] == "evidence"]
    assert {f["at"] for f in found} >= {0, 1}
    kinds = {e["what"] for f in armed for e in f["evidence"]}
    assert len(armed) <= len(kinds) + 4
    assert not kinds & {"squares", "headroom", "learning-rate", "loss-scale", "discarded"}
