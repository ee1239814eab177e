"""A deep scan in a distributed run: it looks at the first steps, and they are the steps they would have been."""

from __future__ import annotations

import json

import pytest

import precdoctor
from tests.support.processes import record, script, torchrun

#: Trains twice from the same seeds: the first steps are scanned, those of the second training are not.
TWICE = """
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3), nn.Dropout(0.1)

    def forward(self, x):
        return self.b(self.drop(self.norm(self.a(x)).relu()))


def train():
    torch.manual_seed(0)
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    torch.manual_seed(dist.get_rank())
    mix = hashlib.sha256()
    for step in range(2):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                scores = net(torch.randn(8, 8))
            loss = F.cross_entropy(scores.float(), torch.randint(0, 3, (8,)))
            loss.backward()
            mix.update(loss.item().hex().encode())
        optimizer.step()
        optimizer.zero_grad()
    for value in net.state_dict().values():
        mix.update(value.detach().numpy().tobytes())
    return mix.hexdigest()


first, second = train(), train()
os.write(1, f"RESULT {dist.get_rank()} {first == second}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_is_scanned_and_trains_as_it_would_have(tmp_path):
    script(tmp_path, "twice.py", TWICE)
    done = record(tmp_path, "--strict", "--deep-scan", "2", "--", *torchrun(2, "twice.py"))
    assert done.status == 0, done.err
    assert sorted(done.out.decode().split("\n"))[1:] == ["RESULT 0 True", "RESULT 1 True"]
    run = precdoctor.open_run(done.run)
    events = run.events()
    assert not set(events["event"]) & {"error", "warning", "incident"}
    scans = events[events["event"] == "scan"].assign(data=lambda e: e["data"].map(json.loads))
    steps = [(s.rank, s.step, s.data) for s in scans.itertuples() if s.data["kind"] == "step"]
    assert sorted((rank, step, data["outcome"], data["micro_steps"]) for rank, step, data in steps) == [
        (rank, step, "done", 2) for rank in (0, 1) for step in (0, 1)
    ]
    ops = {
        (o["op"], o["phase"], o["inputs"]) for s in scans[scans["module"] == "a"].itertuples() for o in s.data["ops"]
    }
    assert {("aten.addmm.default", "forward", "bfloat16"), ("aten.mm.default", "backward", "bfloat16")} <= ops
    cost = run.steps().groupby("step")["recorder_ns"].sum()
    assert cost[0] > sum(data["spent_ns"] for _, step, data in steps if step == 0), "it counts as recording"
