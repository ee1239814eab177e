"""Scans that recorded numbers give reason for, in recorded processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
#: The loss scale is too large for the first steps, as GradScaler's default often is.
SCALED = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**{log2})
for step in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = net(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
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


@pytest.mark.parametrize(("log2", "expected"), [(4, [0, 1, 8]), (20, None)])
def test_scans_of_overflowing_steps_are_made_up_for_behind_the_first_that_trains(tmp_path, log2, expected):
    script(tmp_path, "scaled.py", SCALED.format(log2=log2))
    done = record(tmp_path, "--", *warm("scaled.py"))
    found = [f["at"] for f in scans(done) if f["kind"] == "step"]
    if expected is None:
        rows = precdoctor.open_run(done.run).steps()
        trained = int(rows.loc[~rows["skipped"].astype(bool), "step"].min())
        assert trained > 1
        expected = sorted({0, 1, 8, trained + 1})
    assert found == expected
