"""Tensors that loss code made without a gradient: no replay reaches their op, but the source shows its line."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.incidents import told
from tests.support.processes import record, script, warm

SCRIPT = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
where = sys.argv[1]
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)


def weights(noise):
    ratio = noise.clamp(max=0.5)
    return ratio / noise  # in a function


def compute_loss(x, y, noise):
    if where == "target":
        y = torch.log(y)  # at the target
        y = y - y.mean()
        return nn.functional.smooth_l1_loss(net(x), y)
    error = (net(x) - y).square()
    return (weights(noise) * error).mean()


for step in range(12):
    x, y, noise = torch.rand(8, 4), torch.rand(8, 1) + 0.1, torch.rand(8, 1) + 0.1
    if step == 9:
        y[2], noise[3] = 0.0, 0.0
    loss = compute_loss(x, y, noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def line_of(path, mark):
    (line,) = [n for n, text in enumerate(path.read_text().splitlines(), 1) if text.endswith(mark)]
    return line


@pytest.mark.parametrize(("where", "mark"), [("target", "# at the target"), ("weight", "# in a function")])
def test_the_line_that_made_a_value_without_a_gradient_is_read_from_the_source(tmp_path, where, mark):
    path = script(tmp_path, "loop.py", SCRIPT)
    done = record(tmp_path, "--strict", "--every", "1", "--", *warm(path, where))
    (finding,) = told(done)
    place = finding.location
    assert (finding.code, place.step, place.source.line, place.op) == ("PD103", 9, line_of(path, mark), None)
    assert place.source.code in finding.message and "was read from the source" in finding.evidence["confidence_reason"]
    assert finding.confidence <= 0.8


def test_redacted_logs_have_its_number_and_not_its_text(tmp_path):
    path = script(tmp_path, "loop.py", SCRIPT)
    done = record(tmp_path, "--redact-names", "--every", "1", "--", *warm(path, "target"))
    assert told(done)[0].location.source.line == line_of(path, "# at the target")
    assert not any(b"torch.log" in file.read_bytes() for file in done.run.rglob("*") if file.is_file())
    assert "torch.log" not in " ".join(precdoctor.open_run(done.run).events()["data"])


PREPARES = """
import sys

import torch

torch.manual_seed(0)
table = torch.rand(48, 4) + 0.1
table[35] = 0
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(table), 8)
for step, x in enumerate(table.split(8) if sys.argv[1] == "split" else (x for x, in loader)):
    x = x / x.sum(1, keepdim=True)  # here
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("how", "provenance"), [("split", "unknown"), ("loader", "after-loader")])
def test_the_line_that_made_a_batch_non_finite_is_read_from_the_source(tmp_path, how, provenance):
    path = script(tmp_path, "loop.py", PREPARES)
    done = record(tmp_path, "--strict", "--every", "1", "--", *warm(path, how))
    (finding,) = told(done)
    assert (finding.code, finding.location.step, finding.evidence["provenance"]) == ("PD104", 4, provenance)
    assert f"`x = x / x.sum(1, keepdim=True)  # here` at loop.py:{line_of(path, '# here')}." in finding.message
