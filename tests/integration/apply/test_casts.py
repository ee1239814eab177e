"""``module.casts``: what a module computes from cast operands, what autograd gets, and what is counted."""

from __future__ import annotations

import json

import pytest

import precdoctor
from tests.support.processes import record, script, warm

#: Compares the modules with and without casts made by hand, to the bit; and runs into what patching could break.
SCRIPT = """
import copy, torch
from torch import nn

class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.sub, self.act = nn.Linear(8, 8), Twice(8, 8), nn.ReLU(inplace=True)
        self.rnn, self.att = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.out, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        x = self.act(self.sub(self.lin(x)))
        y, _ = self.rnn(x)
        return self.out(self.att(y, y, y)[0])

def half(x):
    return x.to(torch.bfloat16).to(x.dtype)

torch.manual_seed(0)
net = Net()
flat = net.rnn._flat_weights
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(4, 6, 8, requires_grad=True)
    taken, seen = x.detach().clone(), {}
    def keep(module, args, result):
        seen["out"] = result.detach().clone()
        result.register_hook(lambda g: seen.update(grad=g))
    hook = net.lin.register_forward_hook(keep)
    loss = net(x).square().mean()
    hook.remove()
    optimizer.zero_grad()
    loss.backward()
    weight, bias = net.lin.weight.detach(), net.lin.bias.detach()
    want = nn.functional.linear(half(taken), half(weight), bias)
    print("forward", torch.equal(seen["out"], want))
    print("input gradient", torch.equal(x.grad, half(seen["grad"]) @ half(weight)))
    want = half(seen["grad"]).flatten(0, 1).T @ half(taken).flatten(0, 1)
    print("weight gradient", torch.allclose(net.lin.weight.grad, want, rtol=1e-6, atol=0))
    optimizer.step()
print("kept", type(net.lin.weight) is nn.Parameter and net.rnn._flat_weights is flat)
print("grads", all(p.grad is not None for m in (net.lin, net.sub, net.rnn, net.att) for p in m.parameters()))
with torch.no_grad():
    net.eval()(taken)
copy.deepcopy(net)
"""

CASTS = {
    "lin": "weight BF16 none, input BF16 none, grad_output BF16 none",
    "sub": "weight E4M3FN tensor, grad_output E4M3FN none",
    "rnn": "weight E4M3FN tensor, input E4M3FN tensor, grad_output E5M2 tensor",
    "att": "weight MXFP8_E4M3 floor, input MXFP8_E4M3 floor, grad_output MXFP8_E4M3 floor",
    "unused": "weight BF16 none",
    "other": "weight BF16 none",
}


def prescription(casts):
    changes = "".join(
        f'[[prescription.change]]\nsetting = "module.casts"\nroot = "Net#0"\nmodule = "{m}"\nto = "{to}"\n'
        for m, to in casts.items()
    )
    return f'schema_version = 1\n[[prescription]]\ncode = "plan"\napply = true\n{changes}'


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    place = tmp_path_factory.mktemp("casts")
    (place / "fix.toml").write_text(prescription(CASTS))
    path = script(place, "train.py", SCRIPT)
    command = ["--strict", "--every", "1", "--apply", "fix.toml", "--", *warm(path)]
    return record(place, *command)


def events(run, kind):
    found = precdoctor.open_run(run).events()
    rows = found[found["event"] == kind]
    return [(m, d if isinstance(d, dict) else json.loads(d)) for m, d in zip(rows["module"], rows["data"], strict=True)]


def test_products_and_gradients_are_those_of_cast_operands(done):
    assert done.status == 0, done.err
    lines = done.out.decode().split("\n")
    assert lines.count("forward True") == lines.count("input gradient True") == 3
    assert lines.count("weight gradient True") == 3
    assert {"kept True", "grads True"} <= set(lines)


def test_every_change_is_accounted_for(done):
    applied = dict(events(done.run, "applied"))
    assert {m for m, d in applied.items() if d["done"]} == {"lin", "sub", "rnn", "att"}
    assert applied["unused"]["why"].startswith("its forward never ran")
    assert applied["other"]["why"] == "the training has no module of this name"


def test_what_the_casts_did_is_counted_by_operand_and_step(done):
    found = {(m, d["role"], d["name"]): d for m, d in events(done.run, "casts")}
    assert {name for m, role, name in found if (m, role) == ("rnn", "weight")} == {"weight_ih_l0", "weight_hh_l0"}
    assert found["lin", "weight", "weight"]["elements"] == [64, 64, 64]  # evaluation is not counted
    assert found["lin", "input", ""]["steps"] == [0, 1, 2]
    # a subclass that calls the forward of a patched class: cast once
    assert found["sub", "weight", "weight"]["elements"] == [64, 64, 64]
    gradient = found["sub", "grad_output", ""]
    assert gradient["flushed"] == gradient["elements"] != [0, 0, 0]
    assert gradient["noise"] == pytest.approx(gradient["signal"])
    assert found["att", "grad_output", "0"]["format"] == "MXFP8_E4M3"


def test_the_log_holds_what_goes_into_the_casts(done):
    run = precdoctor.open_run(done.run)
    rows = run.tensors()
    mine = rows[(rows["module"] == "sub") & (rows["kind"] == "grad_output")]
    assert (mine["amax"] > 0).all()
    assert run.info["bit_neutral"] is False
