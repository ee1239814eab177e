"""Calls that end by something that is no ``Exception``: torch calls no hook then, and the run goes on."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.processes import record, script, warm

#: The first step is 0. ``during`` says in which call a Ctrl-C comes; the loss of the last step is infinite.
LOOP = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
during = sys.argv[1]


class Block(nn.Module):
    armed = False

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if Block.armed:
            Block.armed = False
            raise KeyboardInterrupt
        return self.inner(x)


def made():
    net = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))
    return net, torch.optim.SGD(net.parameters(), 0.1)


net, optimizer = made()



def train(scale=1.0):
    loss = (net(torch.ones(4, 8)) * scale).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for step in range(6):
    if step == 3 and during != "nothing":
        Block.armed = True
        try:
            if during == "validation":
                with torch.no_grad():
                    net.eval()(torch.ones(4, 8))
            else:
                train()
        except KeyboardInterrupt:
            net.train()
        if during == "a cell of a notebook":
            net, optimizer = made()
    train(float("inf") if step == 5 else 1.0)
"""


UNSCANNED = pytest.param(("--every", "1", "--deep-scan", "off"), marks=pytest.mark.slow)


@pytest.fixture(params=[("--every", "1"), ("--every", "4"), UNSCANNED], ids=" ".join)
def recorded(request, tmp_path):
    path = script(tmp_path, "loop.py", LOOP)

    def run(during):
        done = record(tmp_path, "--strict", *request.param, "--", *warm(path, during), run=tmp_path / during)
        assert done.status == 0, done.err
        return precdoctor.open_run(done.run), done.said

    return run


@pytest.mark.parametrize("during", ["validation", "training", "a cell of a notebook"])
def test_what_follows_is_recorded_as_without(recorded, during):
    (plain, _), (run, said) = recorded("nothing"), recorded(during)

    def rows(of):
        found = of.tensors(filters=[("step", ">=", 4)])
        return found[["step", "module", "kind", "name", "call", "phase"]].values.tolist()

    assert rows(run) == rows(plain)
    assert len({row[0] for row in rows(run)}) >= 1
    roots = {"Sequential#0", "Sequential#1"} if during.startswith("a cell") else {"Sequential#0"}
    assert set(run.tensors()["root"]) - {""} == roots
    assert any("step 5: the loss is not finite, first made by aten.mul" in line for line in said)


@pytest.mark.parametrize("error", ["SystemExit(1)", "KeyboardInterrupt"])
def test_a_run_that_ends_in_a_call_keeps_the_rows_of_that_step(tmp_path, error):
    ends = LOOP.replace("raise KeyboardInterrupt", f"raise {error}")
    path = script(tmp_path, "ends.py", ends.replace("except KeyboardInterrupt", "except OSError"))
    done = record(tmp_path, "--strict", "--every", "1", "--", *warm(path, "training"))
    run = precdoctor.open_run(done.run)
    assert done.status != 0
    assert run.steps()[["step", "complete"]].values.tolist() == [[0, True], [1, True], [2, True], [3, False]]
    assert "output" in set(run.tensors(filters=[("step", "==", 3)])["kind"])
