"""Rules while the run goes on: a halt for what was asked for, a command for each finding, nothing for a healthy run."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import record, script, warm

#: FP16 without a loss scaler: most of the gradient is flushed. Goes on until it is stopped, or for so many steps.
UNDERFLOW = """
import sys, torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
step = 0
while step < int(sys.argv[1]):
    x = torch.randn(1024, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = 1e-2 * nn.functional.mse_loss(out.float(), x[:, :8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
print("done", step)
"""
FOR_EVER = "1000000000"


@pytest.mark.slow
def test_a_finding_that_was_asked_for_stops_the_run_with_66(tmp_path):
    path = script(tmp_path, "train.py", UNDERFLOW)
    command = "cat >> found.jsonl; echo on stdout"
    flags = ("--halt-on", "PD4,activation-gradient-underflow", "--on-finding", command)
    done = record(tmp_path, "--strict", *flags, "--", *warm(path, FOR_EVER))
    assert done.status == 66, done.err
    assert done.out == b"", "stdout is the command's own"
    assert "on stdout" in done.err
    end = done.end()
    assert end["reason"] == "stopped" and end["message"].startswith("--halt-on, PD201 ")
    assert any("the weights are as they were before this step" in line for line in done.said)
    assert len(done.steps()) == end["steps"], "every step it counts is on record"
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [f["code"] for f in found].count("PD201") == 1, "each finding once"
    assert all(f["run"] == str(done.run) and f["location"] and f["message"] for f in found)


def test_a_run_is_not_stopped_for_what_nobody_asked_for_and_the_last_look_finds_it(tmp_path):
    path = script(tmp_path, "train.py", UNDERFLOW)
    flags = ("--halt-on", "PD4", "--on-finding", "cat >> found.jsonl; exit 3")
    done = record(tmp_path, *flags, "--", *warm(path, "8"))
    assert done.status == 0 and done.out == b"done 8\n"
    assert not (done.run / "halt.json").exists()
    assert '"code": "PD201"' in (tmp_path / "found.jsonl").read_text()
    assert any("the --on-finding command ended with status 3" in line for line in done.said)


def test_a_healthy_run_is_left_alone(tmp_path):
    path = script(tmp_path, "train.py", "from training import *\nprint(digest(train(40)))\n")
    done = record(tmp_path, "--halt-on", "error", "--on-finding", "touch found", "--", *warm(path))
    assert done.status == 0, done.err
    assert done.end()["reason"] == "exit" and len(done.steps()) == 40
    assert not (tmp_path / "found").exists() and not (done.run / "halt.json").exists()
