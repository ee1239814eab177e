"""What a replay of the current step needs: the arguments of every root call, and the state they were called in.

Kept by reference, for one step, within ``--scene-memory``; a healthy step pays for a few attribute reads, the states of
the random number generators, and copies of the buffers that forward passes write to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.kernels.outside_user_modes import detached, modes_open
from precdoctor.recording.model import object_copies, static, tensor_leaves
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.source_lines import Line, innermost_user_line
from precdoctor.recording.process import memory_limits
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.deliveries import Deliveries
from precdoctor.recording.scene.first_call import FirstCall, TopLevel
from precdoctor.recording.scene.state_restore import Autocast, RandomState
from precdoctor.recording.slots.deferred import is_capturing

if TYPE_CHECKING:
    from precdoctor.recording.scene.loss_graph import LossGraph, Taken

#: Root calls kept per step: rollouts and decoding loops make thousands.
_MAX_CALLS = 64
#: Share of the memory left that a tensor which is good to have may take.
_ASIDE = 1 / 16
_EXACT = frozenset(tensor_leaves.EXACT)
_functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_BASE: Any = torch._C.TensorBase
_MAKER = _BASE.grad_fn.__get__
#: Of the first arguments.
_NAMES = tuple(map(str, range(16)))


@dataclass(eq=False)
class RootCall:
    """One call of a top-level module in training."""

    module: nn.Module
    root: str
    micro_step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Each tensor leaf of the arguments and its version counter when the call began.
    versions: list[tuple[str, Tensor, int]]
    random: RandomState
    autocast: tuple[Autocast, ...]
    #: It has parameters; loss modules have none.
    parametric: bool
    #: Where the user called it.
    line: Line | None
    #: ``module`` is a copy: see ``_stand_in``.
    stand_in: bool = False
    #: ``torch.func.functional_call``: the tensors that stood for its parameters, by name.
    bound: Mapping[str, Tensor] = field(default_factory=dict)
    #: Names of those that the step has computed from others: by an inner loop, by a network that makes weights.
    computed: frozenset[str] = frozenset()
    #: Values before the call of buffers that forward passes write to, by ``id``.
    buffers: Mapping[int, Tensor] = field(default_factory=dict)
    #: Names of parameters that forward passes write to; and of the call that was the first, what it found.
    writes: frozenset[str] = frozenset()
    first: FirstCall | None = None
    #: Of later calls, copies of those parameters from before.
    before: Mapping[str, Tensor] = field(default_factory=dict)
    #: Output leaves with their version counters, and the gradients the backward pass brought to them.
    outputs: list[tuple[str, Tensor, int]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    #: Outputs that got a gradient for which there was no room; the loss code may bring it again.
    lost: set[str] = field(default_factory=set)
    #: The same for each call of ``torch.autograd.grad``, by its number in the step.
    taken: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    #: Which autograd node made each output: its sequence number, and the number of the output.
    makers: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Of arguments that the code after another top-level module made: how, as far as autograd's graph tells.
    graphs: list[LossGraph] = field(default_factory=list)
    #: What is known of the module.
    known: TopLevel | None = None
    #: Objects that are no modules, and whose attributes a replay may write to.
    owners: tuple[object, ...] = ()

    @property
    def prepares_data(self) -> bool:
        """Nothing in it is trained and no gradient reaches it: a transform of torchvision, called sample by sample.

        What becomes of its result is an argument of another call, and kept there.
        """
        return self.stand_in and not self.makers

    @property
    def changed(self) -> list[str]:
        """Arguments written to since the call began."""
        return [name for name, x, version in self.versions if tensor_leaves.version(x) != version]


class Scene:
    """The calls of the current step."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.calls: list[RootCall] = []
        #: The loss code of each backward pass.
        self.losses: list[LossGraph] = []
        #: What ``torch.autograd.grad`` was given, call by call, and the number of the call that runs.
        self.taken: list[Taken] = []
        self.taking: int | None = None
        #: A top-level module was called inside torch.func (grad, vmap, jvp ...): such a call is not kept.
        self.transformed = False
        #: Why the step cannot be replayed, if it cannot.
        self.refused: str | None = None
        self._left: float = memory_limits.for_scene(context.options)
        self._storages: set[int] = set()
        self._step = -1
        self._known: static.ByIdentity[nn.Module, TopLevel] = static.ByIdentity()
        #: Some caller or forward writes into the arguments: from now on they are copied.
        self._copying = False
        #: Whether a step that begins is to be kept whatever it takes.
        self.unlimited_at: Callable[[int], bool] | None = None
        self.enabled = context.options.on_nonfinite != "observe" or context.options.scene_memory != 0
        self._keep = guarded(context)(self._gradient)
        #: The code behind a tensor.
        self.graph_behind: Callable[[Tensor], LossGraph | None] = lambda _x: None
        self.deliveries = Deliveries(context)
        #: How often everything was let go of, and who is told.
        self.clears = 0
        self.when_cleared: list[Callable[[], None]] = []
        context.when_forked.append(self.clear)

    def clear(self) -> None:
        """Let go of everything: the step is over."""
        for call in () if self._copying else self.calls:
            for _, x, version in call.versions:
                if tensor_leaves.version(x) != version:
                    self._copying = True
        self.calls = []
        self.losses = []
        self.taken = []
        self.taking = None
        self.clears += 1
        for told in self.when_cleared:
            told()
        self.refused, self.transformed = None, False
        self._left = memory_limits.for_scene(self._context.options)
        self._storages.clear()

    # --- root calls --------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, root: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RootCall | None:
        """A top-level module is called in training; null when the call is not kept."""
        if self._context.current.step != self._step:
            self.begin_step_if_new()
        if self.refused is not None:
            return None
        if is_capturing():
            self._refuse("a CUDA graph was captured in the step")
            return None
        if _functorch_level() is not None:
            self.transformed = True  # the graph around it may still be known
            return None
        if len(self.calls) >= _MAX_CALLS:
            self.calls = [call for call in self.calls if not call.prepares_data]
        known = self._known.get(module) or self._known.put(module, TopLevel(module))
        if known.why_not is not None or len(self.calls) >= _MAX_CALLS:
            self._refuse(known.why_not or f"the step calls top-level modules more than {_MAX_CALLS} times")
            return None
        given_as, first = (args, kwargs), known.first(module)
        stand_in = _stand_in(module) if first is None else None
        args, kwargs, versions = self._kept(args, kwargs)
        call = RootCall(
            module if stand_in is None else stand_in,
            root,
            self._context.micro_step,
            args,
            kwargs,
            versions,
            RandomState.now(known.devices(module, first) if first is not None and first.is_cuda else ()),
            Autocast.now(),
            first is not None,
            innermost_user_line(),
            stand_in=stand_in is not None,
        )
        if first is not None and not issubclass(type(first), nn.Parameter):
            keep = _copied if self._copying else _without_graph
            own = dict(static.named_parameters(module))
            call.bound = {name: keep(x) for name, x in own.items()}
            call.computed = frozenset(name for name, x in own.items() if x.grad_fn is not None)
        for _, x, _ in versions:
            self._afford(x)
        for x in call.bound.values():
            self._afford(x)
        if self._left < 0:
            self._refuse("its inputs exceed --scene-memory")
            return None
        call.known, call.writes = known, known.writes
        if known.buffers.there or known.writes:
            self._copy_written(call, module, known)
        if not known.called and stand_in is None and not call.bound:
            known.called, call.first = True, FirstCall(module)
        if self.calls:
            call.graphs = list(self._graphs_behind(given_as))
        self.calls.append(call)
        return call

    def earlier(self, buffer: Tensor) -> Tensor | None:
        """Its values before the first call of the step that may have written to it; null where none are kept."""
        return next((c.buffers[id(buffer)] for c in self.calls if id(buffer) in c.buffers), None)

    def _kept(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, Tensor, int]]]:
        """Arguments to keep, and their tensors with version counters."""
        keep = _copied if self._copying else _without_graph
        if not kwargs and _EXACT.issuperset(map(type, args)) and len(args) < len(_NAMES):  # most often
            if self._copying or any(map(_MAKER, args)):
                args = tuple(map(keep, args))
            versions = []
            for name, x in zip(_NAMES, args, strict=False):
                versions.append((name, x, -1 if x.is_inference() else x._version))
            return args, {}, versions
        args, kwargs = (tensor_leaves.mapped(x, keep, objects=True) for x in (args, dict(kwargs)))
        given = tensor_leaves.tensors({**dict(enumerate(args)), **kwargs}, objects=True)
        return args, dict(kwargs), [(name, x, tensor_leaves.version(x)) for name, x in given]

    def _copy_written(self, call: RootCall, module: nn.Module, known: TopLevel) -> None:
        with kernels.apart_from_user_modes():
            call.buffers = known.buffers.before(self.affords)
            call.before = {
                name: p.detach().clone()
                for name, p in (static.named_parameters(unwrap(module)) if known.writes else ())
                if name in known.writes and self.affords(p, _ASIDE)
            }

    def _graphs_behind(self, arguments: tuple[Any, Any]) -> Iterator[LossGraph]:
        for name, x in tensor_leaves.tensors(arguments, objects=True):
            if x.grad_fn is not None and (graph := self.graph_behind(x)) is not None:
                graph.argument = name
                yield graph

    def leave(self, call: RootCall, result: Any) -> None:
        """The call has returned: hook the gradients of its outputs."""
        alone = type(result) is Tensor and result.dtype.is_floating_point
        for name, x in (("", result),) if alone and _functorch_level() is None else tensor_leaves.floating(result):
            if self.affords(x):
                call.outputs.append((name, detached(x) if modes_open() else x.detach(), tensor_leaves.version(x)))
            if x.requires_grad and x.grad_fn is not None:
                call.makers[name] = (x.grad_fn._sequence_nr(), x.output_nr)
                x.register_hook(self._hook(call, name))
        known = call.known if not call.stand_in else None
        if known is not None and known.buffers.there:
            known.buffers.after()
        if call.first is not None and known is not None:
            known.writes = call.writes = call.first.ends()
            call.first = call.first if call.writes else None

    def _hook(self, call: RootCall, name: str) -> Callable[[Tensor | None], None]:
        keep = self._keep

        def precdoctor_root_grad(grad: Tensor | None) -> None:
            if grad is not None:
                keep(call, name, grad)

        return precdoctor_root_grad

    def _gradient(self, call: RootCall, name: str, grad: Tensor) -> None:
        if call not in self.calls:
            return  # of a graph kept from an earlier step
        if self.taking is not None:
            if self.affords(grad):
                call.taken.setdefault(self.taking, {})[name] = detached(grad) if modes_open() else grad.detach()
        elif not self._context.in_backward:
            return
        elif self.affords(grad):
            call.gradients[name] = detached(grad) if modes_open() else grad.detach()
        else:
            call.lost.add(name)

    # --- limits ------------------------------------------------------------------------------------------------------

    def begin_step_if_new(self) -> None:
        """Let go of the step before."""
        if (step := self._context.current.step) != self._step:
            self._step = step
            self.clear()
            if self.unlimited_at is not None and self.unlimited_at(step):
                self._left = math.inf

    def why_not_now(self) -> str | None:
        """Why the step cannot be replayed at this moment; null when it can."""
        if self.refused is None and not (self.calls or self.losses or self.taken):
            inside = "the model runs inside torch.func (grad, vmap, jvp ...)" if self.transformed else None
            return inside or "no module was called in the step"
        kept = (x for call in self.calls for _, x, _ in (*call.versions, *call.outputs))
        return self.refused or memory_limits.lack(x.device for x in kept)

    def _refuse(self, why: str) -> None:
        self.clear()
        self.refused = why

    def _afford(self, x: Tensor) -> None:
        """Count a tensor's memory, once per storage."""
        if x.layout is not torch.strided or (type(x) not in _EXACT and tensor_leaves.is_wrapped(x)):
            return
        if (storage := x.untyped_storage())._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._left -= storage.nbytes()

    def affords(self, x: Tensor, share: float = 1.0) -> bool:
        """Count a tensor's memory if there is room for it in a share of what is left; keeping it is optional."""
        if (type(x) not in _EXACT and tensor_leaves.is_wrapped(x)) or x.layout is not torch.strided:
            return True
        storage = x.untyped_storage()
        if (key := storage._cdata) in self._storages:
            return self._left >= 0
        if (size := storage.nbytes()) > self._left * share:
            return False
        self._storages.add(key)
        self._left -= size
        return True

    def has_room(self, value: Any) -> bool:
        """Whether every tensor in it can be kept."""
        dense = [
            x for _, x in tensor_leaves.tensors(value) if x.layout is torch.strided and not tensor_leaves.is_wrapped(x)
        ]
        sizes = {s._cdata: s.nbytes() for s in (x.untyped_storage() for x in dense)}
        return sum(n for key, n in sizes.items() if key not in self._storages) <= self._left


def _stand_in(module: nn.Module) -> nn.Module | None:
    """A shallow copy of a module without parameters and buffers, where there can be one.

    Loss modules made anew at each step share one root name once they are gone (``module_names``): none is kept.
    """
    if any(True for _ in static.parameters(module)) or any(True for _ in static.buffers(module)):
        return None
    try:
        twin: nn.Module = object_copies.shallow_copy(module)
    except object_copies.UnreadableError:
        return None
    return twin


def _without_graph(x: Tensor) -> Tensor:
    """A tensor that belongs to a graph is detached: the graph must not be kept alive."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().requires_grad_(x.requires_grad) if x.grad_fn is not None else x


def _copied(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().clone().requires_grad_(x.requires_grad)
