"""What is kept of the loss code's graph: how much of it, and when more."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.scene.loss_code import LossCode, _Walk, is_bad
from precdoctor.recording.scene.loss_graph import LossGraph, LossNode

NOTE = "precdoctor\0\0007\0train.py"
SCENE = SimpleNamespace(calls=[], affords=lambda _x: True)


def chain(length):
    """A loss of so many nodes, each with a note of ours."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(length):
        x = x * 2.0
        x.grad_fn.metadata["traceback_"] = [NOTE]
    return x


@pytest.mark.parametrize(("limit", "kept", "cut"), [(10, 10, True), (50, 50, False)])
def test_the_nodes_nearest_the_loss_are_kept_up_to_a_limit(limit, kept, cut):
    walk = _Walk(SCENE, {}, limit)
    loss = chain(50)
    top = walk.node(loss.grad_fn)

    assert (walk.count, walk.cut) == (kept, cut)
    node, lines = LossGraph(0, top, loss.detach(), None).top, []
    while isinstance(node, LossNode):
        lines.append(node.line)
        node = node.edges[0][0] if node.edges else None
    assert lines == [Line("train.py", 7)] * kept


@pytest.mark.parametrize(
    ("loss", "bad"),
    [
        (torch.tensor(1.0), False),
        (torch.tensor(torch.nan), True),
        (torch.tensor([torch.inf], dtype=torch.float16), True),
        (torch.tensor([1.0, torch.nan]), False),
        (torch.tensor(torch.nan, device="meta"), False),
    ],
    ids=["finite", "NaN", "one element", "several", "on a device"],
)
def test_a_loss_is_known_to_be_bad_without_waiting_for_a_device(loss, bad):
    assert is_bad(loss) is bad


def test_whether_a_loss_of_a_transform_is_bad_is_not_known():
    seen = []

    def loss(x):
        y = x.log().sum()
        seen.append(is_bad(y))
        return y

    torch.func.grad(loss)(torch.zeros(1))

    assert seen == [False]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad, *_):
        return grad * ctx.factor, None


class Halved(Scaled):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0, x / 2.0


def noted(x):
    x.grad_fn.metadata["traceback_"] = [NOTE]
    return _Walk(SCENE, {}, 50).node(x.grad_fn)


def test_of_a_function_of_the_users_own_what_its_backward_needs_is_kept():
    x = torch.ones(2, requires_grad=True)
    own = noted(Scaled.apply(x * 1.0, 3.0)).saved["own"]

    assert own.backward is Scaled.backward
    assert torch.equal(own.saved[0], x) and own.saved[0].grad_fn is None
    assert own.attributes == {"factor": 3.0}
    assert (own.needs_input_grad, own.places) == ((True, False), (0,))


def test_not_of_one_with_several_results_nor_of_torchs_own():
    x = torch.ones(2, requires_grad=True)
    halves, _ = Halved.apply(x * 1.0)
    again = checkpoint(lambda y: y * 2.0, x * 1.0, use_reentrant=True)

    assert noted(halves).saved == noted(again).saved == {"own": None}


def test_a_graph_is_bare_where_no_module_has_a_part_in_it():
    walk = _Walk(SCENE, {}, 50)
    walk.node(chain(5).grad_fn)
    assert walk.is_bare and len(walk.weights) == 1

    foreign = chain(5) + torch.ones(2, requires_grad=True).exp()
    foreign.grad_fn.metadata["traceback_"] = [NOTE]
    walk = _Walk(SCENE, {}, 50)
    walk.node(foreign.grad_fn)
    assert not walk.is_bare, "some of it was made while nothing was noted, by a module perhaps"

    inner = chain(1)
    made = {"": (inner.grad_fn._sequence_nr(), 0)}
    call = SimpleNamespace(makers=made, parametric=True, root="Net#0", outputs=[])
    outer = inner * 2.0
    outer.grad_fn.metadata["traceback_"] = [NOTE]
    walk = _Walk(SimpleNamespace(calls=[call], affords=lambda _x: True), {}, 50)
    walk.node((outer * chain(1)).grad_fn)
    assert not walk.is_bare


def loss_code():
    found = LossCode.__new__(LossCode)
    found._open, found._context, found.bare = False, SimpleNamespace(trace=None, state="armed"), True
    return found


def test_the_users_own_look_for_anomalies_is_neither_answered_nor_ended():
    ours = loss_code()
    try:
        ours.open()
        assert ours._is_noting()
        torch.autograd.set_detect_anomaly(True)
        assert not ours._is_noting(), "the user is to read of a traceback"
        ours.close()
        assert torch.is_anomaly_check_nan_enabled()
    finally:
        torch.set_anomaly_enabled(False, False)


def test_nothing_is_noted_once_recording_is_over():
    ours = loss_code()
    try:
        ours.open()
        ours._context.state = "off"
        assert not ours._is_noting()
        assert not torch.is_anomaly_enabled()
    finally:
        torch.set_anomaly_enabled(False, False)


def test_a_forward_pass_without_modules_that_is_too_long_is_noted_no_more(monkeypatch):
    monkeypatch.setattr("precdoctor.recording.scene.loss_code._MAX_BARE", 3)
    ours, begun = loss_code(), []
    ours._fresh, ours._nodes, ours.forward_begins = True, 9, lambda: begun.append(1)
    ours._scene = SimpleNamespace(begin_step_if_new=lambda: None)
    try:
        ours.open()
        for _ in range(3):
            ours._noted_bare()
        assert begun == [1] and ours.bare and ours.running
        ours._noted_bare()
        assert not ours.bare and not ours.running
    finally:
        torch.set_anomaly_enabled(False, False)
