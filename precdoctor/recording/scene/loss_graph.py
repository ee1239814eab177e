"""Graphs of loss code, copied from autograd in each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.scene.line_notes import line_of


@dataclass(eq=False, slots=True)
class LossNode:
    """One autograd node of the loss code, copied as ``backward`` begins; line, shape and dtype are read on request."""

    name: str
    #: Our note of the user's line; None if the node was made while nodes were not noted.
    note: str | None
    #: Autograd's metadata of the node's outputs; None or empty if there are none.
    metadata: Any
    sequence: int
    #: Saved tensors and settings, by the name of the op's argument (or ``result``).
    saved: dict[str, Any]
    #: Per differentiable input: the node or leaf it comes from, and the index among that node's outputs.
    edges: list[tuple[LossNode | Leaf | None, int]]

    @property
    def line(self) -> Line | None:
        """The user's line that made the node; None if unknown."""
        return line_of(self.note) if self.note is not None else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its first output; empty if unknown."""
        return tuple(int(n) for n in self.metadata[0].shape) if self.metadata else ()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its first output; None if unknown."""
        return self.metadata[0].dtype if self.metadata else None


@dataclass(frozen=True)
class OwnFunction:
    """What a user's ``torch.autograd.Function`` left for its ``backward``."""

    backward: Callable[..., Any]
    saved: tuple[Tensor | None, ...]
    attributes: dict[str, Any]
    needs_input_grad: tuple[bool, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Indices of its arguments that get a gradient."""
        return tuple(i for i, needed in enumerate(self.needs_input_grad) if needed)


@dataclass
class Leaf:
    """A tensor with which the loss code began: an output of a top-level module, or a parameter; value None: unknown."""

    name: str
    value: Tensor | None


@dataclass
class LossGraph:
    """The loss code of one backward pass, or the code that made an argument of a root call or of ``autograd.grad``."""

    micro_step: int
    #: The node of the loss.
    top: LossNode
    value: Tensor
    gradient: Tensor | None
    #: Whether the code's graph goes on behind the nodes that were kept.
    cut: bool = False
    #: For code between two top-level modules: the name of the second one's argument that it computed.
    argument: str = ""
    #: The leaves it is a function of, if it passes no module with weights and no node without our note; else empty.
    weights: list[Tensor] = field(default_factory=list)


@dataclass
class GradCall:
    """One call of ``torch.autograd.grad``."""

    number: int
    #: The code between the top-level modules and the differentiated tensor; None if there were several.
    graph: LossGraph | None
    #: The tensors with respect to which gradients were taken, and the gradients.
    input_refs: list[weakref.ref[Tensor]]
    results: list[weakref.ref[Tensor]] = field(default_factory=list)

    def inputs(self) -> list[Tensor]:
        """Return the tensors with respect to which gradients were taken, as far as they are alive."""
        return [x for r in self.input_refs if (x := r()) is not None]

    @property
    def has_lost_results(self) -> bool:
        """Whether it returned nothing, or some of the gradients it returned are gone."""
        return not self.results or any(r() is None for r in self.results)
