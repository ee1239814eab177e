"""Code between the backward pass and the optimizer, evaluated from its text: which op made a gradient bad."""

import contextlib
import itertools
import linecache

import pytest
import torch
from torch import nn

from precdoctor.recording.microscope.unseen import replay_statements
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.scene.local_variables import Notebook

NAMES = itertools.count()


class _SteppedError(Exception):
    pass


class Run:
    """A script that has come to ``step()``, and what its backward pass left, where that is known."""

    def __init__(self, text, known=False, **outside):
        self.file = f"/by-hand-{next(NAMES)}.py"
        linecache.cache[self.file] = (len(text), None, text.splitlines(keepends=True), self.file)
        self.net = nn.Linear(2, 1, bias=False)
        self.before = {self.net.weight: torch.zeros(1, 2)} if known else {}
        self.places = []
        outside = {"torch": torch, "net": self.net, "step": self.step, "backward": self.backward, **outside}
        with contextlib.suppress(_SteppedError):
            exec(compile(text, self.file, "exec"), outside)
        self.grad = self.net.weight.grad

    def backward(self):
        self.net.weight.grad = torch.zeros(1, 2)

    def step(self):
        self.places.append(Notebook(lambda _x: True, whole=True).note())
        raise _SteppedError

    def again(self, function="<module>"):
        place = self.places[0]
        while place is not None and (place.code.co_filename, place.code.co_name) != (self.file, function):
            place = place.caller
        return replay_statements(place, Line(self.file, place.line), micro_step=0, before=self.before)


def origins(done):
    found = done.slice()
    return [(done.tracer.records[i].op, done.tracer.records[i].line.number) for i in found.origins] if found else []


BACKWARD = "backward()\n"
LOOP = "for p in net.parameters():\n"


@pytest.mark.parametrize(
    ("text", "op", "line"),
    [
        (f"{LOOP}    p.grad.div_(p.grad.norm())\n", "aten.div_.Tensor", 4),
        (f"{LOOP}    p.grad = p.grad / p.grad.norm()\n", "aten.div.Tensor", 4),
        (f"{LOOP}    p.grad /= p.grad.norm()\n", "aten.div_.Tensor", 4),
        ((f"gs = [p.grad for p in net.parameters()]\n{LOOP.replace('p', 'g', 1).replace('net.parameters()', 'gs')}"
         "    g.div_(g.norm())\n"), "aten.div_.Tensor", 5),
        (("for n, p in net.named_parameters():\n    if p.grad is not None and 'bias' not in n:\n"
         "        p.grad.mul_(1 / p.grad.sum())\n"), "aten.reciprocal.default", 5),
    ],
    ids=["in place", "assigned", "augmented", "by another name", "with conditions"],
)  # fmt: skip
def test_gradients_that_are_changed_after_the_backward_pass(text, op, line):
    run = Run(f"x = 1\n{BACKWARD}{text}step()\n", known=True)
    done = run.again()

    assert origins(done)[0] == (op, line)
    assert torch.isnan(run.grad).any()
    assert (done.compared, done.equal) == (1, 1)


def test_a_helper_that_changes_them():
    text = f"def normalise(params):\n    for p in params:\n        p.grad = p.grad / p.grad.norm()\n{BACKWARD}"
    run = Run(f"{text}normalise(net.parameters())\nstep()\n", known=True)

    assert origins(run.again()) == [("aten.div.Tensor", 3)]


def test_the_function_that_makes_them_sample_by_sample():
    text = "def clip(gs):\n    total = 0\n    for g in gs:\n        total = total + g * (1.0 / g.norm())\n"
    text += "    return total + torch.randn_like(total)\n"
    text += "gs = [torch.zeros(1, 2), torch.ones(1, 2)]\nclipped = clip(gs)\n"
    text += f"{LOOP}    p.grad = clipped / 2\nstep()\n"

    assert origins(Run(text).again())[0] == ("aten.reciprocal.default", 4)


@pytest.mark.parametrize(
    ("f", "line", "op"),
    [("    return torch.sqrt(w.sum() - x)\n", 2, "aten.sqrt.default"),
     ("    y = (w * x).square().sum()\n    return torch.sqrt(y)\n", 3, None)],
    ids=["forward", "backward"],
)  # fmt: skip
def test_a_function_that_is_transformed(f, line, op):
    text = f"def f(w, x):\n{f}net.weight.data.zero_()\nx = torch.ones(3)\n"
    text += "g = torch.func.vmap(torch.func.grad(f), in_dims=(None, 0))(net.weight.detach(), x)\n"
    text += "net.weight.grad = g.mean(0)\nstep()\n"
    done = Run(text).again()
    record = done.tracer.records[done.slice().origins[0]]

    assert record.line.number == line
    assert record.index in done.tracer.transformed
    assert record.phase == ("backward" if op is None else "forward")
    assert op in {None, record.op}


def test_nothing_of_the_users_is_touched():
    text = f"seen = []\nx = torch.ones(2)\n{BACKWARD}{LOOP}    p.grad.div_(p.grad.norm())\n    p.data.add_(1)\n"
    run = Run(f"{text}    x.add_(1)\n    seen.append(p)\nbefore = torch.get_rng_state()\nstep()\n", known=True)
    weight, state, version = run.net.weight.clone(), torch.get_rng_state(), run.net.weight._version
    values = run.places[0].globals if run.places[0].code.co_name == "<module>" else run.places[0].caller.globals
    run.again()

    assert torch.equal(run.net.weight, weight)
    assert run.net.weight._version == version
    assert torch.equal(values["x"], torch.full((2,), 2.0))
    assert len(values["seen"]) == 1
    assert run.net.weight.grad is run.grad
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(next(iter(run.before.values())), torch.zeros(1, 2))


def test_finite_gradients_come_of_nothing():
    run = Run(f"{BACKWARD}{LOOP}    p.grad.add_(1)\nstep()\n", known=True)

    assert run.again().slice() is None


def test_a_model_that_lists_its_weights_by_itself_is_left_alone():
    class Odd(nn.Linear):
        def named_parameters(self, *args, **kwargs):
            raise AssertionError("ran")

    odd = Odd(2, 1)
    text = f"{BACKWARD}for p in odd.parameters() if False else []:\n    p.grad = p.grad / 0\n"
    run = Run(f"{text}for p in listing(odd):\n    p.grad = p.grad\nstep()\n", odd=odd, listing=lambda _m: [])
    done = run.again()

    assert done.slice() is None
