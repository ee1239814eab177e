"""Derivatives that need no operand: of linear ops, of ops that saved their result, and of the user's own functions.

An operand may be unknown because nothing saved it (``logp - old_logp``). Gradients reach it all the same, because
autograd does not need it either. Formulas: torch's ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from precdoctor.recording.microscope.constants import ARRANGES, SUMS, base_of, without_constant
from precdoctor.recording.microscope.replay import same_bits
from precdoctor.recording.ops.source_lines import is_foreign
from precdoctor.recording.ops.tensor_facts import badness
from precdoctor.recording.scene.loss_graph import LossNode, OwnFunction

#: Derivative by op, as a function of the gradient and the op's result.
_OF_RESULT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Exp": lambda g, y: g * y.conj(),
    "Exp2": lambda g, y: g * y.conj() * math.log(2),
    "Expm1": lambda g, y: g * (y.conj() + 1),
    "Sqrt": lambda g, y: g / (2 * y.conj()),
    "Rsqrt": lambda g, y: -0.5 * g * y.pow(3).conj(),
    "Reciprocal": lambda g, y: -g * (y * y).conj(),
    "Tanh": torch.ops.aten.tanh_backward,
    "Sigmoid": torch.ops.aten.sigmoid_backward,
}
#: Ops whose derivative depends on no operand.
_LINEAR = ARRANGES | {*SUMS, "Neg", "Sum", "Mean"}
#: Ops that are linear if only one operand has a gradient; the other one was saved.
_BILINEAR = frozenset(("Mul", "Div"))
#: Names in the code of a hand-written ``backward`` that runs another backward pass.
_PASSES = frozenset(("autograd", "backward", "checkpoint"))


class _Known(torch.autograd.Function):
    """A saved result with a derivative that we supply."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, derivative: Callable[[Tensor], tuple[Any, ...]], *_: Tensor) -> Tensor:
        ctx.derivative = derivative
        with _disable_current_modes():  # the view is ours and no op of the run, so the tracer must not see it
            return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.derivative(gradients[0]))


def for_gradients(
    node: LossNode, value: Any, known: Tensor | None, operands: list[Tensor | None], rough: set[int], *, as_saved: bool
) -> tuple[Any, bool]:
    """Return the node's value for a backward pass, which must not end at a constant that nobody saved.

    The operand that a constant was added to, or filled into, takes the place of the result. Later derivatives either do
    not depend on the sum, or their node has saved it; a value that differs from the saved one is replaced by it.

    Args:
        value: the node's value; None if unknown.
        known: its value as saved by a later node, or by the node as its result; None if unsaved.
        operands: values of its edges; None if unknown or without a gradient.
        rough: ids of nodes whose values lack such a constant, or may; this function adds to it.
        as_saved: ``value`` is ``known``, so that gradients end there.

    Returns:
        The value, and whether it is a saved one, of an op that was not run.
    """
    if value is None and (through := without_constant(node, operands)) is not None:
        rough.add(id(node))
        return through, False
    if as_saved and known is not None and (through := without_constant(node, operands)) is not None:
        return (known.detach() + (through - through.detach()) if not badness(through.detach()) else through), False
    if "own" in node.saved and (given := _with_derivative(node, None, known, operands)) is not None:
        if known is None:
            rough.add(id(node))
        return given
    if not any(id(behind) in rough for behind, _ in node.edges):
        return value, as_saved
    first = value[0] if isinstance(value, (tuple, list)) else value
    if known is None:
        rough.add(id(node))
    elif isinstance(first, Tensor) and not (first.shape == known.shape and same_bits(first.detach(), known)):
        return _with_derivative(node, value, known, operands) or (known, True)
    return value, as_saved


def _with_derivative(
    node: LossNode, value: Any, known: Tensor | None, operands: list[Tensor | None]
) -> tuple[Tensor, bool] | None:
    """Return the node's value with a derivative, so that gradients reach operands that are inexact or unknown.

    Args:
        value: the node's value computed from inexact operands; None if unknown.
        known: its value as something saved it; None if unsaved.
        operands: values of its edges; None if unknown.

    Returns:
        The value, and whether its op was not run; None if the derivative is not known either.
    """
    own = node.saved.get("own")
    given = [x for x in operands if x is not None]
    if isinstance(own, OwnFunction) and len(own.places) == len(given) and _may_run(own):
        return _own_value(node, own, known, given), True
    if known is None:
        return None
    linear = base_of(node) in _LINEAR or (base_of(node) in _BILINEAR and len(given) == 1)
    if isinstance(value, Tensor) and linear and value.shape == known.shape and bool(value.isfinite().all()):
        return known.detach() + (value - value.detach()), False
    formula = _OF_RESULT.get(base_of(node))
    x = operands[0] if operands else None
    if formula is None or x is None or not isinstance(node.saved.get("result"), Tensor) or x.shape != known.shape:
        return None
    result = known.detach()
    return _known_result(node.name, result, lambda g: (formula(g, result),), x), True


def _known_result(
    name: str, result: Tensor, derivative: Callable[[Tensor], tuple[Any, ...]], *operands: Tensor
) -> Tensor:
    """Return a saved result with a derivative; autograd calls its node ``<name>Backward``, after its class.

    The tracer takes that suffix off where it follows the whole name of a node of torch's (``SqrtBackward0``).
    """
    named: Any = type(name, (_Known,), {})
    return named.apply(result, derivative, *operands)


def _may_run(own: OwnFunction) -> bool:
    """Return whether a user's ``backward`` may be run: not if it runs a backward pass itself, which adds gradients."""
    code = getattr(inspect.unwrap(own.backward), "__code__", None)
    return code is not None and not is_foreign(code.co_filename) and not _PASSES.intersection(code.co_names)


def _own_value(node: LossNode, own: OwnFunction, known: Tensor | None, operands: list[Tensor]) -> Tensor:
    """Return the value of a user's function; its derivative calls the hand-written ``backward`` with what was saved."""
    value = torch.zeros(node.shape, dtype=node.dtype, device=operands[0].device) if known is None else known.detach()

    def derivative(gradient: Tensor) -> tuple[Any, ...]:
        context = SimpleNamespace(**own.attributes)
        context.saved_tensors, context.needs_input_grad = own.saved, own.needs_input_grad
        made = own.backward(context, gradient)
        made = made if isinstance(made, tuple) else (made,)
        return tuple(made[i] for i in own.places)

    return _known_result(node.name.removesuffix("Backward"), value, derivative, *operands)
