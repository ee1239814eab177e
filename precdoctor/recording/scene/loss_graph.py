"""Graphs of loss code: as they are copied from autograd in each step, and as they are read once something is wrong."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.ops.source_lines import Line


@dataclass
class LossNode:
    """One autograd node of the loss code."""

    name: str
    line: Line | None
    sequence: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    #: Saved tensors and settings by the name of the op's argument (or ``result``).
    saved: dict[str, Any]
    #: Per differentiable input where it came from, and which of its maker's outputs it is.
    edges: list[tuple[LossNode | Leaf | None, int]] = field(default_factory=list)


@dataclass(frozen=True)
class OwnFunction:
    """What a ``torch.autograd.Function`` of the user's left for its ``backward``."""

    backward: Callable[..., Any]
    saved: tuple[Tensor | None, ...]
    attributes: dict[str, Any]
    needs_input_grad: tuple[bool, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Which of its arguments get a gradient."""
        return tuple(i for i, needed in enumerate(self.needs_input_grad) if needed)


@dataclass
class Leaf:
    """A tensor the loss code began with: an output of a top-level module, or a parameter."""

    name: str
    value: Tensor | None


@dataclass(eq=False, slots=True)
class RawNode:
    """The same as it is taken from autograd in each step, before anybody wants to read it."""

    name: str
    #: What we noted as it was made; null for any other node.
    note: str | None
    metadata: Any
    sequence: int
    saved: dict[str, Any]
    edges: list[tuple[RawNode | Leaf | None, int]]


@dataclass
class LossGraph:
    """The loss code of one backward pass, or of what ``torch.autograd.grad`` was given."""

    micro_step: int
    kept: LossNode | RawNode
    value: Tensor
    gradient: Tensor | None
    #: It goes on behind the nodes that were kept.
    cut: bool = False
    #: Code between two top-level modules: the argument of the second that it made, as a replay names it.
    argument: str = ""
    #: The leaves it is a function of, where no top-level module has a part in it.
    weights: list[Tensor] = field(default_factory=list)

    @functools.cached_property
    def top(self) -> LossNode:
        """The node of the loss."""
        return self.kept if isinstance(self.kept, LossNode) else _readable(self.kept)


@dataclass
class Taken:
    """One call of ``torch.autograd.grad``."""

    number: int
    #: The code between the top-level modules and what was derived, if that was one tensor.
    graph: LossGraph | None
    #: What the gradients are of.
    asked: list[weakref.ref[Tensor]]
    results: list[weakref.ref[Tensor]] = field(default_factory=list)

    def asked_for(self) -> list[Tensor]:
        """What the gradients are of, as far as it is still there."""
        return [x for r in self.asked if (x := r()) is not None]

    @property
    def gone(self) -> bool:
        """Whether some of what it gave is gone."""
        return not self.results or any(r() is None for r in self.results)


def _readable(top: RawNode) -> LossNode:
    """The graph with its lines."""
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
    line = None
    if raw.note is not None:
        _, _, number, file = raw.note.split("\0", 3)
        line = Line(file, int(number)) if file else None
    first = raw.metadata[0] if raw.metadata else None
    shape = tuple(int(n) for n in first.shape) if first is not None else ()
    return LossNode(raw.name, line, raw.sequence, shape, first.dtype if first is not None else None, raw.saved)
