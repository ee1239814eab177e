"""The loss code between the last top-level module and ``backward``: no hook sees it, but autograd's graph tells of it.

While it runs, every node it makes notes the user's line: autograd's anomaly mode would store a whole traceback per node
(0.1 ms); here it stores one line (about 5 us), checks nothing and prints nothing. As ``backward`` begins, the nodes and
the tensors they saved are kept by reference, within ``--scene-memory``, for one step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback as stored_traces

from precdoctor.recording import attach, kernels, leaves
from precdoctor.recording.microscope.frames import Line, innermost_user_line
from precdoctor.recording.recorder import Recorder, guarded
from precdoctor.recording.scene import RootCall, Scene
from precdoctor.recording.variables import Notebook, Variables

#: What autograd calls its note of a node's traceback.
_KEY = "traceback_"
_MARK = "precdoctor\0"
#: The same on a node whose saved tensors must be left alone.
_HOOKED = f"{_MARK}hooked"
#: Nodes kept per backward pass; of those that the loss code did not make, fewer. Each takes about 10 us. Steps that are
#: measured pay for more of them from the budget of recording, and of a loss known to be bad nearly everything is kept.
_MAX_NODES, _MAX_FOREIGN = 384, 24
_MAX_MEASURED, _MAX_WHOLE = 1 << 11, 1 << 14
#: The same per step of code between top-level modules.
_MAX_BETWEEN = 128
#: Notes of variables per backward pass.
_MAX_PLACES = 256
_SAVED = "_saved_"


@dataclass
class LossNode:
    """One autograd node of the loss code."""

    name: str
    line: Line | None
    #: The functions that were running, and their variables.
    place: Variables | None
    sequence: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    #: Saved tensors and settings by the name of the op's argument (or ``result``).
    saved: dict[str, Any]
    #: Per differentiable input where it came from, and which of its maker's outputs it is.
    edges: list[tuple[LossNode | Leaf | None, int]] = field(default_factory=list)


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
    #: The functions that were running, as they were noted.
    places: Sequence[Variables] = ()

    @functools.cached_property
    def top(self) -> LossNode:
        """The node of the loss."""
        return self.kept if isinstance(self.kept, LossNode) else _readable(self.kept, self.places)


class LossCode:
    """Notes lines while the loss code runs, and keeps its graph as ``backward`` begins."""

    def __init__(self, recorder: Recorder, scene: Scene) -> None:
        self._recorder = recorder
        self._scene = scene
        self._open = False
        self._kinds: dict[type, tuple[str, ...]] = {}
        #: Nodes that may still be kept in this step.
        self._room, self._room_between = _MAX_WHOLE, _MAX_BETWEEN
        scene.graph_behind = self.behind
        self._notebook = Notebook(scene.affords_aside)
        scene.when_cleared.append(self._forget)
        self._note = guarded(recorder)(self._noted)
        self.began = guarded(recorder)(self._began)
        self.supported = scene.enabled and self._install()

    def _install(self) -> bool:
        """Have autograd's notes of tracebacks be made by us while the loss code runs; false where torch differs."""
        original: Callable[[], list[str]] | None = getattr(stored_traces, "format_stack", None)
        hooks_are_told = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # not in torch 2.6
        if original is None or not hasattr(torch, "set_anomaly_enabled") or not hooks_are_told:
            return False

        def format_stack() -> list[str]:
            if not self._open or torch.compiler.is_compiling():
                return original()
            line = innermost_user_line()
            hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            self._note()
            place = f"{line.number}\0{line.file}" if line is not None else "0\0"
            return [f"{_MARK}{'hooked' if hooked else ''}\0{len(self._scene.places)}\0{place}"]

        stored_traces.format_stack = format_stack
        self.open()
        x = (torch.ones((), requires_grad=True) * 2.0).grad_fn
        self.close()
        works = x is not None and _note_on(x) is not None
        if not works:
            stored_traces.format_stack = original
        return works

    @property
    def running(self) -> bool:
        """Whether nodes are being noted."""
        return self._open

    def open(self) -> None:
        """A top-level module in training has returned: what follows may be loss code."""
        if not torch.is_anomaly_enabled() and not self._traced:
            self._open = True  # first: a signal handler may raise between the two
            torch.set_anomaly_enabled(True, False)

    def _noted(self) -> None:
        if len(self._scene.places) < _MAX_PLACES and (place := self._notebook.note()) is not None:
            self._scene.places.append(place)

    def _forget(self) -> None:
        self._notebook.clear()
        self._room, self._room_between = _MAX_WHOLE, _MAX_BETWEEN

    @property
    def _traced(self) -> bool:
        """Every op of the step is: nothing has to be noted."""
        return self._recorder.trace is not None and self._recorder.trace.running

    def close(self) -> None:
        """A top-level module or ``backward`` begins, or the step ends."""
        if self._open:
            torch.set_anomaly_enabled(False, False)
            self._open = False

    def _began(self, tensors: Any, gradients: Any) -> None:
        try:
            if not self._traced:
                self._keep(tensors, gradients)
        finally:
            self._scene.places = []
            self._notebook.learn()
            self._notebook.clear()

    def _keep(self, tensors: Any, gradients: Any) -> None:
        if (graph := self.graph_of(tensors, gradients)) is not None:
            self._scene.losses.append(graph)

    def graph_of(self, tensors: Any, gradients: Any) -> LossGraph | None:
        """The code that made one tensor, from the graph it left; null for several tensors, or without a graph."""
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        given = [gradients] if isinstance(gradients, Tensor) else list(gradients or ())
        if len(roots) != 1 or not isinstance(roots[0], Tensor) or roots[0].grad_fn is None:
            return None
        limit = _MAX_WHOLE if _is_bad(roots[0]) else _MAX_MEASURED if self._recorder.live else _MAX_NODES
        walk = _Walk(self._scene, self._kinds, min(self._room, limit))
        top = walk.node(roots[0].grad_fn)
        self._room -= walk.count
        if not isinstance(top, RawNode):
            return None
        gradient = given[0] if given and isinstance(given[0], Tensor) else None
        value = roots[0].detach()
        return LossGraph(self._recorder.micro_step, top, value, gradient, walk.cut, self._scene.places)

    def behind(self, x: Tensor) -> LossGraph | None:
        """The code between two top-level modules that made a tensor; null where it is an output as it is."""
        if not self.supported or self._room_between <= 0 or x.grad_fn is None:
            return None
        walk = _Walk(self._scene, self._kinds, self._room_between)
        top = walk.node(x.grad_fn)
        self._room_between -= walk.count
        if not isinstance(top, RawNode):
            return None
        return LossGraph(self._recorder.micro_step, top, x.detach(), None, walk.cut, self._scene.places)


def _is_bad(loss: Tensor) -> bool:
    """Whether it is known to be, without a wait for a device."""
    if (
        not loss.is_cpu
        or loss.numel() != 1
        or loss.is_complex()
        or leaves.is_wrapped(loss)
        or leaves.is_transformed(loss)
    ):
        return False
    with kernels.apart_from_user_modes():
        return not math.isfinite(loss.detach().item())


class _Walk:
    """Copies the part of a graph that the loss code made."""

    def __init__(self, scene: Scene, kinds: dict[type, tuple[str, ...]], limit: int) -> None:
        self._scene = scene
        self._kinds = kinds
        self._limit, self._foreign = limit, _MAX_FOREIGN
        self.count = 0
        self.cut = False
        self._known: dict[int, RawNode | Leaf | None] = {}
        #: An ``id`` speaks of a node only while that is alive.
        self._held: list[Any] = []
        self._outputs = {key: (call, name) for call in scene.calls for name, key in call.makers.items()}

    def node(self, top: Any) -> RawNode | Leaf | None:
        """The node and all behind it, without recursion: loss code may loop."""
        found = self._one(top, 0)
        waiting = [(top, found)]
        while waiting:
            original, copy = waiting.pop()
            if not isinstance(copy, RawNode):
                continue
            for following, output in original.next_functions:
                known = following is not None and id(following) in self._known
                behind = self._one(following, output) if following is not None else None
                copy.edges.append((behind, output))
                if not known and isinstance(behind, RawNode):
                    waiting.append((following, behind))
        return found

    def _one(self, node: Any, output: int) -> RawNode | Leaf | None:
        sequence = node._sequence_nr()
        made = self._outputs.get((sequence, output))
        if made is not None and made[0].parametric:
            return self._leaf(*made)
        if id(node) in self._known:
            return self._known[id(node)]
        self._known[id(node)] = None
        self._held.append(node)
        note = _note_on(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            self._known[id(node)] = Leaf("weight", variable)
        elif self.count == self._limit and note is not None:
            self.cut = True
        elif self.count < self._limit and (note is not None or self._foreign > 0):
            self.count += 1
            self._foreign -= note is None
            saved = self._saved(node) if note is not None and not note.startswith(_HOOKED) else {}
            copy = RawNode(node.name(), note, getattr(node, "_input_metadata", None), sequence, saved, [])
            self._known[id(node)] = copy
            if made is not None and (value := self._leaf(*made).value) is not None:
                copy.saved["result"] = value  # of a loss module: the code before it counts, too
        return self._known[id(node)]

    def _leaf(self, call: RootCall, name: str) -> Leaf:
        value = next((x for n, x, version in call.outputs if n == name and x._version == version), None)
        return Leaf(f"{call.root} output {name}".strip(), value)

    def _saved(self, node: Any) -> dict[str, Any]:
        """By reference: nothing is copied, and what does not fit into ``--scene-memory`` is left out."""
        kind = type(node)
        names = self._kinds.get(kind)
        if names is None:
            names = self._kinds[kind] = tuple(n for n in dir(node) if n.startswith(_SAVED))
        saved: dict[str, Any] = {}
        for name in names:
            try:
                value = getattr(node, name)
            except RuntimeError as error:
                attach.let_through(error)
                continue  # freed, or written to since
            if isinstance(value, Tensor):
                if leaves.is_transformed(value) or not self._scene.affords(value):
                    continue
                value = value.detach()
            saved[name.removeprefix(_SAVED)] = value
        return saved


def _note_on(node: Any) -> str | None:
    """What we noted at a node; null for any other node."""
    try:
        trace: Iterable[str] = node.metadata.get(_KEY) or ()
    except (AttributeError, RuntimeError) as error:
        attach.let_through(error)
        return None
    return next((text for text in trace if text.startswith(_MARK)), None)


def _readable(top: RawNode, places: Sequence[Variables]) -> LossNode:
    """The graph with its lines and places."""
    copies: dict[int, LossNode] = {}
    waiting = [top]
    while waiting:
        raw = waiting.pop()
        if id(raw) not in copies:
            copies[id(raw)] = _read(raw, places)
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


def _read(raw: RawNode, places: Sequence[Variables]) -> LossNode:
    line, place = None, None
    if raw.note is not None:
        _, _, count, number, file = raw.note.split("\0", 4)
        line = Line(file, int(number)) if file else None
        place = _place_of(line, places[: int(count)])
    first = raw.metadata[0] if raw.metadata else None
    shape = tuple(int(n) for n in first.shape) if first is not None else ()
    return LossNode(raw.name, line, place, raw.sequence, shape, first.dtype if first is not None else None, raw.saved)


def _place_of(line: Line | None, places: Sequence[Variables]) -> Variables | None:
    """The latest note of the line, so that of a loop's first rounds."""
    if line is None:
        return None
    return next((p for p in reversed(places) if (p.code.co_filename, p.line) == (line.file, line.number)), None)
