"""Graphs of loss code: raw nodes, copied from autograd in each step, and readable ones, made when examined."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.scene.line_notes import line_of


@dataclass
class LossNode:
    """One autograd node of the loss code."""

    name: str
    line: Line | None
    sequence: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    #: Saved tensors and settings, by the name of the op's argument (or ``result``).
    saved: dict[str, Any]
    #: Per differentiable input: the node or leaf it comes from, and the index among that node's outputs.
    edges: list[tuple[LossNode | Leaf | None, int]] = field(default_factory=list)


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


@dataclass(eq=False, slots=True)
class RawNode:
    """An autograd node as copied in each step; turned into a :class:`LossNode` only if somebody reads it."""

    name: str
    #: Our note of the user's line; None if the node was made while nodes were not noted.
    note: str | None
    metadata: Any
    sequence: int
    saved: dict[str, Any]
    edges: list[tuple[RawNode | Leaf | None, int]]


@dataclass
class LossGraph:
    """The loss code of one backward pass, or the code that made an argument of a root call or of ``autograd.grad``."""

    micro_step: int
    kept: LossNode | RawNode
    value: Tensor
    gradient: Tensor | None
    #: Whether the code's graph goes on behind the nodes that were kept.
    cut: bool = False
    #: For code between two top-level modules: the name of the second one's argument that it computed.
    argument: str = ""
    #: The leaves it is a function of, if it passes no module with weights and no node without our note; else empty.
    weights: list[Tensor] = field(default_factory=list)

    @functools.cached_property
    def top(self) -> LossNode:
        """The node of the loss."""
        return self.kept if isinstance(self.kept, LossNode) else _readable(self.kept)


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


def _readable(top: RawNode) -> LossNode:
    """Return a graph of readable nodes: with lines, shapes and dtypes."""
    copies: dict[int, LossNode] = {}
    waiting = [top]
    while waiting:
        raw = waiting.pop()
        if id(raw) not in copies:
            copies[id(raw)] = _read(raw)
            waiting += [behind for behind, _ in raw.edges if isinstance(behind, RawNode)]
    waiting, met = [top], {id(top)}
    while waiting:
        raw = waiting.pop()
        for behind, output in raw.edges:
            copies[id(raw)].edges.append((copies[id(behind)] if isinstance(behind, RawNode) else behind, output))
            if isinstance(behind, RawNode) and id(behind) not in met:
                met.add(id(behind))
                waiting.append(behind)
    return copies[id(top)]


def _read(raw: RawNode) -> LossNode:
    """Return a raw node as a readable one, without edges."""
    line = line_of(raw.note) if raw.note is not None else None
    first = raw.metadata[0] if raw.metadata else None
    shape = tuple(int(n) for n in first.shape) if first is not None else ()
    return LossNode(raw.name, line, raw.sequence, shape, first.dtype if first is not None else None, raw.saved)
