"""When casts to float8 are looked at, and that nothing of it outlives the call it was opened for."""

from __future__ import annotations

import json
import subprocess

import pytest

import precdoctor
from tests.support.processes import PATIENCE, ROOT, environment, warm

MODEL = """
import json, sys, torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
import precdoctor
from precdoctor.recording.fp8 import cast_observer as observer, fp8_mode as mode

opened = []
enter = mode.CastMode.__enter__
mode.CastMode.__enter__ = lambda self: (opened.append(self), enter(self))[1]

class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    @staticmethod
    def backward(ctx, g):
        return (g * ctx.scale).to(torch.float8_e5m2).float() / ctx.scale, None

class Layer(nn.Module):
    def __init__(self, narrow):
        super().__init__()
        self.linear, self.narrow = nn.Linear(8, 8), narrow
        self.register_buffer("scale", torch.tensor(64.0))
    def forward(self, x):
        x = Narrow.apply(x, self.scale) if self.narrow else x
        y = self.linear(x)  # a module inside, that does not cast
        if self.training and getattr(self, "fails", False):
            raise self.fails
        return torch.tanh(y)

def train(steps, narrow=True, failing=(), error=ValueError, around=None):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(narrow), Layer(narrow))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        if step in failing:
            model[1].fails = error("the user's own")
            try:
                model(torch.zeros(4, 8))
            except error:
                pass
            model[1].fails = False
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # a scan stays open from step end to step end
        assert all(type(m).__name__ == "ScanMode" for m in _get_current_dispatch_mode_stack())
        optimizer.step()
        losses.append(loss.item())
    return losses
"""


def run(tmp_path, code):
    """What the script says as JSON on its last line."""
    script = tmp_path / "script.py"
    script.write_text(MODEL + code)
    done = subprocess.run(
        warm(script),
        env=environment(PYTHONPATH=str(ROOT)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_opened_without_float8_and_only_what_casts_with_it(tmp_path):
    told = run(
        tmp_path,
        """
plain, wide = train(4), train(4, narrow=False)
with precdoctor.record("wide", every=1, strict=True):
    same = train(4, narrow=False) == wide
without = len(opened)
with precdoctor.record("narrow", every=2, strict=True):
    same = same and train(4) == plain
print(json.dumps([same, without, len(opened)]))
""",
    )
    # Sampled are steps 0 and 2. In the first of them the first layer's cast is what tells; the second layer's mode is
    # closed for the linear inside and opened again. One more for each backward pass.
    assert told == [True, 0, (2 + 1) + (4 + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
def test_calls_that_fail_leave_nothing_behind(tmp_path, error):
    told = run(
        tmp_path,
        f"""
plain = train(4, failing=(1, 2), error={error})
with precdoctor.record("run", every=1, strict=True):
    same = train(4, failing=(1, 2), error={error}) == plain
print(json.dumps([same, len(_get_current_dispatch_mode_stack())]))
""",
    )
    assert told == [True, 0]


@pytest.mark.slow
def test_an_internal_error_turns_it_off_and_closes_what_is_open(tmp_path):
    told = run(
        tmp_path,
        """
plain = train(4)
measure, calls = observer.measure, []
def broken(*given):
    calls.append(given)
    if len(calls) > 4:  # behind the first step: before it there is no log
        raise RuntimeError("ours")
    return measure(*given)
observer.measure = broken
with precdoctor.record("run", every=1):
    same = train(4) == plain
print(json.dumps([same, len(_get_current_dispatch_mode_stack())]))
""",
    )
    assert told == [True, 0]
    errors = precdoctor.open_run(tmp_path / "run").events()
    assert (errors["event"] == "error").sum() == 3


def test_modes_of_the_users_own_stay_in_their_places(tmp_path):
    told = run(
        tmp_path,
        """
class Counting(TorchDispatchMode):
    seen = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counting.seen += 1
        return func(*args, **(kwargs or {}))

def counted(narrow):
    Counting.seen = 0
    with Counting():
        torch.manual_seed(0)
        model = nn.Sequential(Layer(narrow), Layer(narrow))
        for _ in range(2):
            model(torch.randn(16, 8)).square().mean().backward()
    return Counting.seen, float(model[0].linear.weight.grad.sum())

class Leaving(Layer):
    '''Opens a mode in its forward and closes it in the next one.'''
    left = None
    def forward(self, x):
        with Counting():  # around a module inside
            y = super().forward(x)
        if Leaving.left is not None:
            Leaving.left.__exit__(None, None, None)
        Leaving.left = None if Leaving.left is not None else Counting().__enter__()
        return y

def leaving():
    torch.manual_seed(0)
    model = nn.Sequential(Leaving(True), nn.Linear(8, 8), Leaving(True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(model[0].linear.weight.sum()), len(_get_current_dispatch_mode_stack())

plain = counted(True), counted(False), leaving()
with precdoctor.record("run", every=1, strict=True):
    recorded = counted(True), counted(False), leaving()
print(json.dumps([plain, recorded]))
""",
    )
    (narrow, wide, left), (narrow_recorded, wide_recorded, left_recorded) = told
    assert narrow[1] == narrow_recorded[1] and left == left_recorded and left[1] == 0
    # Whatever the recorder adds for other reasons, looking at casts adds no op that a mode of the user's can see.
    assert narrow_recorded[0] - narrow[0] == wide_recorded[0] - wide[0]
