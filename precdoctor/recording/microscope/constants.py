"""Follows a loss graph past constants that autograd did not save: ``x - 0.055``, ``where(valid, x, 0)``.

No derivative depends on such a constant, so gradients can be computed without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.ops.tensor_facts import NAN, badness
from precdoctor.recording.process import attach
from precdoctor.recording.scene.loss_graph import LossNode

SUMS = ("Add", "Sub", "Rsub")
#: Ops that arrange the elements of their operands anew.
ARRANGES = frozenset(
    (
        *("Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Expand", "Permute", "Transpose", "T", "Unsqueeze"),
        *("Squeeze", "Slice", "Select", "Index", "IndexSelect", "Gather", "Diagonal", "Flip", "Roll", "Repeat"),
        *("Cat", "Stack"),
    )
)
#: Ops that make no NaN of finite operands, and whose unknown operand may be a constant that nobody saved.
_KEEPS_NUMBERS = ARRANGES | {*SUMS, "Neg", "Mul", "ToCopy", "Where", "MaskedFill"}


def added_to(node: LossNode, operands: list[Tensor | None]) -> Tensor | None:
    """Return the tensor that an unknown constant was added to, with the sign of its derivative; None for other nodes.

    Args:
        operands: values of the node's edges; None if unknown or without a gradient.
    """
    known = [x for x in operands if x is not None]
    name = base_of(node)
    if name not in SUMS or len(known) != 1 or not known[0].requires_grad:
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


def unfilled(node: LossNode, operands: list[Tensor | None]) -> Tensor | None:
    """Return the operand of a ``masked_fill`` whose mask is empty: nobody saved what it fills in. Else None."""
    mask = node.saved.get("mask")
    known = [x for x in operands if x is not None]
    if base_of(node) != "MaskedFill" or not isinstance(mask, Tensor) or len(known) != 1 or bool(mask.any()):
        return None
    return _as(node, known[0])


def operand_names(node: LossNode, packet: Any) -> list[str]:
    """Return a name for each edge of a node: the op's argument, or a number if no overload has as many tensors.

    Args:
        packet: the op's overloads; None if it is no torch op.
    """
    for overload in packet.overloads() if packet is not None and "own" not in node.saved else ():
        names = [a.name for a in getattr(packet, overload)._schema.arguments if str(a.type) == "Tensor"]
        if len(names) == len(node.edges):
            return names
    return [str(i) for i in range(len(node.edges))]


def keeps_numbers(node: LossNode, known: list[Tensor], value: Tensor) -> bool:
    """Return whether an op with this non-finite result cannot have made it of finite operands.

    A sum of small numbers and a constant is only infinite if the constant is, or is at the end of the range. A
    triangular solve divides by the diagonal only; it has made no NaN if no sum in it can leave the format's range.
    """
    largest = torch.finfo(value.dtype).max
    if base_of(node) in SUMS and len(known) == 1 and bool(known[0].abs().max() < largest / 4):
        return True
    if badness(value) != NAN or value.is_complex():
        return False
    if base_of(node) in _KEEPS_NUMBERS:
        return True
    if base_of(node) != "LinalgSolveTriangular" or len(known) != 1 or not bool(known[0].diagonal(0, -2, -1).all()):
        return False
    reach = known[0].abs().max().double() * torch.nan_to_num(value, 0.0).abs().max().double() * known[0].shape[-1]
    return bool(reach < largest)


def constant_reader(node: LossNode, made: dict[int, Any]) -> LossNode | None:
    """Return the only node of unknown value, from this one back, that a constant without a gradient goes into.

    None if another op in between could have made the NaN, or if several constants go in.

    Args:
        made: values of nodes and leaves, by ``id``; a None among them is unknown.
    """
    readers: list[LossNode] = []
    waiting, met = [node], {id(node)}
    while waiting:
        at = waiting.pop()
        if at is not node and base_of(at) not in _KEEPS_NUMBERS:
            return None
        saved = any(isinstance(at.saved.get(name), Tensor) for name in ("self", "other"))
        readers += [at for behind, _ in at.edges if behind is None and not saved]
        for behind, _ in at.edges:
            if behind is not None and made.get(id(behind)) is None and id(behind) not in met:
                if not isinstance(behind, LossNode):
                    return None
                met.add(id(behind))
                waiting.append(behind)
    return readers[0] if len(readers) == 1 else None


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
