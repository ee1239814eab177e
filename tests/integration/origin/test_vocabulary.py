"""Outputs as large as the logits of a language model: with the default --scene-memory, the op is found all the same."""

from __future__ import annotations

import json

import pytest

import precdoctor
from tests.support.processes import record, script, warm

SCRIPT = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
where, sequences = sys.argv[1], int(sys.argv[2])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50257, 4)
        self.head = nn.Linear(4, 50257)

    def forward(self, tokens, bad):
        h = self.embedding(tokens)
        if bad and where == "model":
            h = h + torch.log(torch.full((), -1.0))  # in the model
        if bad and where == "backward":
            h = h + torch.sqrt(h * 0)  # in the backward
        return self.head(h)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(2):
    tokens = torch.randint(0, 50257, (sequences, 120))  # logits of 24 MB a sequence, and gradients as large
    loss = nn.functional.cross_entropy(model(tokens, step == 1).flatten(0, 1), tokens.flatten())
    if step == 1 and where == "loss":
        loss = loss + torch.log(loss * 0 - 1)  # in the loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINES = SCRIPT.lstrip().splitlines()


@pytest.mark.parametrize(
    ("where", "op", "sequences"),
    [
        ("model", "log", 2),
        pytest.param("model", "log", 6, marks=pytest.mark.slow),
        pytest.param("loss", "log", 6, marks=pytest.mark.slow),
        pytest.param("backward", "div", 6, marks=pytest.mark.slow),
    ],
)
def test_the_op_and_its_line_are_found(tmp_path, where, op, sequences):
    script(tmp_path, "train.py", SCRIPT.lstrip())
    done = record(tmp_path, "--strict", "--", *warm("train.py", where, sequences), run=tmp_path / "run")
    assert done.status == 0, done.err
    events = precdoctor.open_run(done.run).events()
    (incident,) = [json.loads(d) for d in events[events["event"] == "incident"]["data"]]
    assert incident["outcome"] == "origin", incident
    line = next(i for i, text in enumerate(LINES, 1) if text.endswith(f"# in the {where}"))
    assert any(f"first made by aten.{op}" in said and f"train.py:{line};" in said for said in done.said), done.err
