"""``--on-nonfinite``: what happens to the run itself."""

from __future__ import annotations

import pytest

from tests.support.processes import record, script, warm

#: Prints the losses and a digest of the weights; ``skip`` as an argument makes the loop skip the bad step by itself.
LOOP = """
import sys

import torch

from training import digest

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
try:
    for step in range(6):
        x = torch.randn(4, 4)
        if step == 3:
            x[0, 0] = float("inf")
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if sys.argv[1:] != ["skip"] or step != 3:
            optimizer.step()
        print(step, loss.item().hex(), digest(net), flush=True)
finally:
    print("the user's own finally", digest(net), flush=True)
"""


@pytest.fixture
def loop(tmp_path):
    return script(tmp_path, "loop.py", LOOP)


def test_skip_leaves_the_weights_as_a_loop_that_skips(tmp_path, loop):
    ours = record(tmp_path, "--strict", "--on-nonfinite", "skip", "--", *warm(loop), run=tmp_path / "ours")
    theirs = record(tmp_path, "--on-nonfinite", "observe", "--", *warm(loop, "skip"), run=tmp_path / "theirs")
    assert ours.status == theirs.status == 0, ours.err
    assert ours.out == theirs.out
    assert ours.steps() == [0, 1, 2, 3, 4, 5]
    assert any("step 3: the loss is not finite" in line and "skipped" in line for line in ours.said)
    assert not any("not finite" in line for line in theirs.said)


def test_stop_ends_the_run_with_66_before_the_weights_are_touched(tmp_path, loop):
    done = record(tmp_path, "--strict", "--on-nonfinite", "stop", "--", *warm(loop))
    assert done.status == 66, done.err
    lines = done.out.decode().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "the"]
    assert lines[-1].split()[-1] == lines[2].split()[-1], "the weights of the last good step"
    assert done.end()["reason"] == "stopped"
    assert done.steps() == [0, 1, 2]
    assert any(line.startswith("recorded 1 process") for line in done.said)


def test_a_policy_nobody_knows_is_refused_before_the_run(tmp_path, loop):
    done = record(tmp_path, "--on-nonfinite", "abort", "--", *warm(loop))
    assert done.status == 2 and done.out == b""
    assert "examine, stop, skip, observe" in done.err


SHARDED = """
import torch

class FlatParameter(torch.nn.Parameter):
    "As FSDP calls a rank's part of the weights."

net = torch.nn.Linear(4, 4)
net.weight = FlatParameter(net.weight.detach())
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for _ in range(3):
    net(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_ranks_that_would_disagree_are_not_asked(tmp_path, policy):
    script(tmp_path, "sharded.py", SHARDED)
    done = record(tmp_path, "--on-nonfinite", policy, "--", *warm("sharded.py"), run=tmp_path / "run")
    assert done.status == 2 and b"trained" not in done.out
    sentence = f"--on-nonfinite {policy} does not work with sharded gradients, because ranks would disagree; use "
    assert any(sentence + "--on-nonfinite examine" in line for line in done.said), done.err
