"""Statements of loss code evaluated again from their text: which bad values they come to, and what is left alone."""

import contextlib
import itertools
import linecache
import math
import types

import pytest
import torch

from precdoctor.recording.microscope.frames import Line
from precdoctor.recording.microscope.tracer import External
from precdoctor.recording.microscope.unseen import replay_statements
from precdoctor.recording.variables import Notebook

NAMES = itertools.count()


class _StoppedError(Exception):
    pass


def replay(text, line, function="<module>", **outside):
    """Run a script up to its ``stop()``, note the variables there (or at ``note()``), and evaluate ``line`` again."""
    file = f"/script-{next(NAMES)}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    noted = []
    notebook = Notebook(lambda _x: True)

    def note():
        noted.append(notebook.note())

    def stop():
        note()
        raise _StoppedError

    with contextlib.suppress(_StoppedError):
        exec(compile(text, file, "exec"), {"torch": torch, "math": math, "note": note, "stop": stop, **outside})
    place = noted[-1]
    while place is not None and place.code.co_name != function:
        place = place.caller
    return replay_statements(place, Line(file, line), micro_step=0)


def origin(done):
    found = done.slice()
    record = done.tracer.records[found.origins[0]]
    return record.op, record.line.number


def test_the_statement_itself():
    done = replay("p = torch.tensor([0.0, 1.0])\nstop()\nloss = torch.log(1 - p).sum() + unknown\n", 3)

    assert origin(done) == ("aten.log.default", 3)


def test_the_assignment_of_the_variable_it_reads():
    text = "n = torch.zeros(2)\nw = n / n.sum()\nw = w * 2\nstop()\nloss = unknown * w\n"

    assert origin(replay(text, 5)) == ("aten.div.Tensor", 2)


def test_the_caller_of_a_function_that_was_given_it():
    text = "def f(w):\n    stop()\n    return unknown(w)\nn = torch.zeros(2)\nf(n / n)\n"

    assert origin(replay(text.replace("unknown(w)", "torch.nn.Linear(2, 2)(w)"), 3, "f")) == ("aten.div.Tensor", 5)


@pytest.mark.parametrize(
    "body",
    [
        "    y = x - x.mean()\n    return y / y.norm()\n",
        "    with torch.no_grad():\n        y = torch.zeros_like(x)\n        y += 0\n    return y / y.norm()\n",
        "    y = [x * 0] * 2\n    for z in y:\n        if z[0] == 0:\n            break\n    return z / z[0]\n",
        "    assert len(x) == 3\n    print(x)\n    y, z = x - 1, x.clone()\n    y.mul_(0)\n    return y / y.norm()\n",
    ],
    ids=["assignments", "no_grad", "loops", "in place"],
)
def test_functions_of_the_users_are_followed(body):
    text = f"def f(x):\n{body}x = torch.ones(3)\nstop()\nloss = unknown - f(x)\n"
    done = replay(text, text.count("\n"))

    assert origin(done) == ("aten.div.Tensor", 1 + body.count("\n"))


def test_what_the_statement_throws_away_by_itself_is_no_finding():
    text = "w = torch.tensor([1.0, math.nan])\nstop()\nloss = unknown * torch.where(w.isnan(), torch.ones(2), w)\n"

    assert not replay(text, 3).bad_outputs


def test_what_a_loop_brings_is_data():
    text = "for y in [torch.tensor([math.nan])]:\n    stop()\n    loss = unknown - y\n"

    assert replay(text, 3).named == External("data", "y")


def test_what_a_module_makes_is_no_data():
    net = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(net.weight, math.nan)
    text = "y = net(torch.ones(1)).detach()\nstop()\nloss = unknown - y\n"

    assert replay(text, 3, net=net).named == External("variable", "y")


@pytest.mark.parametrize(
    "call",
    ["touch()", "torch.manual_seed(1)", "torch.rand(1)", "torch.save(y, '/x')", "net(y)", "y.register_hook(touch)"],
)
def test_nothing_of_the_users_runs_and_nothing_is_drawn_or_written(call):
    def touch(*_):
        raise AssertionError("ran")

    text = f"y = torch.tensor([math.nan])\nstop()\nloss = ({call}, unknown - y)\n"
    net = torch.nn.Linear(1, 1)
    before = torch.get_rng_state()
    done = replay(text, 3, touch=types.MethodType(touch, object()), net=net)

    assert not [r for r in done.tracer.records if "rand" in r.op or "addmm" in r.op]
    assert torch.equal(torch.get_rng_state(), before)


def test_in_place_operations_reach_copies_only():
    y = torch.zeros(2)
    done = replay("stop()\nloss = unknown * y.add_(1).log_().sub_(1).log()\n", 2, y=y)

    assert origin(done)[0] == "aten.log.default"
    assert torch.equal(y, torch.zeros(2))
    assert y._version == 0


@pytest.mark.parametrize(("change", "finds"), [("", True), ("    y.zero_()\n", False)], ids=["as it was", "changed"])
def test_a_variable_that_was_written_to_since_is_not_trusted(change, finds):
    text = f"def f():\n    y = torch.zeros(2)\n    note()\n{change}    return y / y\nf()\n"

    assert bool(replay(text, 4 + bool(change), "f").bad_outputs) is finds


def test_noting_leaves_locals_alone():
    """Up to Python 3.12 ``locals()`` gives away the dictionary that a look at the frame fills."""
    seen = {}
    text = "def f():\n    own = locals()\n    y = 1\n    note()\n    return own\nseen.update(f())\n"
    replay(text, 6, seen=seen)

    assert seen == {}


def test_noting_leaves_the_names_of_a_class_body_alone():
    notebook = Notebook(lambda _x: True)

    class Body:
        weight = torch.ones(1)
        notebook.note()
        twice = weight * 2  # a class body's variables are its namespace itself

    assert Body.twice.item() == 2.0
