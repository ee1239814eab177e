"""Loss code evaluated from the outermost text inwards: what modules gave stands for them, variables are made again."""

import itertools
import linecache
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from precdoctor.recording.microscope.outward import aims, replay_outward
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.ops.tensor_facts import NAN
from precdoctor.recording.scene.local_variables import Notebook
from precdoctor.recording.scene.loss_graph import LossGraph

NAMES = itertools.count()
SOFTMIN = """
def softmin(values):
    z = torch.stack(values, -1)
    top = z.max(-1, keepdim=True).values
    note()
    return -torch.exp(z - top).sum(-1).log()
"""


def script(text, output, value=math.nan, **outside):
    """Runs a script whose ``model`` gives ``output`` at line 2, and evaluates what came to its loss until that is bad.

    Returns:
        The names of the aims and the replay of the last.
    """
    file = f"/outward-{next(NAMES)}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    notebook, noted, model = Notebook(lambda _x: True), [], nn.Identity()
    model.forward = lambda *_: output * torch.ones(1, requires_grad=True)

    def note():
        noted.append(notebook.note())

    exec(compile(text, file, "exec"), {"torch": torch, "math": math, "note": note, "model": model, **outside})
    call = SimpleNamespace(module=model, micro_step=0, outputs=[("", output, output._version)], root="Model#0")
    call.line = Line(file, 2)
    graph = LossGraph(0, None, torch.tensor(value), None)
    inner, names, done = noted[-1].caller, [], None  # not the helper itself
    for aim in aims([(inner, Line(file, inner.line))], inner):
        names.append(aim.at.code.co_name)
        done = replay_outward(aim, [call], graph)
        if done.bad_outputs:
            break
    return names, done


def origin(done):
    record = done.tracer.records[done.slice().origins[0]]
    return record.op, record.line.number


def test_functions_that_are_over_are_followed_from_their_caller():
    text = f"\nout = model(torch.rand(2))\nfar = torch.full((2,), -math.inf)\n{SOFTMIN}\n"
    text += "cost = out * 2 + far\nloss = softmin([cost, far]).mean()\nloss.backward()\n"
    names, done = script(text, torch.ones(2))

    assert names == ["softmin", "<module>"]
    first = next(r for r in done.tracer.records if r.bad_out & NAN)
    assert (first.op, first.line.number) == ("aten.sub.Tensor", 9)
    assert done.slice().made_worse(done.tracer.records)
    assert done.equal == done.compared == 1


def test_what_backward_was_called_of_is_an_aim_of_its_own():
    text = "scaler = None\nout = model(0)\nratio = out / out\nloss = ratio.sum()\nloss = loss * 2\n"
    text += "def step():\n    note()\n"
    text += "if scaler is not None:\n    scaler.scale(loss).backward()\nloss.backward()\nstep()\n"
    names, done = script(text, torch.zeros(2))

    assert names == ["step", "<module>", "<module>"]
    assert origin(done) == ("aten.div.Tensor", 3)


def test_autocast_around_the_code_is_entered_again():
    text = "with torch.autocast('cpu', dtype=torch.float16):\n    out = model(0)\n"
    text += "    loss = (out @ out.T).sum()\n    note()\nloss.backward()\nnote()\n"
    _, done = script(text, torch.full((2, 2), 1e4), math.inf)

    assert origin(done)[0] == "aten.mm.default"


@pytest.mark.parametrize("value", [1.0, math.inf], ids=["finite", "infinite"])
def test_what_comes_to_something_else_than_in_the_run_is_no_answer(value):
    text = "\nout = model(0)\nloss = (out / out).sum()\nnote()\n"
    _, done = script(text, torch.zeros(2), value)

    assert not done.bad_outputs


def test_what_draws_random_numbers_is_no_answer():
    text = "\nout = model(0)\nnoise = torch.randn(2, requires_grad=True) * 0\nloss = (out / noise).sum()\nnote()\n"
    state = torch.get_rng_state()
    _, done = script(text, torch.zeros(2))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(2)

    assert torch.equal(after, torch.get_rng_state()), "the script has drawn, and nobody else"
    assert not done.bad_outputs
