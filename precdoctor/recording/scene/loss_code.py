"""Captures the loss code: what runs between the last top-level module and ``backward``, seen only in autograd's graph.

Anomaly mode is used to note the user's line at every node that autograd makes: one line (about 5 us) in place of
torch's traceback (0.1 ms), with no checks and no output. As ``backward`` begins, the nodes and the tensors they saved
are kept by reference, within ``--scene-memory``, until the step ends.
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
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene import saved_hooks
from precdoctor.recording.scene.compiled_function import CompiledFunction
from precdoctor.recording.scene.line_notes import HOOKED, LineNotes, note_on
from precdoctor.recording.scene.loss_graph import Leaf, LossGraph, LossNode, OwnFunction
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.step_snapshot import Scene

#: Maximum number of nodes kept per backward pass, and of those without our note; each takes about 10 us.
_MAX_NODES, _MAX_FOREIGN = 384, 24
#: The same on sampled steps (the recording budget pays), and for a non-finite loss, whose graph is kept nearly whole.
_MAX_MEASURED, _MAX_WHOLE = 1 << 11, 1 << 14
#: Maximum number of nodes per step for code between top-level modules.
_MAX_BETWEEN = 128
#: Maximum number of nodes noted per forward pass of a script whose weights are in no module; beyond it, noting ends.
_MAX_BARE = 1 << 13
_SAVED = "_saved_"
_ACCUMULATES: Any = vars(torch._C._functions).get("AccumulateGrad")


class LossCode:
    """Notes source lines while loss code runs, and keeps its graph as ``backward`` begins."""

    def __init__(self, context: StepContext, scene: Scene) -> None:
        self._context = context
        self._scene = scene
        #: Whether nodes are being noted.
        self.running = False
        #: Whether, as far as is known, no module holds the weights: the whole model is code that no hook sees.
        self.bare = False
        #: If bare: whether no forward pass has begun since ``backward``; nodes noted in it; called as it begins.
        self._fresh, self._nodes = False, 0
        self.forward_begins: Callable[[], None] = lambda: None
        #: By type of node: the names of its attributes with saved tensors, and of the op's arguments saved there.
        self._kinds: dict[type, tuple[tuple[str, str], ...]] = {}
        #: Numbers of nodes that may still be kept in this step.
        self._room, self._room_between = _MAX_WHOLE, _MAX_BETWEEN
        scene.when_cleared.append(self._reset_limits)
        scene.graph_behind = self.behind
        context.when_closing.append(self.close)
        context.when_forked.append(self._reset)
        self._note = guarded(context)(self._noted_bare)
        self.supported = self.bare = scene.enabled and self._install()

    def _install(self) -> bool:
        """Make autograd note our line at a node in place of a traceback; return False if this torch cannot."""
        original: Callable[[], list[str]] | None = getattr(stored_traces, "format_stack", None)
        if original is None or not hasattr(torch, "set_anomaly_enabled"):
            return False

        notes, frame_of, has_hooks, is_noting = LineNotes(), sys._getframe, saved_hooks.active, self._is_noting

        def format_stack() -> list[str]:
            if not is_noting():
                return original()
            if self.bare:
                self._note()
            frame = frame_of().f_back  # None in autograd's device threads (double backward)
            hooked = has_hooks()
            if frame is not None and not hooked:
                code, instruction = frame.f_code, frame.f_lasti
                if (known := notes.cached.get((id(code), instruction))) is not None:
                    return known[0]
                if (back := frame.f_back) is not None:
                    place = (id(code), instruction, id(back.f_code), back.f_lasti)
                    if (known := notes.cached.get(place)) is not None:
                        return known[0]
            return notes.note_for(frame, hooked=bool(hooked))

        stored_traces.format_stack = format_stack
        for kind in (torch.autograd.detect_anomaly, torch.autograd.set_detect_anomaly):
            _turn_off_before(kind, self.close)
        self.open()
        x = (torch.ones((), requires_grad=True) * 2.0).grad_fn
        works = x is not None and note_on(x) is not None
        if not works:
            self.close()
            stored_traces.format_stack = original
        return works

    def _reset(self) -> None:
        """Reset the state in a forked child, or for another run in this process."""
        self.close()
        self.bare, self._fresh, self._nodes = self.supported, False, 0
        if self.supported:
            self.open()

    def _is_noting(self) -> bool:
        """Return whether to note a node: not while compiling, nor in the user's own ``detect_anomaly``."""
        if not self.running or torch.compiler.is_compiling() or torch.is_anomaly_check_nan_enabled():
            return False
        if self._context.state == "off":  # nobody will read the notes
            self.close()
            return False
        return True

    @property
    def weights(self) -> list[Tensor]:
        """The leaves of the last backward pass if no module holds the weights; else empty."""
        return self._scene.losses[-1].weights if self.bare and self._scene.losses else []

    @property
    def awaits_backward(self) -> bool:
        """Whether no module holds the weights, and a forward pass has begun since the last backward pass."""
        return self.bare and not self._fresh

    def open(self) -> None:
        """Begin to note nodes: a top-level module in training has returned, so loss code may follow."""
        if not torch.is_anomaly_enabled() and (self._context.trace is None or not self._context.traced):
            self.running = True  # first: a signal handler may raise between the two lines, and close() needs the flag
            torch.set_anomaly_enabled(True, False)

    def reopen(self) -> None:
        """Begin to note nodes after a backward pass if no module holds the weights: a forward pass follows."""
        if self.bare:
            self._fresh = True
            self.open()

    def root_begins(self, module: nn.Module) -> bool:
        """Stop noting: a replay of the root call will show its ops. Return whether nodes were being noted.

        Inside torch.func nothing is replayed: noting begins. In a bare script a module without weights changes nothing.
        """
        running = self.running
        if torch._C._functorch.maybe_current_level() is not None:
            if self.supported and self._scene.enabled and torch.is_grad_enabled():
                self.open()
        elif running and (not self.bare or next(static.parameters(module), None) is not None):
            self.close()
        return running

    def _noted_bare(self) -> None:
        """Count a node of a bare model; its first one begins the forward pass and the step. Too many end the noting."""
        if self._fresh:
            self._fresh, self._nodes = False, 0
            self.forward_begins()
        self._scene.begin_step_if_new()
        self._nodes += 1
        if self._nodes > _MAX_BARE:
            self.bare = False
            self.close()

    def _reset_limits(self) -> None:
        """Reset the limits of nodes: the scene was cleared."""
        self._room, self._room_between = _MAX_WHOLE, _MAX_BETWEEN

    def close(self) -> None:
        """Stop noting: a top-level module or ``backward`` begins, or the step ends."""
        if self.running:
            if not torch.is_anomaly_check_nan_enabled():  # else the user has turned anomaly mode on meanwhile
                torch.set_anomaly_enabled(False, False)
            self.running = False

    def backward_begins(self, roots: list[Tensor], gradients: Any) -> None:
        """Keep the graph of the loss code as a backward pass begins."""
        if self._context.trace is not None and self._context.traced:
            return
        if self.bare:
            self._scene.begin_step_if_new()
        losses = self._context.current.losses  # their values were read a moment ago
        known = losses[-1] if losses else None
        if (graph := self.graph_of(roots, gradients, known if type(known) is float else None)) is not None:
            self._scene.losses.append(graph)
            self.bare = bool(graph.weights)
            step = self._scene.calls[-1] if self._scene.calls else None
            if step is not None and type(step.module) is CompiledFunction and step.module.trains:
                step.outputs.append(
                    ("", graph.value, tensor_leaves.version(graph.value))
                )  # a replay of the train step returns the loss

    def graph_of(self, tensors: Any, gradients: Any, loss: float | None = None) -> LossGraph | None:
        """Return the graph of the code that computed a tensor; None for several tensors, or if no code did.

        ``loss`` is the tensor's value if it is known already.
        """
        roots = static.tensors(tensors)
        if len(roots) != 1 or roots[0].grad_fn is None:
            return None
        root = roots[0]
        given = static.tensors(gradients) if gradients is not None else None
        bad = is_bad(root) if loss is None or root.numel() != 1 else not math.isfinite(loss)
        limit = _MAX_WHOLE if bad else _MAX_MEASURED if self._context.live else _MAX_NODES
        walk = _Walk(self._scene, self._kinds, min(self._room, limit))
        top = walk.node(root.grad_fn)
        self._room -= walk.count
        if type(top) is not LossNode:
            return None
        value, gradient = detached(root) if modes_open() else root.detach(), given[0] if given else None
        graph = LossGraph(self._context.micro_step, top, value, gradient, walk.cut)
        if walk.weights and walk.is_bare:
            graph.weights = walk.weights
        return graph

    def behind(self, x: Tensor) -> LossGraph | None:
        """Return the graph of code between two modules that made a tensor; None if none did, or no room is left."""
        if not self.supported or self._room_between <= 0 or x.grad_fn is None:
            return None
        walk = _Walk(self._scene, self._kinds, self._room_between)
        top = walk.node(x.grad_fn)
        self._room_between -= walk.count
        if type(top) is not LossNode:
            return None
        value = detached(x) if modes_open() else x.detach()
        return LossGraph(self._context.micro_step, top, value, None, walk.cut)


def is_bad(loss: Tensor) -> bool:
    """Return whether a loss is non-finite. Never waits for a device: all but plain scalars on the CPU count as good."""
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
    """Copies the part of an autograd graph that the loss code made."""

    def __init__(self, scene: Scene, kinds: dict[type, tuple[tuple[str, str], ...]], limit: int) -> None:
        self._scene = scene
        self._kinds = kinds
        self._limit, self._foreign = limit, _MAX_FOREIGN
        self.count = 0
        self.cut = False
        self._copies: dict[int, LossNode | Leaf | None] = {}
        #: Leaf parameters met, and whether an output of a top-level module with parameters was met.
        self.weights: list[Tensor] = []
        self._met_module = False
        #: Keeps nodes alive: an ``id`` identifies a node only while it exists.
        self._keep_alive: list[Any] = []
        self._outputs: dict[tuple[int, int], tuple[RootCall, str]] = {}
        for call in scene.calls:
            for name, key in call.makers.items():
                self._outputs[key] = call, name

    @property
    def is_bare(self) -> bool:
        """Whether it reached weights through noted code only, passing no module with parameters."""
        return bool(self.weights) and not self._met_module and self._foreign == _MAX_FOREIGN

    def node(self, top: Any) -> LossNode | Leaf | None:
        """Return a copy of the node and of all nodes behind it; without recursion, because loops make deep graphs."""
        if not modes_open():
            return self._copy_graph(top)
        with kernels.apart_from_every_mode():  # a user's mode would see our reads, and get a plain number for a tensor
            return self._copy_graph(top)

    def _copy_graph(self, top: Any) -> LossNode | Leaf | None:
        first = self._copy_of(top, 0)
        copies, waiting = self._copies, [(top, first)]
        while waiting:
            original, copy = waiting.pop()
            if type(copy) is not LossNode:
                continue
            for following, output in original.next_functions:
                if following is None:
                    copy.edges.append((None, output))
                    continue
                is_new = id(following) not in copies
                behind = self._copy_of(following, output)
                copy.edges.append((behind, output))
                if is_new and type(behind) is LossNode:
                    waiting.append((following, behind))
        return first

    def _copy_of(self, node: Any, output: int) -> LossNode | Leaf | None:
        """Return a copy of one node, without edges; None if it is beyond the limits, or was so when first met."""
        sequence, key, copies = node._sequence_nr(), id(node), self._copies
        output_of = self._outputs.get((sequence, output)) if self._outputs else None
        if output_of is not None and output_of[0].parametric:
            self._met_module = True
            return self._leaf(*output_of)
        if key in copies:
            return copies[key]
        copies[key] = None
        self._keep_alive.append(node)
        if type(node) is _ACCUMULATES:
            variable = node.variable
            leaf = copies[key] = Leaf("weight", variable)
            self.weights.append(variable)
            return leaf
        note = note_on(node)
        if self.count == self._limit or (note is None and self._foreign <= 0):
            self.cut = self.cut or (note is not None and self.count == self._limit)
            return None
        self.count += 1
        self._foreign -= note is None
        saved = self._saved(node) if note is not None and not note.startswith(HOOKED) else {}
        copy = LossNode(node.name(), note, getattr(node, "_input_metadata", None), sequence, saved, [])
        copies[key] = copy
        if output_of is not None and (value := self._leaf(*output_of).value) is not None:
            copy.saved["result"] = value  # the node is the output of a loss module; go on: code before it also counts
        return copy

    def _leaf(self, call: RootCall, name: str) -> Leaf:
        """Return an output of a root call as a leaf; without a value if it was not kept or was written to."""
        value = None
        for other, x, version in call.outputs:
            if other == name and x._version == version:
                value = x
                break
        return Leaf(f"{call.root} output {name}".strip(), value)

    def _saved(self, node: Any) -> dict[str, Any]:
        """Return what the node saved, by reference; leaves out what does not fit into ``--scene-memory``."""
        kind = type(node)
        if (names := self._kinds.get(kind)) is None:
            if isinstance(node, BackwardCFunction):
                return {"own": self._own_function(node)}
            found = (n for n in dir(node) if n.startswith(_SAVED))
            names = self._kinds[kind] = tuple((n, n.removeprefix(_SAVED)) for n in found)
        saved: dict[str, Any] = {}
        for name, argument in names:
            try:
                value = getattr(node, name)
            except RuntimeError as error:
                attach.let_through(error)
                continue  # the tensor was freed, or written to in place
            if isinstance(value, Tensor):
                if torch._C._functorch.is_functorch_wrapped_tensor(value) or not self._scene.affords(value):
                    continue
                value = value.detach()
            saved[argument] = value
        return saved

    def _own_function(self, node: Any) -> OwnFunction | None:
        """Return what a rerun of a Python backward pass needs; None if it cannot be rerun, or its tensors are freed.

        Excludes torch's own: checkpoints, and compiled graphs, whose tensors would be held for nothing.
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


def _turn_off_before(kind: Any, close: Callable[[], None]) -> None:
    """Patch a context manager: turn our anomaly mode off before it saves the mode, so that it restores the user's."""
    original = kind.__init__

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        close()
        original(self, *args, **kwargs)

    kind.__init__ = begin
