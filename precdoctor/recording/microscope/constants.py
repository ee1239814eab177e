"""Follows a loss graph past constants that autograd did not save: ``x - 0.055``, ``where(valid, x, 0)``.

No derivative depends on such a constant, so gradients can be computed without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.process import attach
from precdoctor.recording.scene.loss_graph import LossNode


def added_to(node: LossNode, operands: list[Tensor | None]) -> Tensor | None:
    """Return the tensor that an unknown constant was added to, with the sign of its derivative; None for other nodes.

    Args:
        operands: values of the node's edges; None if unknown or without a gradient.
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
    """Return :func:`added_to`; for ``where`` and ``masked_fill`` the known operand, with zeros for the constant."""
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
    """Return the op's name: ``Log2`` for ``Log2Backward0``; a user's function keeps its name, to match no torch op."""
    if "own" in node.saved:
        return node.name
    return node.name.rstrip("0123456789").removesuffix("Backward")


def has_no_gradient(saved: Any) -> bool:
    """Return whether a saved value is a tensor that no gradient can reach: Booleans or integers."""
    return isinstance(saved, Tensor) and not (saved.is_floating_point() or saved.is_complex())


def _as(node: LossNode, x: Tensor) -> Tensor | None:
    """Return an operand expanded to the shape of the node's result; None if dtype or shape do not fit."""
    if x.dtype != node.dtype or len(x.shape) > len(node.shape):
        return None
    try:
        return x.expand(node.shape)
    except RuntimeError as error:
        attach.let_through(error)
        return None
