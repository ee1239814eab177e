"""Constants of loss code that nobody saved: ``x - 0.055``, ``where(valid, x, 0)``, ``masked_fill(mask, 0)``.

Autograd's nodes do not hold them, as no derivative depends on them; so the graph can be followed without them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.process import attach
from precdoctor.recording.scene.loss_graph import LossNode


def added_to(node: LossNode, operands: list[Tensor | None]) -> Tensor | None:
    """What an unknown constant was added to, with the sign its derivative has; null for any other node.

    Args:
        operands: values of the node's edges; null where unknown, or without a gradient.
    """
    known = [x for x in operands if x is not None]
    name = base_of(node)
    if name not in {"Add", "Sub", "Rsub"} or len(known) != 1 or not known[0].requires_grad:
        return None
    alpha = node.saved.get("alpha", 1)
    negative = name == "Rsub" or (name == "Sub" and operands[0] is None)
    if alpha != 1 or (through := _as(node, known[0])) is None:
        return None
    return -through if negative else through


def without_constant(node: LossNode, operands: list[Tensor | None]) -> Tensor | None:
    """The same, and zeros in place of what ``where`` and ``masked_fill`` put somewhere."""
    if (through := added_to(node, operands)) is not None:
        return through
    mask = node.saved.get("condition" if base_of(node) == "Where" else "mask")
    known = [x for x in operands if x is not None]
    if base_of(node) not in {"Where", "MaskedFill"} or not isinstance(mask, Tensor) or len(known) != 1:
        return None
    if (through := _as(node, known[0])) is None:
        return None
    kept = mask if base_of(node) == "Where" and operands[0] is not None else ~mask
    return torch.where(kept, through, torch.zeros((), dtype=through.dtype, device=through.device))


def base_of(node: LossNode) -> str:
    """``Log2`` of ``Log2Backward0``; no op of torch's for a function of the user's, whatever it is called."""
    if "own" in node.saved:
        return node.name
    return node.name.rstrip("0123456789").removesuffix("Backward")


def has_no_gradient(saved: Any) -> bool:
    """Whether a saved value is a tensor that no gradient can reach: Booleans and integers."""
    return isinstance(saved, Tensor) and not (saved.is_floating_point() or saved.is_complex())


def _as(node: LossNode, x: Tensor) -> Tensor | None:
    """An operand in the shape of the node's result."""
    if x.dtype != node.dtype or len(x.shape) > len(node.shape):
        return None
    try:
        return x.expand(node.shape)
    except RuntimeError as error:
        attach.let_through(error)
        return None
