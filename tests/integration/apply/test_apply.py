"""``record --apply``: the changes a script did not make itself, and what is said of them."""

from __future__ import annotations

import json

import pytest

import precdoctor
from tests.support.processes import record, script, warm

#: Prints what a user could see of each setting, with scaler, autocast, eps and flags as scripts have them.
SCRIPT = """
import copy, io, torch
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        print("norm is given", x.dtype, flush=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.other, self.down = nn.Linear(4, 8), Norm(), Norm(), nn.Linear(8, 1)

    def forward(self, x):
        x = self.norm(self.up(x))
        print("norm returns", x.dtype, flush=True)
        return self.down(self.other(x.half()))

torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = True
net = Net()
optimizer = torch.optim.Adam(net.parameters(), eps=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(16, 4)).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss if step else loss * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    print("scale", scaler.get_scale(), flush=True)
torch.save(net, io.BytesIO())
copy.deepcopy(net).norm(torch.ones(2, 4).half())
print("eps", optimizer.param_groups[0]["eps"], optimizer.defaults["eps"], scaler.get_growth_interval())
print("tf32", torch.backends.cuda.matmul.allow_tf32)
"""

FIX = """
schema_version = 1
[[prescription]]
code = "PD101"
apply = true
[[prescription.change]]
setting = "module.dtype"
root = "Net#0"
module = "norm"
from = "float16"
to = "float32"
[[prescription.effect]]
measure = "skipped_steps"
from = 4
to = 1
steps = 4

[[prescription]]
code = "PD302"
apply = true
[[prescription.change]]
setting = "scaler.init_scale"
from = 1048576.0
to = 16.0
[[prescription.change]]
setting = "scaler.growth_interval"
from = 3
to = 100
[[prescription.change]]
setting = "scaler.min_scale"
to = 12.0

[[prescription]]
code = "PD503"
apply = true
[[prescription.change]]
setting = "optimizer.eps"
from = 1e-3
to = 1e-9
[[prescription.change]]
setting = "flag.matmul_allow_tf32"
to = false
[[prescription.change]]
setting = "module.dtype"
module = "nowhere"
to = "float32"

[[prescription]]
code = "PD201"
apply = false
why_not = "left out by hand"
[[prescription.change]]
setting = "autocast.dtype"
to = "bfloat16"
"""


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apply")
    path = script(folder, "train.py", SCRIPT)
    (folder / "fix.toml").write_text(FIX)
    return record(folder, "--strict", "--on-nonfinite", "observe", "--apply", "fix.toml", "--", *warm(path))


def test_the_script_runs_with_the_changes(applied):
    assert applied.status == 0, applied.err
    lines = applied.out.decode().splitlines()
    assert {line for line in lines if line.startswith("norm returns")} == {"norm returns torch.float32"}
    given = [line for line in lines if line.startswith("norm is given")]
    assert given[0::2][:4] == ["norm is given torch.float32"] * 4, "the module that was named"
    assert given[1::2][:4] == ["norm is given torch.float16"] * 4, "not its neighbour of the same class"
    assert given[8:] == ["norm is given torch.float16"], "nor a copy"
    assert [line for line in lines if line.startswith("scale")] == ["scale 12.0"] * 4, "16, backed off to the floor"
    assert "eps 1e-09 0.001 100" in lines
    assert "tf32 False" in lines


def test_every_change_is_said_and_logged_and_so_is_one_that_found_nothing(applied):
    said = [line for line in applied.said if "applied" in line]
    assert "applied module.dtype float16 -> float32 (`norm`, Norm)" in said
    assert "applied scaler.init_scale 1.04858e+06 -> 16 (GradScaler)" in said
    assert "applied optimizer.eps 0.001 -> 1e-09 (Adam)" in said
    assert any(line.startswith("applied flag.matmul_allow_tf32 True -> False") for line in said)
    assert [line for line in said if line.startswith("not applied")] == [
        "not applied: module.dtype float32 (`nowhere`), because the training has no module of this name"
    ]
    assert not any("autocast" in line for line in said)
    events = precdoctor.open_run(applied.run).events(filters=[("event", "==", "applied")])
    logged = [json.loads(data) for data in events["data"]]
    assert sorted((e["setting"], e["done"]) for e in logged) == [
        ("flag.matmul_allow_tf32", True),
        ("module.dtype", False),
        ("module.dtype", True),
        ("optimizer.eps", True),
        ("scaler.growth_interval", True),
        ("scaler.init_scale", True),
        ("scaler.min_scale", True),
    ]


def test_run_json_says_that_the_run_is_not_the_users_own(applied):
    info = precdoctor.open_run(applied.run).info
    assert info["bit_neutral"] is False
    assert [p["code"] for p in info["applied"]["prescriptions"]] == ["PD101", "PD302", "PD503"]
    assert info["applied"]["file"] == "fix.toml"


def test_compare_holds_the_prediction_against_the_run(applied):
    run = precdoctor.open_run(applied.run)
    found = precdoctor.compare(run, run)
    [outcome] = found.applied.outcomes
    assert (outcome.effect.after, outcome.measured, outcome.came_true) == (1.0, 1.0, True)
    assert any("optimizer.eps 0.001 -> 1e-09" in line for line in found.applied.done)


MASTERS = """
import sys, torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).bfloat16()
weights = list(net.parameters())
by_hand = sys.argv[1:] == ["by-hand"]
masters = [w.detach().float().clone().requires_grad_() for w in weights] if by_hand else weights
optimizer = torch.optim.AdamW(masters, lr=1e-4)
for step in range(6):
    loss = net(torch.randn(16, 8).bfloat16()).float().square().mean()
    net.zero_grad()
    loss.backward()
    if by_hand:
        for master, weight in zip(masters, weights):
            master.grad = weight.grad.float()
    optimizer.step()
    if by_hand:
        with torch.no_grad():
            for master, weight in zip(masters, weights):
                weight.copy_(master)
    if step == 3:
        with torch.no_grad():
            weights[1][0] = 0.5  # the script changes an element itself
            masters[1][0] = 0.5
    assert all(w.dtype is torch.bfloat16 and w.grad.dtype is torch.bfloat16 for w in weights)
    print(loss.item().hex(), flush=True)
print([w.float().sum().item().hex() for w in weights])
print([s["exp_avg"].dtype for s in optimizer.state.values()][0])
"""


WHOLE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        h = self.body(x)
        print("body gives", h.dtype, flush=True)
        return h.square().sum()

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(torch.ones(2, 4))
    loss.backward()
    optimizer.step()
"""


def test_a_root_alone_is_the_whole_model(tmp_path):
    path = script(tmp_path, "train.py", WHOLE)
    fix = "schema_version = 1\n[[prescription]]\napply = true\n[[prescription.change]]\n"
    (tmp_path / "fix.toml").write_text(f'{fix}setting = "module.dtype"\nroot = "Net#0"\nto = "float32"\n')
    done = record(tmp_path, "--strict", "--apply", "fix.toml", "--", *warm(path), run=tmp_path / "run")
    assert done.status == 0, done.err
    assert done.out.decode().splitlines() == ["body gives torch.float32"] * 2
    assert "applied module.dtype float32 (`Net#0`, Net)" in done.said
    outputs = precdoctor.open_run(done.run).tensors(filters=[("kind", "==", "output")])
    assert set(outputs["dtype"]) == {"float32"}


@pytest.mark.slow
def test_master_weights_train_as_if_written_by_hand(tmp_path):
    path = script(tmp_path, "train.py", MASTERS)
    fix = "schema_version = 1\n[[prescription]]\napply = true\n[[prescription.change]]\n"
    (tmp_path / "fix.toml").write_text(f'{fix}setting = "optimizer.master_weights"\nto = "float32"\n')
    ours = record(tmp_path, "--strict", "--apply", "fix.toml", "--", *warm(path), run=tmp_path / "ours")
    theirs = record(tmp_path, "--", *warm(path, "by-hand"), run=tmp_path / "theirs")
    assert ours.status == theirs.status == 0, ours.err + theirs.err
    assert ours.out == theirs.out and b"torch.float32" in ours.out
    assert "applied optimizer.master_weights bfloat16 -> float32 (AdamW)" in ours.said
    updates = precdoctor.open_run(ours.run).tensors(filters=[("kind", "==", "update")])
    assert set(updates["dtype"]) == {"float32"} and updates["unchanged"].sum() == 0


RAISES = """
import torch
from torch import nn

class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        if fails == "at once":
            raise ValueError("at once")
        super().step(closure)
        if fails == "late":
            raise ValueError("late")

fails = ""
net = nn.Linear(4, 4, bias=False).bfloat16()
weight, data = net.weight, net.weight.data
optimizer = Sgd(net.parameters(), lr=0.1)
for step in range(6):
    fails = {1: "at once", 3: "late"}.get(step, "")
    net.zero_grad()
    net(torch.ones(2, 4).bfloat16()).float().square().mean().backward()
    before = weight.detach().clone()
    try:
        optimizer.step()
    except ValueError as error:
        assert str(error) == fails
    assert torch.equal(weight, before) == (fails == "at once")
    assert weight.data_ptr() == data.data_ptr() and weight.grad.dtype is weight.dtype is torch.bfloat16
    print(step, weight.float().sum().item().hex())
"""


def test_a_step_that_raises_gives_the_16_bit_weights_back(tmp_path):
    path = script(tmp_path, "train.py", RAISES)
    fix = "schema_version = 1\n[[prescription]]\napply = true\n[[prescription.change]]\n"
    (tmp_path / "fix.toml").write_text(f'{fix}setting = "optimizer.master_weights"\nto = "float32"\n')
    done = record(tmp_path, "--strict", "--apply", "fix.toml", "--", *warm(path), run=tmp_path / "run")
    assert done.status == 0, done.err
    updates = precdoctor.open_run(done.run).tensors(filters=[("kind", "==", "update")])
    assert set(updates["step"]) >= {0, 2, 4, 5} and set(updates["dtype"]) == {"float32"}


MIXED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8).half(), nn.BatchNorm1d(8)
    def forward(self, x):
        y = self.fc(x.to(self.fc.weight.dtype))
        return self.norm(y.to(self.norm.weight.dtype))

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for _ in range(2):
    net(torch.randn(4, 8)).float().square().mean().backward()
    optimizer.step()
print(*[x.dtype for x in (net.fc.weight, net.norm.weight, net.norm.running_var)])
"""


def test_parts_in_fp32_stay_so_when_the_16_bit_ones_change(tmp_path):
    path = script(tmp_path, "train.py", MIXED)
    fix = "schema_version = 1\n[[prescription]]\napply = true\n[[prescription.change]]\n"
    (tmp_path / "fix.toml").write_text(f'{fix}setting = "module.dtype"\nroot = "Net#0"\nto = "bfloat16"\n')
    done = record(tmp_path, "--strict", "--apply", "fix.toml", "--", *warm(path), run=tmp_path / "run")
    assert done.status == 0, done.err
    assert done.out.decode().split() == ["torch.bfloat16", "torch.float32", "torch.float32"]
