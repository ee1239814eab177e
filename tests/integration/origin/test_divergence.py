"""A real run that diverges is told by what threw it off; the op that overflowed is its place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import precdoctor
from precdoctor.diagnosis.claims.finding import Finding
from tests.support.processes import PATIENCE, environment, record_command, warm

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
healthy, sick, jump = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.exp(q @ k.transpose(-2, -1))  # a softmax written by hand
        return self.out(weights / weights.sum(-1, keepdim=True) @ v)

model = nn.Sequential(nn.Linear(4, 16), Attention(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=healthy)
for step in range(24):
    for group in optimizer.param_groups:
        group["lr"] = healthy if step < jump else sick
    x = torch.randn(8, 6, 4)
    loss = nn.functional.mse_loss(model(x), x.cumsum(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diverging") / "train.py"
    path.write_text(SCRIPT)
    return path


def told(script: Path, run: Path, *arguments: str) -> list[Finding]:
    """The findings of one recorded training."""
    command = record_command(run, "--", *warm(script, *arguments))
    subprocess.run(command, env=environment(), timeout=PATIENCE, check=True, capture_output=True)
    return list(precdoctor.diagnose(run).findings)


def test_a_rate_that_jumps_leads_with_the_step_before_it_to_resume_from(script: Path, tmp_path: Path) -> None:
    leading, *others = told(script, tmp_path / "run", "1e-3", "3", "12")
    assert leading.title.startswith("the learning rate rose from 0.001 to 3 at step 12")
    assert leading.location.op == "aten.exp.default"
    assert leading.resume_step == 11
    assert leading.prescriptions[0].change == {"lr": {"from": 3.0, "to": 0.001}}
    assert len(leading.prescriptions) == 1
    assert not [f for f in others if f.severity.value == "error"]


def test_a_rate_too_high_from_the_start_has_nothing_to_resume_from(script: Path, tmp_path: Path) -> None:
    leading, *_ = told(script, tmp_path / "run", "3", "3", "0")
    assert leading.title.startswith("updates at a learning rate of 3 reach")
    assert leading.location.op == "aten.exp.default"
    assert leading.resume_step is None
    assert list(leading.prescriptions[0].change) == ["lr_factor"]
