"""Gradients past what nobody saved are those that autograd computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from precdoctor.recording.microscope.loss_replay import replay_loss
from precdoctor.recording.microscope.replay import same_bits
from precdoctor.recording.scene.loss_graph import Leaf, LossGraph, LossNode, OwnFunction

#: Ops that save their result, in the words of autograd's nodes.
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "Exp": torch.exp,
    "Exp2": torch.exp2,
    "Expm1": torch.expm1,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Reciprocal": torch.reciprocal,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
}
OUT = torch.tensor([0.5, 1.5, 3.0])
UNSEEN = torch.tensor([-0.25, 1.0, 2.0])
#: A note of line 7 of train.py.
NOTE = f"precdoctor\0\0{7}\0train.py"


def node(name: str, sequence: int, edges: list[Any], shape: tuple[int, ...] = (3,), **saved: Any) -> LossNode:
    metadata = [torch.empty(shape, device="meta")]
    return LossNode(name, NOTE, metadata, sequence, saved, [(each, 0) for each in edges])


def gradient(top: LossNode, loss: Tensor, leaf: Leaf) -> Tensor | None:
    """Of an output, so that the replay hands it out."""
    done = replay_loss(LossGraph(0, top, loss.detach(), None), backward=True)
    return next((g for value, g in done.output_gradients if value is leaf.value), None)


@pytest.mark.parametrize("name", OPS)
def test_of_a_result_where_the_operand_lacks_a_constant(name):
    out = OUT.clone().requires_grad_()
    loss = OPS[name](out - UNSEEN).sum()
    (expected,) = torch.autograd.grad(loss, out)
    leaf = Leaf("Net#0 output", OUT)
    less = node("SubBackward0", 1, [leaf], alpha=1)
    made = node(f"{name}Backward0", 2, [less], result=OPS[name](OUT - UNSEEN))
    found = gradient(node("SumBackward0", 3, [made], ()), loss, leaf)

    assert found is not None
    torch.testing.assert_close(found, expected)


def test_what_is_linear_hands_gradients_on_though_a_later_op_saved_its_value():
    out = OUT.clone().requires_grad_()
    loss = ((out - UNSEEN).neg() * 2.0).pow(2).sum()
    (expected,) = torch.autograd.grad(loss, out)
    leaf = Leaf("Net#0 output", OUT)
    less = node("SubBackward0", 1, [leaf], alpha=1)
    minus = node("NegBackward0", 2, [less])
    twice = node("MulBackward0", 3, [minus, None], other=torch.full((3,), 2.0))
    square = node("PowBackward0", 4, [twice], self=-2.0 * (OUT - UNSEEN), exponent=2.0)
    found = gradient(node("SumBackward0", 5, [square], ()), loss, leaf)

    assert found is not None
    torch.testing.assert_close(found, expected)


def own(backward: Callable[..., Any], saved: Tensor, needed: tuple[bool, ...] = (True, False)) -> OwnFunction:
    return OwnFunction(backward, (saved,), {"factor": 3.0}, needed)


def through(function: OwnFunction) -> tuple[LossNode, Leaf]:
    leaf = Leaf("Net#0 output", OUT)
    less = node("SubBackward0", 1, [leaf], alpha=1)
    return node("SumBackward0", 3, [node("CubeBackward", 2, [less], own=function)], ()), leaf


def test_a_function_of_the_users_own_is_given_what_it_saved():
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert ctx.needs_input_grad == (True, False)
        return ctx.factor * grad * ctx.saved_tensors[0] ** 2, None

    top, leaf = through(own(backward, OUT))
    found = gradient(top, torch.tensor(1.0), leaf)

    assert found is not None
    torch.testing.assert_close(found, 3.0 * OUT**2)


def test_one_that_starts_another_backward_pass_is_not_run():
    ran = []

    def backward(ctx: Any, grad: Tensor) -> Any:
        ran.append(ctx)
        torch.autograd.backward(grad)
        return grad, None

    top, _ = through(own(backward, OUT))
    done = replay_loss(LossGraph(0, top, torch.tensor(1.0), None), backward=True)

    assert not done.output_gradients
    assert not ran


def test_one_that_writes_to_what_it_has_not_made_is_stopped_before_that():
    counter = torch.zeros(3)

    def backward(ctx: Any, grad: Tensor) -> Any:
        counter.add_(1.0)
        return grad, None

    top, _ = through(own(backward, OUT))
    done = replay_loss(LossGraph(0, top, torch.tensor(1.0), None), backward=True)

    assert torch.equal(counter, torch.zeros(3))
    assert not done.output_gradients
    assert not done.bad_gradients


def test_one_that_raises_ends_the_backward_pass():
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ValueError("once only")

    top, _ = through(own(backward, OUT))
    done = replay_loss(LossGraph(0, top, torch.tensor(1.0), None), backward=True)

    assert not done.output_gradients


def test_a_function_of_the_users_own_is_not_torchs_of_the_same_name():
    leaf = Leaf("Net#0 output", OUT)
    top = node("SumBackward0", 2, [node("ExpBackward", 1, [leaf], own=None)], ())
    done = replay_loss(LossGraph(0, top, torch.tensor(1.0), None), backward=False)

    assert done.tracer.records == []


def test_an_infinity_is_not_the_largest_number():
    largest, bad = torch.finfo(torch.float32).max, torch.tensor([float("inf"), float("nan"), 1.0])
    assert same_bits(bad, bad.clone())
    assert not same_bits(bad, torch.tensor([largest, float("nan"), 1.0]))
    assert not same_bits(bad, torch.tensor([float("inf"), 0.0, 1.0]))
    assert not same_bits(bad, bad[:2])
