"""Diagnose, apply, verify: the whole loop as a person types it."""

from __future__ import annotations

import json

import pytest

from precdoctor.cli import main
from tests.support.processes import PYTHON, record, script

#: A scaler whose growth interval is far too short: it probes into overflow every few steps.
THRASH = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
for step in range(64):
    x = torch.randn(32, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), x[:, :8].square())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.slow
def test_the_prediction_comes_true(tmp_path, capsys):
    path = script(tmp_path, "train.py", THRASH)
    before, after, fix = tmp_path / "before", tmp_path / "after", tmp_path / "fix.toml"
    done = record(tmp_path, "--every", "1", "--", PYTHON, str(path), run=before)
    assert done.status == 0, done.err

    assert main(["diagnose", str(before), "--output-format", "concise", "--prescription", str(fix)]) == 0
    said = capsys.readouterr()
    assert "PD302" in said.out
    assert f"precdoctor record --apply {fix} -- {PYTHON} {path}" in said.err

    changed = record(tmp_path, "--every", "1", "--apply", str(fix), "--", PYTHON, str(path), run=after)
    assert changed.status == 0, changed.err
    assert any(line.startswith("applied scaler.growth_interval 3 -> 2000") for line in changed.said)

    assert main(["compare", str(before), str(after), "--output-format", "json"]) == 0
    effects = json.loads(capsys.readouterr().out)["compare"]["applied"]["effects"]
    [skipped] = [e for e in effects if e["measure"] == "skipped_steps"]
    assert skipped["before"] == skipped["from"] > 3 > skipped["measured"]
    assert all(e["came_true"] for e in effects)
    assert main(["diagnose", str(after), "--select", "PD3", "--fail-on", "warning"]) == 0
    assert "changed by --apply (1 prescription)" in capsys.readouterr().out
