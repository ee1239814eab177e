"""A value that an installed package made of the user's arguments: nobody edits the package."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.processes import PYTHON, environment, record, script

LOSSES = """
def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()
"""
SCRIPT = """
import sys

import torch
from losses import masked_mean


class Net(torch.nn.Linear):
    def forward(self, x, mask):
        return masked_mean(super().forward(x), mask)  # in the model


torch.manual_seed(0)
inside = sys.argv[1] == "inside"
net = Net(4, 1) if inside else torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(4):
    x, mask = torch.randn(8, 4), torch.full((8, 1), float(step < 3))
    loss = net(x, mask) if inside else masked_mean(net(x), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("case", ["inside", pytest.param("outside", marks=pytest.mark.slow)])
def test_the_call_is_to_be_changed_and_not_the_library(tmp_path, case):
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "losses.py").write_text(LOSSES)
    script(tmp_path, "train.py", SCRIPT)
    env = environment()
    env["PYTHONPATH"] = f"{packages}:{env.get('PYTHONPATH', '')}"
    run = record(tmp_path, "--strict", "--", PYTHON, "train.py", case, env=env)
    (finding,) = precdoctor.diagnose(precdoctor.open_run(run.run)).findings
    assert finding.location.source.file == "losses.py" and finding.cause == "division-by-zero"
    assert "0 / 0, a count of nothing" in finding.message
    lines = (tmp_path / "train.py").read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.endswith("# in the model"))
    led = f"; the last line of yours that led there is train.py:{number}." if case == "inside" else "."
    assert f" losses.py is part of a library{led}" in finding.message
    (prescription,) = finding.prescriptions
    assert "losses.py" not in prescription.title and "nothing is counted" in prescription.title
