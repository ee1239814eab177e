"""What hooks cost, counted: functions of ours that run for a further module, on sampled steps and between them."""

from __future__ import annotations

import json
import subprocess

import pytest

import precdoctor
from tests.support.processes import PATIENCE, ROOT, environment, record, script, warm

#: With every 8th step sampled, and no power of two: those have a scan of single operations.
SAMPLED = 24
#: Layers of the two stacks that are compared.
FEW, MANY = 30, 120
#: Functions of ours that may run in a step between samples, whatever the model's size.
MOST_BETWEEN = 149

COUNTS = """
import json, sys
import torch
from torch import nn

LAYERS, SAMPLED, OURS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STEPS = {"sampled": SAMPLED, "between": SAMPLED + 1, "instructions": SAMPLED + 2}


def counted(layers):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    optimizer = torch.optim.AdamW(net.parameters())
    calls = dict.fromkeys(STEPS.values(), 0)

    def train():
        loss = net(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def note(frame, event, _arg):
        calls[step] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    def count(_frame, event, _arg):
        calls[step] += event == "opcode"
        return count

    def follow(frame, _event, _arg):
        frame.f_trace_opcodes = frame.f_code.co_filename.startswith(OURS)
        return count if frame.f_trace_opcodes else None

    for step in range(max(calls) + 1):
        sys.setprofile(note if step in calls and step != STEPS["instructions"] else None)
        sys.settrace(follow if step == STEPS["instructions"] else None)
        train()
        sys.setprofile(None)
        sys.settrace(None)
    return {name: calls[step] for name, step in STEPS.items()}


found = counted(LAYERS)
print(json.dumps({**found, "loaded": [m for m in ("numpy.ma", "pandas", "pyarrow.compute") if m in sys.modules]}))
"""


@pytest.fixture(scope="module")
def per_module(tmp_path_factory):
    """Of each module added to a stack: functions of ours that ran in a step, and tensors rows of the sampled one."""
    folder = tmp_path_factory.mktemp("cost")
    path = script(folder, "counts.py", COUNTS)
    counts = []
    for layers in (FEW, MANY):
        command = warm(path, layers, SAMPLED, ROOT / "precdoctor")
        done = record(folder, "--every", "8", "--", *command, run=folder / f"run{layers}")
        assert done.status == 0, done.err
        rows = (precdoctor.open_run(done.run).tensors(columns=["step"])["step"] == SAMPLED).sum()
        found = json.loads(done.out)
        assert found.pop("loaded") == [], "what the thread that writes has no need of, and what takes long to load"
        counts.append({**found, "rows": int(rows)})
    fewer, more = counts
    assert more["instructions"] > 1000, "they were counted"
    return {"calls between": more["between"], **{n: (more[n] - fewer[n]) / (MANY - FEW) for n in fewer}}


def test_between_samples_a_module_costs_no_instruction_of_ours(per_module):
    """No hook of ours lies on inner modules or parameters, and functions of C look at the gradients."""
    assert per_module["between"] == per_module["instructions"] == 0


def test_between_samples_a_step_costs_few_calls(per_module):
    """What that takes in time is in ``benchmarks/results/cpu.md``: about 1 us a call."""
    assert per_module["calls between"] <= MOST_BETWEEN


def test_a_row_costs_few_calls(per_module):
    assert per_module["rows"] >= 10
    assert per_module["sampled"] / per_module["rows"] <= 30


BETWEEN = """
import json
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.c(checkpoint(self.a, self.b(x), use_reentrant=False))


def train(steps):
    for _ in range(steps):
        net(torch.randn(4, 8)).square().mean().backward()
        hooks.append(sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()))
        optimizer.step()
        optimizer.zero_grad()


net, hooks = Net(), []
optimizer = torch.optim.AdamW(net.parameters())
train(18)
print(json.dumps({"hooks": hooks}))
"""


@pytest.fixture(scope="module")
def between(tmp_path_factory):
    """What a training with checkpoints prints, and autocast inside its forward; its steps."""
    folder = tmp_path_factory.mktemp("between")
    done = record(folder, "--every", "4", "--", *warm(script(folder, "between.py", BETWEEN)))
    assert done.status == 0, done.err
    return json.loads(done.out), precdoctor.open_run(done.run).steps()


def test_parameters_have_hooks_in_sampled_steps_only(between):
    printed, steps = between
    assert [count > 0 for count in printed["hooks"]] == steps["sampled"].tolist()


def test_autocast_inside_the_model_is_logged_between_samples(between):
    assert set(between[1]["autocast_dtype"]) == {"bfloat16"}


COMPILED = """
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.inner = torch.compile(self.inner, backend="aot_eager")

    def forward(self, x):
        return self.inner(self.first(x))


def clip(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def graphs(net, loss, clip=list):
    optimizer, seen = torch.optim.AdamW(net.parameters()), []
    for _ in range(10):
        loss(net(torch.randn(4, 8))).backward()
        clip(list(net.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(counters["stats"]["unique_graphs"])
    return seen


def squares(y):
    return y.square().mean()


if sys.argv[1] == "model":
    found = graphs(torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="aot_eager"), squares)
elif sys.argv[1] == "part":
    found = graphs(Around(), squares)
elif sys.argv[1] == "clip":
    found = graphs(nn.Linear(8, 8), squares, torch.compile(clip, backend="aot_eager", fullgraph=True))
else:
    found = graphs(nn.Linear(8, 8), torch.compile(squares, backend="aot_eager"))
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "what", ["loss", *(pytest.param(w, marks=pytest.mark.slow) for w in ("model", "part", "clip"))]
)
def test_recording_compiles_nothing_again(what, tmp_path, monkeypatch):
    """Neither where sampled steps and others take turns, nor at first."""
    monkeypatch.setenv("QUICK_TORCH", "")  # the compiler, and its counters, from the beginning
    path = script(tmp_path, "compiled.py", COMPILED)
    plain = subprocess.run(warm(path, what), env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert plain.returncode == 0, plain.stderr
    done = record(tmp_path, "--every", "4", "--", *warm(path, what))
    assert done.status == 0, done.err
    assert precdoctor.open_run(done.run).steps()["sampled"].sum() == 3
    assert json.loads(done.out) == json.loads(plain.stdout) and json.loads(done.out)[0] >= 1
