"""``--arm-next``: after an incident that no replay explains, the next steps are traced as the run makes them."""

from __future__ import annotations

import json

import pytest

import precdoctor
from tests.support.processes import record, script, warm

#: A module with a random number generator of its own cannot be run again; ``skip`` lets the loop skip bad steps itself.
LOOP = """
import sys

import torch
from torch import nn

from training import digest


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        rate = self.fc(x + 0.01 * torch.randn(x.shape, generator=self.generator)).exp()
        return rate.log()  # here


torch.manual_seed(0)
net = Noisy()
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
for step in range(7):
    loss = net(torch.randn(8, 4) * (1e4 if step in (2, 3) else 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if sys.argv[1:] != ["skip"] or step not in (2, 3):
        optimizer.step()
    print(step, loss.item().hex(), digest(net), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm-next")
    script(folder, "loop.py", LOOP)
    return folder


def test_the_next_step_is_traced_in_the_run_itself(folder):
    options = ("--strict", "--on-nonfinite", "skip", "--arm-next", "1")
    ours = record(folder, *options, "--", *warm("loop.py"), run=folder / "ours")
    theirs = record(folder, "--ranks", "9", "--", *warm("loop.py", "skip"), run=folder / "theirs")
    assert ours.status == theirs.status == 0, ours.err
    assert ours.out == theirs.out, "both bad steps were skipped, and nothing else has changed"
    run = precdoctor.open_run(ours.run)
    events = run.events()
    incidents = [(row.step, json.loads(row.data)) for row in events[events["event"] == "incident"].itertuples()]
    assert [(step, data["outcome"], data.get("live")) for step, data in incidents] == [
        (2, "refused", None),
        (3, "origin", True),
    ]
    assert "random number generator of its own" in incidents[0][1]["why"]
    origin = incidents[1][1]["origins"][0]
    (op,) = [row for row in events[events["event"] == "op"].itertuples() if json.loads(row.data)["index"] == origin]
    assert (op.step, op.op, op.code.endswith(".exp()")) == (3, "aten.exp.default", True)
    steps = run.steps().set_index("step")
    assert steps["complete"].all() and list(steps.index) == list(range(7))


@pytest.mark.slow
def test_without_it_nothing_is_traced(folder):
    done = record(folder, "--on-nonfinite", "skip", "--", *warm("loop.py"), run=folder / "without")
    events = precdoctor.open_run(done.run).events()
    data = [json.loads(text) for text in events[events["event"] == "incident"]["data"]]
    assert [(d["outcome"], d.get("live")) for d in data] == [("refused", None)] * 2
    assert events[events["event"] == "op"].empty
