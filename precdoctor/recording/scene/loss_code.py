"""The loss code between the last top-level module and ``backward``: no hook sees it, but autograd's graph tells of it.

While it runs, every node it makes notes the user's line: autograd's anomaly mode would store a whole traceback per node
(0.1 ms); here it stores one line (about 5 us), checks nothing and prints nothing. As ``backward`` begins, the nodes and
the tensors they saved are kept by reference, within ``--scene-memory``, for one step.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.fx import traceback as stored_traces

from precdoctor.recording import kernels
from precdoctor.recording.kernels.outside_user_modes import detached, modes_open
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.ops.source_lines import innermost_user_line
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene import saved_hooks
from precdoctor.recording.scene.compiled_function import CompiledFunction
from precdoctor.recording.scene.loss_graph import Leaf, LossGraph, OwnFunction, RawNode
from precdoctor.recording.scene.step_snapshot import RootCall, Scene

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
#: Nodes noted per forward pass of a script whose weights no module has; one that makes more is not noted any further.
_MAX_BARE = 1 << 13
#: Lines whose note is made once.
_MAX_NOTES = 1 << 12
_SAVED = "_saved_"
_ACCUMULATES: Any = vars(torch._C._functions).get("AccumulateGrad")


class LossCode:
    """Notes lines while the loss code runs, and keeps its graph as ``backward`` begins."""

    def __init__(self, context: StepContext, scene: Scene) -> None:
        self._context = context
        self._scene = scene
        #: Whether nodes are being noted.
        self.running = False
        #: No module has the weights, as far as is known: all of the training is code that no hook sees.
        self.bare = False
        #: Then: a backward pass has ended, and no forward pass has begun; whom to tell when one does.
        self._fresh, self._nodes = False, 0
        self.forward_begins: Callable[[], None] = lambda: None
        #: By type of node: its attributes with saved tensors, and the names of the op's arguments that they are.
        self._kinds: dict[type, tuple[tuple[str, str], ...]] = {}
        #: Nodes that may still be kept in this step.
        self._room, self._room_between, self._clears = _MAX_WHOLE, _MAX_BETWEEN, scene.clears
        scene.graph_behind = self.behind
        context.when_closing.append(self.close)
        context.when_forked.append(self._begin_anew)
        self._note = guarded(context)(self._noted_bare)
        self.supported = self.bare = scene.enabled and self._install()

    def _install(self) -> bool:
        """Make autograd's notes of tracebacks while the loss code runs; false where torch differs."""
        original: Callable[[], list[str]] | None = getattr(stored_traces, "format_stack", None)
        if original is None or not hasattr(torch, "set_anomaly_enabled"):
            return False

        #: Of nodes made in a line of the user's itself, not in a function of torch's called there.
        notes: dict[tuple[str, int], list[str]] = {}

        def format_stack() -> list[str]:
            if not self._notes():
                return original()
            if self.bare:
                self._note()
            frame = sys._getframe().f_back  # null in autograd's thread for a device, where a gradient has a graph
            place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
            hooked = saved_hooks.active()
            if not hooked and (known := notes.get(place)) is not None:
                return known
            line, mark = innermost_user_line(), f"{_HOOKED}\0" if hooked else f"{_MARK}\0"
            note = [f"{mark}{line[1]}\0{line[0]}" if line is not None else f"{mark}0\0"]
            if line == place and not hooked and len(notes) < _MAX_NOTES:
                notes[line] = note
            return note

        stored_traces.format_stack = format_stack
        for kind in (torch.autograd.detect_anomaly, torch.autograd.set_detect_anomaly):
            _precede(kind, self.close)
        self.open()
        x = (torch.ones((), requires_grad=True) * 2.0).grad_fn
        works = x is not None and _note_on(x) is not None
        if not works:
            self.close()
            stored_traces.format_stack = original
        return works

    def _begin_anew(self) -> None:
        """In a forked child, and for another run of the process."""
        self.close()
        self.bare, self._fresh, self._nodes = self.supported, False, 0
        if self.supported:
            self.open()

    def _notes(self) -> bool:
        """Whether a node is to be noted: not while compiling, nor in the user's own ``detect_anomaly``."""
        if not self.running or torch.compiler.is_compiling() or torch.is_anomaly_check_nan_enabled():
            return False
        if self._context.state == "off":  # nobody will read it
            self.close()
            return False
        return True

    @property
    def weights(self) -> list[Tensor]:
        """The leaves that the last backward pass was about, where no module has them."""
        return self._scene.losses[-1].weights if self.bare and self._scene.losses else []

    def open(self) -> None:
        """A top-level module in training has returned: what follows may be loss code."""
        if not torch.is_anomaly_enabled() and (self._context.trace is None or not self._context.traced):
            self.running = True  # first: a signal handler may raise between the two
            torch.set_anomaly_enabled(True, False)

    def reopen(self) -> None:
        """A backward pass has ended: where no module has the weights, what follows is a forward pass."""
        if self.bare:
            self._fresh = True
            self.open()

    def root_begins(self, module: nn.Module) -> bool:
        """A replay of the call will tell of its ops; within torch.func there is none, and the graph has to.

        Returns:
            Whether loss code was running.
        """
        running = self.running
        if torch._C._functorch.maybe_current_level() is not None:
            if self.supported and self._scene.enabled and torch.is_grad_enabled():
                self.open()
        elif running and (not self.bare or next(static.parameters(module), None) is not None):
            self.close()
        return running

    def _noted_bare(self) -> None:
        """Nothing else tells that a forward pass and with it a step begin, nor bounds what the whole model costs."""
        if self._fresh:
            self._fresh, self._nodes = False, 0
            self.forward_begins()
        self._scene.begin_step_if_new()
        self._nodes += 1
        if self._nodes > _MAX_BARE:
            self.bare = False
            self.close()

    def _count_anew(self) -> None:
        self._clears = self._scene.clears
        self._room, self._room_between = _MAX_WHOLE, _MAX_BETWEEN

    def close(self) -> None:
        """A top-level module or ``backward`` begins, or the step ends."""
        if self.running:
            if not torch.is_anomaly_check_nan_enabled():  # else the user has begun to look for anomalies meanwhile
                torch.set_anomaly_enabled(False, False)
            self.running = False

    def backward_begins(self, roots: list[Tensor], gradients: Any) -> None:
        """Keep the code that made the roots of a backward pass."""
        if self._context.trace is not None and self._context.traced:
            return
        if self.bare:
            self._scene.begin_step_if_new()
        losses = self._context.current.losses  # read just now
        known = losses[-1] if losses else None
        if (graph := self.graph_of(roots, gradients, known if type(known) is float else None)) is not None:
            self._scene.losses.append(graph)
            self.bare = bool(graph.weights)
            step = self._scene.calls[-1] if self._scene.calls else None
            if step is not None and type(step.module) is CompiledFunction and step.module.trains:
                step.outputs.append(
                    ("", graph.value, tensor_leaves.version(graph.value))
                )  # the value of a replay of it

    def graph_of(self, tensors: Any, gradients: Any, loss: float | None = None) -> LossGraph | None:
        """The code that made one tensor, from the graph it left; null for several tensors, or without a graph.

        ``loss`` is the tensor's value where that is known already.
        """
        roots = static.tensors(tensors)
        if len(roots) != 1 or roots[0].grad_fn is None:
            return None
        root = roots[0]
        given = static.tensors(gradients) if gradients is not None else None
        if self._clears != self._scene.clears:
            self._count_anew()
        bad = is_bad(root) if loss is None or root.numel() != 1 else not math.isfinite(loss)
        limit = _MAX_WHOLE if bad else _MAX_MEASURED if self._context.live else _MAX_NODES
        walk = _Walk(self._scene, self._kinds, min(self._room, limit))
        top = walk.node(root.grad_fn)
        self._room -= walk.count
        if type(top) is not RawNode:
            return None
        value, gradient = detached(root) if modes_open() else root.detach(), given[0] if given else None
        graph = LossGraph(self._context.micro_step, top, value, gradient, walk.cut)
        if walk.weights and walk.is_bare:
            graph.weights = walk.weights
        return graph

    def behind(self, x: Tensor) -> LossGraph | None:
        """The code between two top-level modules that made a tensor; null where it is an output as it is."""
        if self._clears != self._scene.clears:
            self._count_anew()
        if not self.supported or self._room_between <= 0 or x.grad_fn is None:
            return None
        walk = _Walk(self._scene, self._kinds, self._room_between)
        top = walk.node(x.grad_fn)
        self._room_between -= walk.count
        if type(top) is not RawNode:
            return None
        value = detached(x) if modes_open() else x.detach()
        return LossGraph(self._context.micro_step, top, value, None, walk.cut)


def is_bad(loss: Tensor) -> bool:
    """Whether it is known to be, without a wait for a device."""
    if (
        not loss.is_cpu
        or loss.numel() != 1
        or loss.is_complex()
        or tensor_leaves.is_wrapped(loss)
        or tensor_leaves.is_transformed(loss)
    ):
        return False
    with kernels.apart_from_user_modes():
        return not math.isfinite(loss.detach().item())


class _Walk:
    """Copies the part of a graph that the loss code made."""

    def __init__(self, scene: Scene, kinds: dict[type, tuple[tuple[str, str], ...]], limit: int) -> None:
        self._scene = scene
        self._kinds = kinds
        self._limit, self._foreign = limit, _MAX_FOREIGN
        self.count = 0
        self.cut = False
        self._known: dict[int, RawNode | Leaf | None] = {}
        #: Leaves met, and whether an output of a top-level module with parameters was.
        self.weights: list[Tensor] = []
        self._of_module = False
        #: An ``id`` names a node only while that is alive.
        self._held: list[Any] = []
        self._outputs: dict[tuple[int, int], tuple[RootCall, str]] = {}
        for call in scene.calls:
            for name, key in call.makers.items():
                self._outputs[key] = call, name

    @property
    def is_bare(self) -> bool:
        """Whether it has come to the weights themselves through code that was noted, past no module that has any."""
        return bool(self.weights) and not self._of_module and self._foreign == _MAX_FOREIGN

    def node(self, top: Any) -> RawNode | Leaf | None:
        """The node and all behind it, without recursion: loss code may loop."""
        if not modes_open():
            return self._copied(top)
        with kernels.apart_from_every_mode():  # it would see us read, and be given a bare number in place of a tensor
            return self._copied(top)

    def _copied(self, top: Any) -> RawNode | Leaf | None:
        found = self._one(top, 0)
        known, waiting = self._known, [(top, found)]
        while waiting:
            original, copy = waiting.pop()
            if type(copy) is not RawNode:
                continue
            for following, output in original.next_functions:
                if following is None:
                    copy.edges.append((None, output))
                    continue
                is_new = id(following) not in known
                behind = self._one(following, output)
                copy.edges.append((behind, output))
                if is_new and type(behind) is RawNode:
                    waiting.append((following, behind))
        return found

    def _one(self, node: Any, output: int) -> RawNode | Leaf | None:
        sequence, key, known = node._sequence_nr(), id(node), self._known
        made = self._outputs.get((sequence, output)) if self._outputs else None
        if made is not None and made[0].parametric:
            self._of_module = True
            return self._leaf(*made)
        if key in known:
            return known[key]
        known[key] = None
        self._held.append(node)
        if type(node) is _ACCUMULATES:
            variable = node.variable
            leaf = known[key] = Leaf("weight", variable)
            self.weights.append(variable)
            return leaf
        note = _note_on(node)
        if self.count == self._limit or (note is None and self._foreign <= 0):
            self.cut = self.cut or (note is not None and self.count == self._limit)
            return None
        self.count += 1
        self._foreign -= note is None
        saved = self._saved(node) if note is not None and not note.startswith(_HOOKED) else {}
        copy = RawNode(node.name(), note, getattr(node, "_input_metadata", None), sequence, saved, [])
        known[key] = copy
        if made is not None and (value := self._leaf(*made).value) is not None:
            copy.saved["result"] = value  # of a loss module: the code before it also counts
        return copy

    def _leaf(self, call: RootCall, name: str) -> Leaf:
        value = None
        for other, x, version in call.outputs:
            if other == name and x._version == version:
                value = x
                break
        return Leaf(f"{call.root} output {name}".strip(), value)

    def _saved(self, node: Any) -> dict[str, Any]:
        """By reference: nothing is copied, and what does not fit into ``--scene-memory`` is left out."""
        kind = type(node)
        if (names := self._kinds.get(kind)) is None:
            if isinstance(node, BackwardCFunction):
                return {"own": self._own(node)}
            found = (n for n in dir(node) if n.startswith(_SAVED))
            names = self._kinds[kind] = tuple((n, n.removeprefix(_SAVED)) for n in found)
        saved: dict[str, Any] = {}
        for name, argument in names:
            try:
                value = getattr(node, name)
            except RuntimeError as error:
                attach.let_through(error)
                continue  # freed, or written to since
            if isinstance(value, Tensor):
                if torch._C._functorch.is_functorch_wrapped_tensor(value) or not self._scene.affords(value):
                    continue
                value = value.detach()
            saved[argument] = value
        return saved

    def _own(self, node: Any) -> OwnFunction | None:
        """Of a function whose backward pass is Python; null where it cannot be run by itself, or has lost its tensors.

        Not torch's own: checkpoints, and compiled graphs, whose tensors would be held for nothing.
        """
        if len(node._input_metadata) != 1 or node._forward_cls.__module__.partition(".")[0] == "torch":
            return None
        try:
            saved = tuple(x.detach() if issubclass(type(x), Tensor) else x for x in node.saved_tensors)
        except RuntimeError as error:
            attach.let_through(error)
            return None
        attributes = dict(static.own(node))
        held = [x for x in (*saved, *attributes.values()) if issubclass(type(x), Tensor)]
        if any(tensor_leaves.is_transformed(x) or not self._scene.affords(x) for x in held):
            return None
        return OwnFunction(node._forward_cls.backward, saved, attributes, tuple(node.needs_input_grad))


def _precede(kind: Any, close: Callable[[], None]) -> None:
    """Have a context of the user's find anomaly mode as the user left it: it puts that back as it ends."""
    original = kind.__init__

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        close()
        original(self, *args, **kwargs)

    kind.__init__ = begin


def _note_on(node: Any) -> str | None:
    """What we noted at a node; null for any other node."""
    try:
        trace: list[str] | None = node.metadata.get(_KEY)
    except (AttributeError, RuntimeError) as error:
        attach.let_through(error)
        return None
    return trace[0] if trace and trace[0].startswith(_MARK) else None
