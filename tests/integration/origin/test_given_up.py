"""Scripts that see a non-finite loss or gradient and stop, or go on with the next batch: no step follows."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.incidents import incidents, told
from tests.support.processes import PYTHON, record, script, torchrun, warm

#: Steps with a bad batch; no step of them is sampled with every 8th.
BAD = (75, 76)
#: ``where`` is who makes the value: the model (``after``: seen only after the backward pass; ``inside``: seen by the
#: model itself), code behind it, or the backward pass. ``way`` is what the script does then.
LOOP = """
import math
import sys

import torch
from torch import nn

from training import digest

where, way, bad = sys.argv[1], sys.argv[2], [int(x) for x in sys.argv[3].split(",")]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x):
        if where == "inside" and (x[:, 0] < 0).any():
            raise ValueError(f"found nan: {x[:, :1].sqrt()}")
        inner = self.norm(self.first(x).relu())
        return self.last(inner) + (x[:, :1].sqrt() if where in ("model", "after", "inside") else 1.0)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)


def train():
    for step in range(90):
        x = torch.rand(8, 8)
        if step in bad:
            x[3, 0] = net.last.bias.item() if where == "gradient" else -1.0
        elif where == "gradient":
            x[3, 0] = 0.1
        loss = (net(x) - 1.0).square().mean()
        if where == "loss":
            loss = loss + x[:, 0].mul(net.last.bias).sqrt().mean()
        if where in ("gradient", "after"):
            loss = loss + (net.last.bias - x[3, 0]).sqrt() if where == "gradient" else loss
            optimizer.zero_grad()
            loss.backward()
        if not math.isfinite(loss.item()) or (where == "gradient" and not net.last.bias.grad.isfinite().all()):
            if way == "exit":
                sys.exit(3)
            elif way == "raise":
                raise RuntimeError("diverged")
            elif way == "stop":
                return
            continue
        if where not in ("gradient", "after"):
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()


with torch.no_grad():
    net.last.bias.fill_(0.5)
try:
    train()
finally:
    print(digest(net), flush=True)
"""


@pytest.fixture
def loop(tmp_path):
    return script(tmp_path, "loop.py", LOOP)


@pytest.mark.parametrize(
    ("where", "way"),
    [
        *[("model", "exit"), ("inside", "raise"), ("gradient", "stop")],
        *(
            pytest.param(*same, marks=pytest.mark.slow)
            for same in (
                *[("model", "stop"), ("loss", "exit"), ("model", "continue")],
                *[("loss", "raise"), ("after", "raise")],
            )
        ),
    ],
)
def test_what_made_a_step_non_finite_that_the_script_gave_up_is_named(tmp_path, loop, where, way):
    arguments = (where, way, ",".join(map(str, BAD)))
    interpreter = [PYTHON, str(loop)] if (where, way) in (("model", "exit"), ("loss", "raise")) else warm(loop)
    done = record(tmp_path, "--strict", "--every", "8", "--", *interpreter, *arguments)
    if way in ("exit", "continue"):
        plain = record(tmp_path, "--on-nonfinite", "observe", "--", *warm(loop, *arguments), run=tmp_path / "plain")
        assert (done.out, done.status) == (plain.out, plain.status), "the same weights"
    (finding,) = told(done)
    assert finding.code == {"loss": "PD103", "gradient": "PD102"}.get(where, "PD101")
    assert finding.location.step == BAD[0]
    assert finding.cause == ("sqrt-gradient-at-zero" if where == "gradient" else "sqrt-of-negative")
    assert finding.evidence["recovered"] == (way == "continue")
    assert all(i["given_up"] and i["outcome"] == "origin" for i in incidents(done))
    if way == "continue":
        assert "nothing to resume" in finding.message


def test_a_loop_that_gives_up_every_batch_is_told_of_before_it_ends(tmp_path, loop):
    bad = ",".join(map(str, range(5, 90)))
    done = record(tmp_path, "--strict", "--every", "8", "--", *warm(loop, "model", "continue", bad))
    (finding,) = told(done)
    assert (finding.code, finding.location.step, finding.cause) == ("PD101", 5, "sqrt-of-negative")
    assert not finding.evidence["recovered"]


OTHERS = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(policy.parameters(), 1e-3)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = policy

    def forward(self, x):
        return torch.distributions.Normal(self.policy(x), 1.0).sample()


actor = Actor()
for step in range(20):
    x = torch.rand(8, 4)
    if step == 11 and sys.argv[1] in ("rollout", "closure"):
        x[2, 1] = float("nan")
    if step == 11 and sys.argv[1] == "rate":
        optimizer.param_groups[0]["lr"] = float("inf")
    if step == 11 and sys.argv[1] == "sampling":
        odds = (policy(x) * 1e4).square().exp()
        torch.multinomial(odds / odds.sum(1, keepdim=True), 1)
    if sys.argv[1] == "rollout":
        with torch.no_grad():
            actor(x)

    def closure():
        optimizer.zero_grad()
        loss = policy(x).square().mean()
        if not loss.isfinite():
            return None
        if step == 11 and sys.argv[1] == "anomaly":
            loss = loss + (policy[2].bias * 0.0).sqrt().sum()
        with torch.autograd.set_detect_anomaly(sys.argv[1] == "anomaly"):
            loss.backward()
        return loss

    optimizer.step(closure)
"""


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("rollout", "PD104", "[2, 1]"),
        pytest.param("closure", "PD104", "[2, 1]", marks=pytest.mark.slow),
        pytest.param("anomaly", "PD102", "sqrt-gradient-at-zero", marks=pytest.mark.slow),
        pytest.param("sampling", "PD103", "exp-overflow", marks=pytest.mark.slow),
        pytest.param("rate", "PD105", "the learning rate of parameter group 0 is infinite", marks=pytest.mark.slow),
    ],
)
def test_steps_that_the_guard_does_not_see(tmp_path, what, code, words):
    """A rollout that raises, a closure without a backward pass, the user's anomaly mode, an infinite learning rate."""
    done = record(tmp_path, "--every", "8", "--", *warm(script(tmp_path, "others.py", OTHERS), what))
    (finding,) = told(done)
    assert (finding.code, finding.location.step) == (code, 11)
    assert finding.evidence["recovered"] == (what == "closure")
    assert words in finding.message


HEALTHY = """
import torch
from torch import nn

torch.manual_seed(0)
cell, actor, critic = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 1)
optimizer = torch.optim.Adam([*cell.parameters(), *actor.parameters(), *critic.parameters()], 1e-3)
mask = torch.tensor([True, False, False, False])
for step in range(80):
    h = torch.randn(4, 8)
    for _ in range(4):
        out = cell(h)
        h = out.tanh().detach()
    for _ in range(3):
        scores = actor(h).masked_fill(mask, float("-inf"))
        unused = scores.min()  # a mask, which nobody trains on
    loss = scores.softmax(-1).square().mean() + critic(out.tanh()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
worst = actor(h).masked_fill(mask, float("-inf"))
raise SystemExit(0)
"""


def test_calls_without_a_gradient_are_no_incident_by_themselves(tmp_path):
    done = record(tmp_path, "--strict", "--every", "8", "--", *warm(script(tmp_path, "healthy.py", HEALTHY)))
    assert done.status == 0, done.err
    assert incidents(done) == []


RANKS = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        if sys.argv[1] == "talks":
            dist.all_reduce(y.detach().clone())
        return y + x.sqrt()


net = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(12):
    x = torch.rand(4, 8)
    if step == 11 and dist.get_rank() == 1:
        x[0, 0] = -1.0
    loss = net(x).mean()
    if step == 11:
        sys.exit(4)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("talks", ["talks", pytest.param("is quiet", marks=pytest.mark.slow)])
def test_a_rank_that_ends_alone_does_not_wait_for_the_others(tmp_path, talks):
    done = record(tmp_path, "--every", "8", "--", *torchrun(2, script(tmp_path, "ranks.py", RANKS), talks))
    (found,) = incidents(done)
    assert found["given_up"]
    assert found["outcome"] == ("failed" if talks == "talks" else "origin")
    assert ("communicates" in (found["why"] or "")) == (talks == "talks")


def test_a_loss_whose_backward_pass_has_run_is_not_told_again_as_the_run_ends(tmp_path):
    code = """
        import torch
        w = torch.full((4,), 3.0, requires_grad=True)
        optimizer = torch.optim.SGD([w], 1e-3)
        for step in range(4):
            loss = (w - (w.detach() if step == 2 else 1.0)).sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.isnan()
    """
    done = record(tmp_path, "--strict", "--", *warm(script(tmp_path, "plain.py", textwrap.dedent(code))))
    assert done.status == 0, done.err
    assert [line.split(":")[0] for line in done.said if line.startswith("step ")] == ["step 2"]


@pytest.mark.parametrize("fault", [True, False])
def test_a_script_that_mends_its_gradients_is_told_of_them_and_of_a_loss_that_fails_by_itself(tmp_path, fault):
    code = """
        import sys
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(8):
            out = net(torch.rand(3, 4))
            length = torch.where(out > 9, (out - out.detach()).square().sum(1, keepdim=True).sqrt(), 0.1)
            loss = (out.exp() - (9.0 if step == 5 and sys.argv[1] == "True" else 0.0)).log().mean() + length.mean()
            optimizer.zero_grad()
            loss.backward()
            for p in net.parameters():
                p.grad.nan_to_num_()
            optimizer.step()
    """
    done = record(tmp_path, "--strict", "--", *warm(script(tmp_path, "mends.py", textwrap.dedent(code)), str(fault)))
    assert done.status == 0, done.err
    found = {(f.code, f.location.step, f.cause) for f in told(done)}
    loss = {("PD103", 5, "log-of-nonpositive")} if fault else set()
    assert {f for f in found if f[0] == "PD103"} == loss
    assert {(code, step) for code, step, _ in found - loss} == {("PD102", 0)}
