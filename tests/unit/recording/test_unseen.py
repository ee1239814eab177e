"""Statements of loss code evaluated again from their text: which bad values they come to, and what is left alone."""

import contextlib
import itertools
import linecache
import math
import sys
import types
import weakref

import pytest
import torch

from precdoctor.recording.microscope.tracer import External
from precdoctor.recording.microscope.unseen import replay_statements
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.scene.local_variables import Notebook, Variables
from precdoctor.recording.scene.state_restore import DEVICES, Autocast
from precdoctor.recording.scene.step_snapshot import Scene

NAMES = itertools.count()


class _StoppedError(Exception):
    pass


def _stop():
    raise _StoppedError


def replay(text, line, function="<module>", notebook=None, **outside):
    """Run a script up to its ``stop()``, note the variables there (or at ``note()``), and evaluate ``line`` again."""
    file = f"/script-{next(NAMES)}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    noted = []
    notebook = notebook or Notebook(lambda _x: True)

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


def test_a_round_of_a_loop_that_was_not_noted():
    text = (
        "sizes = torch.ones(9)\nsizes[7] = 0.0\nfor pair in range(3):\n    for i in range(9):\n"
        "        if pair == i == 0:\n            note()\n        total = unknown[i] + torch.log(sizes[i])\nstop()\n"
    )
    done = replay(text.replace("stop()", "raise_stop()"), 7, raise_stop=_stop, unknown=[0.0] * 9)

    assert origin(done) == ("aten.log.default", 7)


def test_a_loop_that_trains_is_not_run_again():
    text = (
        "sizes = torch.ones(9)\nsizes[7] = 0.0\nfor i in range(9):\n    if i == 0:\n        note()\n"
        "    total = unknown[i] + torch.log(sizes[i])\n    backward = total.backward\nraise_stop()\n"
    )

    assert not replay(text, 6, raise_stop=_stop, unknown=[torch.zeros((), requires_grad=True)] * 9).bad_outputs


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


class Hostile:
    """An object that must not be looked at."""

    def _ran(self, *_):
        raise AssertionError("ran")

    __class__ = property(_ran)
    __bool__ = __len__ = __iter__ = __float__ = __eq__ = __add__ = __getitem__ = __contains__ = __call__ = _ran
    __hash__ = object.__hash__

    def __getattr__(self, _name):
        self._ran()


class Watched(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_args, **_kwargs):
        raise AssertionError("ran")


@pytest.mark.parametrize(
    "expression",
    [
        *("len(odd)", "float(odd)", "bool(odd)", "sum([odd])", "list(odd)", "odd + y", "odd.weight", "odd()", "y[odd]"),
        *("odd[0]", "(odd, 1) == (odd, 1)", "odd in [1]", "1 if odd else 2", "odd and 1", "isinstance(odd, int)"),
        *("[x for x in odd]", "torch.add(y, odd)", "y.apply_(odd)", "sorted([1, 2], key=odd)", "lazy.weight"),
        *("dict(zip([1], odd))", "watched + 1", "watched.shape", "next(stream)", "[x for x in stream]", "list(pairs)"),
    ],
)
def test_no_code_of_the_users_objects_runs(expression):
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda _name: Hostile()._ran()
    stream, pairs = iter([1, 2]), enumerate([1, 2])
    text = f"y = torch.tensor([math.nan])\nstop()\nloss = ({expression}, unknown - y)\n"
    outside = {"odd": Hostile(), "lazy": lazy, "stream": stream, "pairs": pairs}
    with torch._C.DisableTorchFunction():
        watched = torch.ones(1).as_subclass(Watched)
    done = replay(text, 3, watched=watched, **outside)

    assert done.named is not None or done.bad_outputs
    assert list(stream) == [1, 2]
    assert list(pairs) == [(0, 1), (1, 2)]


def test_running_statistics_stay_as_they_are():
    norm = torch.nn.BatchNorm1d(2, affine=False)
    y = torch.tensor([[math.nan, 1.0], [2.0, 3.0]])
    replay("stop()\nloss = unknown - norm(y)\n", 2, norm=norm, y=y)

    assert torch.equal(norm.running_mean, torch.zeros(2))
    assert norm.num_batches_tracked == 0


def test_distributions_keep_nothing_of_what_was_computed():
    prior = torch.distributions.Categorical(logits=torch.zeros(3))
    done = replay("stop()\nloss = unknown - torch.log(prior.probs * 0)\n", 2, prior=prior)

    assert origin(done)[0] == "aten.log.default"
    assert "probs" not in vars(prior)


def noted(make):
    """The variables of a function that makes ``x`` and is noted then."""
    notebook = Notebook(lambda _x: True)

    def function():
        x = make()
        found = notebook.note()
        return found, x

    return function()


@pytest.mark.parametrize(
    "make", [Hostile, lambda: {Hostile(): 1}, lambda: [Hostile()]], ids=["object", "key", "element"]
)
def test_noting_runs_no_code_of_the_users_objects(make):
    found, _ = noted(make)

    assert found is not None


def test_noting_is_not_seen_by_modes_and_subclasses_of_the_users():
    calls = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, _types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with torch._C.DisableTorchFunction():
        watched = torch.ones(1).as_subclass(Watched)
    plain = torch.ones(1)
    with Mode():
        noted(lambda: [watched, plain])

    assert calls == []


def test_noting_makes_no_node_of_a_view():
    """To ask a view for its ``grad_fn`` after its base was written to makes that node, out of turn."""

    notebook = Notebook(lambda _x: True)

    def number():
        return (torch.ones(1, requires_grad=True) * 1).grad_fn._sequence_nr()

    def function():
        base = torch.zeros(2)
        view = base[0]
        base.mul_(torch.ones(2, requires_grad=True))
        between = number() - number()
        before = number()
        found = notebook.note()
        return found, number() - before, -between, view

    found, made, usual, _ = function()
    assert not {"base", "view"} & set(found.values)
    assert made == usual


def test_the_variables_somebody_else_has_asked_for_are_left_to_them():
    notebook = Notebook(lambda _x: True)

    def own_variables():
        return sys._getframe(1).f_locals

    def function():
        x = torch.ones(1)
        held = own_variables()
        notebook.note()
        return x, held

    x, held = function()
    assert held["x"] is x


def test_nothing_is_kept_alive_by_the_frame():
    notebook = Notebook(lambda _x: False)

    def function():
        x = torch.ones(1)
        gone = weakref.ref(x)
        notebook.note()
        del x
        return gone()

    assert function() is None


def test_code_with_a_dictionary_of_its_own_for_variables():
    """``exec(code, globals, locals)``: names are those of the second."""
    text = "y = torch.zeros(2)\nnote()\nloss = unknown - y / y\n"
    file = f"/script-{next(NAMES)}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    found, notebook = [], Notebook(lambda _x: True)
    outside = {"torch": torch, "y": torch.ones(2), "note": lambda: found.append(notebook.note())}
    with contextlib.suppress(NameError):
        exec(compile(text, file, "exec"), outside, {})
    done = replay_statements(
        next(p for p in chain(found[0]) if p.code.co_filename == file), Line(file, 3), micro_step=0
    )

    assert origin(done) == ("aten.div.Tensor", 3)


def chain(place):
    while place is not None:
        yield place
        place = place.caller


@pytest.mark.parametrize("kind", ["generator", "coroutine", "comprehension"])
def test_frames_of_all_kinds(kind):
    notebook, found = Notebook(lambda _x: True), []

    def generator(x):
        found.append(notebook.note())
        yield x

    async def coroutine(x):
        found.append(notebook.note())
        return x

    def comprehension(x):
        return [found.append(notebook.note()) for _ in (1,)]

    x = torch.ones(1)
    if kind == "generator":
        assert list(generator(x)) == [x]
    elif kind == "coroutine":
        with pytest.raises(StopIteration):
            coroutine(x).send(None)
    else:
        comprehension(x)

    assert found[0] is not None


def test_a_loop_over_one_line_is_noted_now_and_then_and_a_debugger_stops_it():
    notebook = Notebook(lambda _x: True)
    noted_ones = [notebook.note() for _ in range(100)]
    sys.settrace(lambda *_: None)
    try:
        traced = notebook.note()
    finally:
        sys.settrace(None)

    assert [i for i, x in enumerate(noted_ones, 1) if x is not None] == [1, 2, 3, 4, 8, 16, 32, 64]
    assert traced is None


class Teacher(torch.nn.Linear):
    """It counts its calls, as some do."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("training", [False, True])
def test_a_teacher_in_evaluation_is_called_again_and_left_as_it_was(training):
    text = "def f(x):\n    p = torch.softmax(teacher(x) * 1e4, -1)\n    return p * p.log()\n"
    text += "x = torch.eye(3)\nstop()\nloss = unknown - f(x)\n"
    teacher, hooked = Teacher(3, 3).train(training), []
    teacher.register_forward_hook(lambda *_: hooked.append(1))
    done = replay(text, 6, teacher=teacher)

    assert (teacher.calls, hooked) == (0, [])
    assert training or origin(done) == ("aten.log.default", 3)
    assert not training or not done.bad_outputs


def test_a_variable_that_gets_written_to_before_backward_is_copied_from_then_on():
    notebook = Notebook(lambda _x: True)
    kept = torch.ones(2)

    def batch():
        y = torch.ones(2)
        place = notebook.note()
        y.zero_()
        notebook.learn()
        notebook.clear()
        return kept, place

    first, second = batch()[1], batch()[1]
    assert first.values["y"].value.tolist() == [0.0, 0.0]
    assert second.values["y"].value.tolist() == [1.0, 1.0]
    assert second.values["kept"].value is kept


def test_a_variable_of_a_script_that_gets_written_to_is_copied_and_others_are_as_they_will_be():
    text = (
        "for i in range(2):\n    y = torch.zeros(1)\n    w = 1.0\n    note()\n    y.fill_(1.0)\n    learn()\nw = 2.0\n"
        "raise_stop()\nloss = unknown * w * torch.log(y)\n"
    )
    notebook = Notebook(lambda _x: True)
    done = replay(text, 9, raise_stop=_stop, notebook=notebook, learn=lambda: (notebook.learn(), notebook.clear()))

    assert origin(done) == ("aten.log.default", 9)


def test_what_was_noted_goes_when_the_step_goes():
    """A step may end without one ``backward`` that begins at one loss."""
    scene = Scene(types.SimpleNamespace(options=RecordOptions(), when_forked=[], step=0))
    notebook = Notebook(scene.affords_aside)
    scene.when_cleared.append(notebook.clear)

    def function():
        x = torch.ones(1)
        notebook.note()
        return weakref.ref(x)

    gone = function()
    assert gone() is not None
    scene.clear()
    assert gone() is None


@pytest.mark.parametrize(
    ("body", "op", "line"),
    [
        ("y = x.clone()\ny.log_()\n", "aten.log_.default", 3),
        ("y = x * 2\ny /= x.sum()\n", "aten.div_.Tensor", 3),
        ("y = torch.ones(3)\ny[x == 0] = 1 / x[0]\n", "aten.reciprocal.default", 3),
        ("y = torch.ones(3)\ny[0] = torch.log(x[0])\n", "aten.log.default", 3),
        ("y = torch.empty_like(x)\ntorch.log(x, out=y)\n", "aten.log.out", 3),
        ("y = x.clone()\nfor _ in range(2):\n    y.sub_(1).sqrt_()\n", "aten.sqrt_.default", 4),
        ("y = x + 1\nwith torch.no_grad():\n    y.sub_(1)\n    y.reciprocal_()\n", "aten.reciprocal_.default", 5),
        ("def spoil(z, by):\n    z.div_(by)\ny = x + 1\nspoil(y, x)\n", "aten.div_.Tensor", 3),
        ("y = x.clone()\ny.add_(1)\ny = y - 1\ny.log_()\n", "aten.log_.default", 5),
    ],
)
def test_statements_that_write_in_place_are_evaluated_on_copies(body, op, line):
    text = f"x = torch.zeros(3)\n{body}stop()\nloss = unknown - y\n"
    seen = {}
    text = text.replace("stop()", "seen.update(x=x, y=y, versions=(x._version, y._version))\nstop()")
    done = replay(text, text.count("\n"), seen=seen)

    assert origin(done) == (op, line)
    assert (seen["x"]._version, seen["y"]._version) == seen["versions"]
    assert torch.equal(seen["x"], torch.zeros(3))


def test_a_set_of_the_users_is_left_alone():
    names = {"a"}
    text = "def f(z):\n    global names\n    names |= {'b'}\n    return z / z\n"
    text += "y = torch.zeros(1)\nstop()\nloss = unknown - f(y)\n"
    replay(text, 7, names=names)

    assert names == {"a"}


def test_a_dictionary_that_a_comprehension_made():
    text = "x = torch.zeros(2)\ny = {k: v / v for k, v in {'a': x}.items() if k}\nstop()\nloss = unknown - y['a']\n"

    assert origin(replay(text, 4)) == ("aten.div.Tensor", 2)


def test_a_transform_of_a_function_is_not_that_function():
    """``torch.func.grad(f)`` and ``vmap(f)`` have it for their ``__wrapped__``, and compute something else."""
    text = "def f(x):\n    return (x / x).sum()\ng = torch.func.grad(f)\nx = torch.zeros(2)\n"
    text += "stop()\nloss = unknown - g(x)\n"

    assert not replay(text, 6).tracer.records


def test_each_of_the_first_rounds_has_its_own_variables():
    notebook, found = Notebook(lambda _x: True), []
    for x in torch.arange(4.0):
        found.append(inside(notebook, x))

    assert [place.values["x"].value.item() for place in found] == [0.0, 1.0, 2.0, 3.0]


def inside(notebook, x):
    return notebook.note() if x is not None else None


def test_a_new_frame_where_an_old_one_was_has_variables_of_its_own():
    """Both calls of ``middle`` are made from one line, and their frames lie in the same memory."""
    notebook, found = Notebook(lambda _x: True), []

    def innermost(k):
        if k:
            found.append(notebook.note())
        else:
            found.append(notebook.note())

    def middle(k, x):
        innermost(k)
        return x

    for k in (0, 1):
        middle(k, torch.full((1,), float(k)))

    assert [place.caller.values["x"].value.item() for place in found] == [0.0, 1.0]


def test_evaluating_ends_when_its_time_is_up(monkeypatch):
    monkeypatch.setattr("precdoctor.recording.microscope.unseen._SECONDS", -1.0)
    done = replay("y = torch.zeros(2)\nstop()\nloss = unknown - y.exp() / y.cos()\n", 3)

    assert [r.op for r in done.tracer.records] == ["aten.exp.default"]


def test_a_frame_between_two_lines():
    """``f_lineno`` is None at instructions that belong to no line; which those are differs between Pythons."""
    frame = types.SimpleNamespace(f_code=(lambda: 0).__code__, f_lineno=None)
    place = Variables(frame.f_code, frame.f_lineno, {}, {}, None)
    done = replay_statements(place, Line(__file__, place.line), micro_step=0, before={})

    assert done.slice() is None


def test_what_is_looked_at_in_a_hurry_may_have_a_graph():
    y = torch.ones(1, requires_grad=True) * 2

    assert inside(Notebook(lambda _x: True, whole=True), y).values["x"].value is y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_off_whatever_the_device(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("xpu", dtype=dtype), Autocast.off():
        states = {d: torch.is_autocast_enabled(d) for d in DEVICES}

    assert not any(states.values())
    assert {"cpu", "cuda", "xpu"} <= set(states)


def test_what_was_drawn_and_then_written_to_is_drawn_anew_and_no_generator_moves():
    text = "y = torch.rand(2, 3)\ny[1] = 0\ny /= y.sum(1, keepdim=True)\nstop()\nloss = unknown - y\n"
    torch.manual_seed(0)
    torch.rand(2, 3)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    done = replay(text, 5)

    assert origin(done) == ("aten.div_.Tensor", 3)
    assert torch.equal(torch.get_rng_state(), after)


def test_generators_of_the_users_are_left_alone():
    own = torch.Generator().manual_seed(1)
    before = own.get_state()
    text = "y = torch.full((2,), float('nan'))\nstop()\n"
    replay(f"{text}y = torch.rand(2, generator=own)\ny /= 0 * y\nloss = unknown - y\n", 5, own=own)

    assert torch.equal(own.get_state(), before)


@pytest.mark.parametrize(
    "made",
    [
        "far = torch.full((2,), math.inf)",
        "far = torch.full((2,), float('inf')) + given(2)",
        "far = given(torch.full((2,), BIG))",
        "far = torch.zeros(2).masked_fill(torch.ones(2) > 0, -1e999)",
    ],
    ids=["evaluated", "float", "name", "literal"],
)
def test_infinities_that_the_code_wrote_are_no_data(made):
    """``given`` is code that cannot be evaluated."""
    text = f"BIG = -math.inf\n{made}\ndef f(far):\n    stop()\n    return far - far + unknown\nf(far)\n"
    given = torch.nn.Identity()
    given.forward = lambda x: x
    done = replay(text, 5, "f", given=given.forward)

    assert done.named == External("literal", "far")


def test_data_that_holds_infinities_is_data():
    text = "rows = load()\ndef f(x):\n    stop()\n    return unknown * x\nf(rows)\n"
    done = replay(text, 4, "f", load=lambda: torch.full((2,), math.inf))

    assert done.named == External("data", "rows")
