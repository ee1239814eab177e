"""What softmaxes read has rows on sampled steps, with its use; training is what it would have been."""

from __future__ import annotations

import json
import math
import subprocess

import pytest

import precdoctor
from tests.support.processes import ROOT, environment, record, script, warm

MODEL = """
import hashlib, json, math, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

KIND, STEPS = sys.argv[1], 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if KIND == "softmax":
            scores = q @ k.mT / 2 + torch.full((8, 8), torch.finfo(q.dtype).min).triu(1)
            weights = F.dropout(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), 0.1)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return self.out(y.transpose(1, 2).flatten(2))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        if KIND == "choose first":
            best, which = self.gate(x).topk(2, -1)
            weights = best.softmax(-1)
        else:
            weights, which = self.gate(x).softmax(-1).topk(2, -1)
        return (weights.unsqueeze(-1) * self.experts[which]).sum(-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.attention = nn.Embedding(32, 16), nn.LayerNorm(16), Attention()
        if KIND == "module":
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.router, self.head = Router(), nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        if KIND == "module":
            y = self.attention(x, x, x)[0]
        elif KIND == "checkpoint":
            y = checkpoint(self.attention, x, use_reentrant=False)
        else:
            y = self.attention(x)
        return self.head(x + y + self.router(x))


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        y = self.norm(x)
        return torch.softmax(y @ y.mT, -1) @ y


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
mix, graphs = hashlib.sha256(), []


def compiler(graph, _):
    graphs.append(len(graphs))
    return graph.forward


called = torch.compile(model, backend=compiler) if KIND == "compiled" else model
if KIND == "fx":
    called = nn.Sequential(model.embedding, torch.fx.symbolic_trace(Mix()), model.head)
if KIND == "parallel":
    called = nn.DataParallel(model)
for step in range(STEPS):
    tokens = torch.randint(32, (2, 9))
    with torch.autocast("cpu", torch.bfloat16, enabled=KIND == "autocast"):
        if KIND == "mode":
            with Counting():
                logits = called(tokens[:, :-1])
        else:
            logits = called(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    if KIND == "functional":
        loss = loss + torch.func.grad(lambda w: (w * 2).softmax(-1).square().sum())(torch.ones(3)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mix.update(loss.item().hex().encode())
for value in model.state_dict().values():
    mix.update(value.numpy().tobytes())
print(json.dumps([mix.hexdigest(), torch.rand(1).item(), len(graphs), torch._C._len_torch_dispatch_stack()]))
"""
#: Every softmax of a step: module, function and use.
ATTENTION = ("attention", "sdpa", "attention")
ROUTER, OUTPUT = ("router", "softmax", "router"), ("", "cross_entropy", "output")


def trained(folder, kind, every=1):
    """The rows of kind logits, what the recorded script printed, and what it prints by itself."""
    path = script(folder, "train.py", MODEL)
    done = record(folder, "--every", str(every), "--", *warm(path, kind), run=folder / "run")
    assert done.status == 0, done.err
    command = warm(path, kind)
    plain = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment())
    run = precdoctor.open_run(done.run)
    events = run.events()
    assert events[events["event"] == "error"].empty
    return run.tensors(filters=[("kind", "==", "logits")]), json.loads(done.out), json.loads(plain.stdout)


def found(rows, step):
    rows = rows[rows["step"] == step].sort_values("order")
    return list(zip(rows["module"], rows["name"], rows["role"], strict=True))


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("fused", ATTENTION),
        pytest.param("softmax", ("attention", "softmax", "attention"), marks=pytest.mark.slow),
        ("module", ("attention", "softmax", "attention")),
        ("choose first", ATTENTION),
        pytest.param("autocast", ATTENTION, marks=pytest.mark.slow),
        ("checkpoint", ATTENTION),
        ("functional", ATTENTION),
        pytest.param("parallel", ATTENTION, marks=pytest.mark.slow),
    ],
)
def test_each_softmax_has_one_row_with_its_use(tmp_path, kind, attention):
    rows, recorded, plain = trained(tmp_path, kind)
    assert recorded == plain
    rows = rows[rows["role"].notna()]  # what torch.func runs has a row as well, and no known use
    for step in range(4):
        assert found(rows, step) == [attention, ROUTER, OUTPUT]
    own = rows[rows["role"] == "attention"].iloc[0]
    assert len(own["head_max"]) == len(own["head_entropy"]) == 4
    assert all(0.0 < share <= 1.0 for share in own["head_entropy"])
    assert own["amax"] < 100 and max(own["head_max"]) <= own["amax"] * (1 + 1e-6)
    assert own["nan"] == own["pos_inf"] == own["neg_inf"] == 0
    last = rows[rows["role"] == "output"].iloc[0]
    assert last["root"] == "" and last["numel"] == 16 * 32 and 0.0 < last["entropy"] <= math.log(32)


def test_the_softmax_of_a_graph_made_by_fx_has_a_row(tmp_path):
    rows, recorded, plain = trained(tmp_path, "fx")
    assert recorded == plain
    assert found(rows, 0) == [("1", "softmax", "attention"), OUTPUT]


def test_there_are_rows_on_sampled_steps_only(tmp_path):
    rows, recorded, plain = trained(tmp_path, "fused", every=2)
    assert recorded == plain and set(rows["step"]) == {0, 2}


def test_under_a_mode_of_the_scripts_own_there_are_no_rows(tmp_path):
    rows, recorded, plain = trained(tmp_path, "mode")
    assert recorded[:2] == plain[:2] and recorded[-1] == 0
    assert rows.empty


def test_compiled_code_is_left_alone(tmp_path):
    rows, recorded, plain = trained(tmp_path, "compiled")
    assert recorded == plain and recorded[2] > 0
    assert rows.empty


SCANNED = """
import hashlib, sys
import torch
import torch.nn.functional as F
from torch import nn

import precdoctor
from precdoctor.runlog.schema import KINDS


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        weights = torch.einsum("bd,bnd->bn", self.query(x[:, 0]), self.key(x)).softmax(-1)
        return self.head((weights.unsqueeze(-1) * x).sum(1))


def train():
    torch.manual_seed(0)
    model, encoder = Reader(), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*model.parameters(), *encoder.parameters()], 0.1)
    for _ in range(4):
        loss = F.cross_entropy(model(encoder(torch.randn(4, 5, 8))), torch.randint(4, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mix = hashlib.sha256()
    for value in model.state_dict().values():
        mix.update(value.numpy().tobytes())
    return mix.hexdigest()


kinds = {"all": (), "others": tuple(k for k in KINDS if k != "logits")}
for name, taken in kinds.items():
    with precdoctor.record(name, every=1, strict=True, deep_scan=2, kinds=taken):
        print(train())
print(train())
"""


def scans(run):
    """What each deep scan said of its step, its time aside, and the steps."""
    events = run.events()
    events = events[events["event"] == "scan"]
    told = [json.loads(d) | {"spent_ns": 0} for d in events["data"]]
    return sorted(json.dumps(d, sort_keys=True) for d in told), {s for s, d in zip(events["step"], told, strict=True)}


def test_on_a_scanned_step_there_are_rows_and_the_scan_sees_the_users_ops_alone(tmp_path):
    done = subprocess.run(
        warm(script(tmp_path, "scanned.py", SCANNED)), capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert len(set(done.stdout.split())) == 1
    both, alone = precdoctor.open_run(tmp_path / "all"), precdoctor.open_run(tmp_path / "others")
    rows = both.tensors(filters=[("kind", "==", "logits")])
    (said, steps), (expected, _) = scans(both), scans(alone)
    assert any(json.loads(d).get("outcome") == "done" and json.loads(d)["ops"] > 0 for d in said)
    assert said == expected
    assert alone.tensors(filters=[("kind", "==", "logits")]).empty
    for step in steps:
        assert found(rows, step) == [("", "softmax", "attention"), ("", "cross_entropy", "output")]


AUGMENTED = """
import torch
import precdoctor
from torch import nn

depths = []


class Augment(nn.Module):
    def forward(self, x):
        depths.append(torch._C._len_torch_dispatch_stack())
        return x + torch.rand_like(x)


augment, model = Augment(), nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with precdoctor.record("run", every=1, deep_scan=6):
    for _ in range(12):
        with torch.no_grad():
            x = augment(torch.ones(2, 4))
        optimizer.zero_grad()
        model(x).softmax(-1).square().sum().backward()
        optimizer.step()
print(len(depths), max(depths))
"""


def test_no_mode_lies_over_modules_that_are_called_without_gradients(tmp_path):
    """Augmentation may take other paths under any mode, with other roundings."""
    path = script(tmp_path, "augmented.py", AUGMENTED)
    done = subprocess.run(
        warm(path),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    assert done.stdout.split() == ["12", "0"]
