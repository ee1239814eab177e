"""What is kept of the loss code's graph: how much of it, and when more."""

from types import SimpleNamespace

import pytest
import torch

from precdoctor.recording.loss_code import _Walk, is_bad
from precdoctor.recording.loss_graph import LossGraph, LossNode
from precdoctor.recording.microscope.frames import Line

NOTE = "precdoctor\0\0000\0007\0train.py"
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
