"""What a replay of the current step needs: the arguments of every root call and the state the call found.

Kept by reference until the step ends, within ``--scene-memory``. A healthy step pays for a few attribute reads, the
states of the random number generators, and copies of the buffers that forward passes write to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.kernels.outside_user_modes import detached, modes_open
from precdoctor.recording.model import object_copies, static, tensor_leaves
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.source_lines import innermost_user_line
from precdoctor.recording.process import memory_limits
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.deliveries import Deliveries
from precdoctor.recording.scene.root_call import FirstCall, RootCall, TopLevel
from precdoctor.recording.scene.state_restore import Autocast, RandomState
from precdoctor.recording.slots.deferred import is_capturing

if TYPE_CHECKING:
    from precdoctor.recording.scene.loss_graph import GradCall, LossGraph

#: Root calls kept per step: rollouts and decoding loops make thousands.
_MAX_CALLS = 64
#: Largest share of the remaining scene memory for a tensor that a replay can do without.
_OPTIONAL_SHARE = 1 / 16
_EXACT = frozenset(tensor_leaves.EXACT)
_functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_BATCHED: Final = tensor_leaves.is_batched
_BASE: Any = torch._C.TensorBase
_MAKER = _BASE.grad_fn.__get__
#: Names of the first positional arguments.
_NAMES = tuple(map(str, range(16)))


class Scene:
    """The root calls, loss graphs and ``torch.autograd.grad`` calls of the current step."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.calls: list[RootCall] = []
        #: The loss code of each backward pass.
        self.losses: list[LossGraph] = []
        #: Calls of ``torch.autograd.grad``, and the number of the one that is running.
        self.grad_calls: list[GradCall] = []
        self.running_grad_call: int | None = None
        #: Whether a top-level module was called inside torch.func (grad, vmap, jvp ...): such calls are not kept.
        self.transformed = False
        #: Why the step cannot be replayed, if it cannot.
        self.refused: str | None = None
        self._bytes_left: float = memory_limits.for_scene(context.options)
        self._storages: set[int] = set()
        self._step = -1
        self._top_levels: static.ByIdentity[nn.Module, TopLevel] = static.ByIdentity()
        #: Whether arguments are copied: from the first time that a caller or a forward pass has written to them.
        self._copying = False
        #: Returns whether a step that begins is exempt from the memory limit.
        self.unlimited_at: Callable[[int], bool] | None = None
        self.enabled = context.options.on_nonfinite != "observe" or context.options.scene_memory != 0
        self._keep = guarded(context)(self._gradient)
        #: Returns the graph of the code that computed a tensor; set by :class:`LossCode`.
        self.graph_behind: Callable[[Tensor], LossGraph | None] = lambda _x: None
        #: Called before the step is refused because it calls modules too often.
        self.when_full: Callable[[], object] = lambda: None
        self.deliveries = Deliveries(context)
        #: Callbacks that :meth:`clear` runs.
        self.when_cleared: list[Callable[[], None]] = []
        context.when_forked.append(self.clear)

    def clear(self) -> None:
        """Release everything that is kept: the step is over."""
        for call in () if self._copying else self.calls:
            for _, x, version in call.versions:
                if tensor_leaves.version(x) != version:
                    self._copying = True
        self.calls = []
        self.losses = []
        self.grad_calls = []
        self.running_grad_call = None
        for callback in self.when_cleared:
            callback()
        self.refused, self.transformed = None, False
        self._bytes_left = memory_limits.for_scene(self._context.options)
        self._storages.clear()

    # --- root calls --------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, root: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RootCall | None:
        """Keep a call of a top-level module in training; return None if it is not kept."""
        if self._context.current.step != self._step:
            self.begin_step_if_new()
        if self.refused is not None or is_capturing() or _functorch_level() is not None:
            self._note_unkept()
            return None
        if len(self.calls) >= _MAX_CALLS:
            self._make_room()
        top_level = self._top_levels.get(module) or self._top_levels.put(module, TopLevel(module))
        if top_level.why_not is not None or len(self.calls) >= _MAX_CALLS:
            self._refuse(top_level.why_not or f"the step calls top-level modules more than {_MAX_CALLS} times")
            return None
        without_gradients = not torch.is_grad_enabled()
        if without_gradients and self.calls and not self.has_room((args, kwargs)):
            return None  # not a refusal: the calls that are kept can still be examined
        given_as, first = (args, kwargs), top_level.first(module)
        stand_in = _stand_in(module) if first is None else None
        args, kwargs, versions = self._kept_arguments(args, kwargs)
        call = RootCall(
            module if stand_in is None else stand_in,
            root,
            self._context.micro_step,
            args,
            kwargs,
            versions,
            RandomState.now(top_level.devices(module, first) if first is not None and first.is_cuda else ()),
            Autocast.now(),
            first is not None,
            innermost_user_line(),
            stand_in=stand_in is not None,
            without_gradients=without_gradients,
        )
        if first is not None and not issubclass(type(first), nn.Parameter):
            keep = _copied if self._copying else _without_graph
            parameters = dict(static.named_parameters(module))
            call.bound = {name: keep(x) for name, x in parameters.items()}
            call.computed = frozenset(name for name, x in parameters.items() if x.grad_fn is not None)
        for _, x, _ in versions:
            self.affords(x, None)
        for x in call.bound.values():
            self.affords(x, None)
        if self._bytes_left < 0:
            self._refuse("its inputs exceed --scene-memory")
            return None
        call.top_level, call.writes = top_level, top_level.writes
        if top_level.buffers.has_any or top_level.writes:
            self._copy_written(call, module, top_level)
        if not top_level.called and stand_in is None and not call.bound:
            top_level.called, call.first = True, FirstCall(module)
        if self.calls:
            call.graphs = list(self._graphs_behind(given_as))
        self.calls.append(call)
        return call

    def _note_unkept(self) -> None:
        """Note why a call is not kept: it refuses the step if a CUDA graph is captured."""
        if self.refused is None and is_capturing():
            self._refuse("a CUDA graph was captured in the step")
        elif self.refused is None:
            self.transformed = True  # not a refusal: the loss code around the call can still be examined

    def _make_room(self) -> None:
        """Release calls, because too many are kept: those that only prepare data, or the older half without gradients.

        An ODE solver calls its function hundreds of times, and ends soon after a value that is not finite.
        """
        self.calls = [call for call in self.calls if not call.prepares_data]
        if len(self.calls) >= _MAX_CALLS:
            free = [call for call in self.calls if call.without_gradients]
            released = set(map(id, free[: (len(free) + 1) // 2]))
            self.calls = [call for call in self.calls if id(call) not in released]
        if len(self.calls) >= _MAX_CALLS:
            self.when_full()

    @property
    def calls_in_progress(self) -> list[RootCall]:
        """The calls kept of the step in progress; those of the step before are kept until a module is called again."""
        return self.calls if self._step == self._context.current.step else []

    def earlier(self, buffer: Tensor) -> Tensor | None:
        """Return a buffer's values from before the first call that may have written to it; None if none are kept."""
        return next((c.buffers[id(buffer)] for c in self.calls if id(buffer) in c.buffers), None)

    def _kept_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, Tensor, int]]]:
        """Return positional and keyword arguments to keep, and (name, tensor, version counter) of their tensors."""
        keep = _copied if self._copying else _without_graph
        if not kwargs and _EXACT.issuperset(map(type, args)) and len(args) < len(_NAMES):  # the usual case
            if self._copying or any(map(_MAKER, args)):
                args = tuple(map(keep, args))
            versions = []
            for name, x in zip(_NAMES, args, strict=False):
                versions.append((name, x, -1 if x.is_inference() else x._version))
            return args, {}, versions
        args, kwargs = (tensor_leaves.mapped(x, keep, objects=True) for x in (args, dict(kwargs)))
        given = tensor_leaves.tensors({**dict(enumerate(args)), **kwargs}, objects=True)
        return args, dict(kwargs), [(name, x, tensor_leaves.version(x)) for name, x in given]

    def _copy_written(self, call: RootCall, module: nn.Module, top_level: TopLevel) -> None:
        """Copy the buffers and parameters that forward passes of the module write to."""
        with kernels.apart_from_user_modes():
            call.buffers = top_level.buffers.before(self.affords)
            call.before = {
                name: p.detach().clone()
                for name, p in (static.named_parameters(unwrap(module)) if top_level.writes else ())
                if name in top_level.writes and self.affords(p, _OPTIONAL_SHARE)
            }

    def _graphs_behind(self, arguments: tuple[Any, Any]) -> Iterator[LossGraph]:
        """Yield the graphs of arguments that code between top-level modules has computed."""
        for name, x in tensor_leaves.tensors(arguments, objects=True):
            if x.grad_fn is not None and (graph := self.graph_behind(x)) is not None:
                graph.argument = name
                yield graph

    def leave(self, call: RootCall, result: Any) -> None:
        """Keep the outputs of a call that has returned, and hook their gradients."""
        call.returned = True
        alone = type(result) is Tensor and result.dtype.is_floating_point
        for name, x in (("", result),) if alone and _functorch_level() is None else tensor_leaves.floating(result):
            if self.affords(x):
                call.outputs.append((name, detached(x) if modes_open() else x.detach(), tensor_leaves.version(x)))
            if x.requires_grad and x.grad_fn is not None:
                call.makers[name] = (x.grad_fn._sequence_nr(), x.output_nr)
                x.register_hook(self._hook(call, name))
        top_level = call.top_level if not call.stand_in else None
        if top_level is not None and top_level.buffers.has_any:
            top_level.buffers.after()
        if call.first is not None and top_level is not None:
            top_level.writes = call.writes = call.first.written_parameters()
            call.first = call.first if call.writes else None

    def _hook(self, call: RootCall, name: str) -> Callable[[Tensor | None], None]:
        keep = self._keep

        def precdoctor_root_grad(grad: Tensor | None) -> None:
            if grad is not None:
                keep(call, name, grad)

        return precdoctor_root_grad

    def _gradient(self, call: RootCall, name: str, grad: Tensor) -> None:
        """Keep the gradient of an output if ``backward`` or ``torch.autograd.grad`` is running."""
        if call not in self.calls:
            return  # the user runs backward through a graph of an earlier step
        if self.running_grad_call is not None:
            if self.affords(grad):
                call.grad_call_gradients.setdefault(self.running_grad_call, {})[name] = (
                    detached(grad) if modes_open() else grad.detach()
                )
        elif not self._context.in_backward:
            return
        elif self.affords(grad):
            call.gradients[name] = detached(grad) if modes_open() else grad.detach()
        else:
            call.lost.add(name)

    # --- limits ------------------------------------------------------------------------------------------------------

    def begin_step_if_new(self) -> None:
        """Clear the scene if a new step has begun."""
        if (step := self._context.current.step) != self._step:
            self._step = step
            self.clear()
            if self.unlimited_at is not None and self.unlimited_at(step):
                self._bytes_left = math.inf

    def why_not_now(self) -> str | None:
        """Return why the step cannot be replayed at this moment; None if it can."""
        if self.refused is None and not (self.calls or self.losses or self.grad_calls):
            inside = "the model runs inside torch.func (grad, vmap, jvp ...)" if self.transformed else None
            return inside or "no module was called in the step"
        kept = (x for call in self.calls for _, x, _ in (*call.versions, *call.outputs))
        return self.refused or memory_limits.lack(x.device for x in kept)

    def _refuse(self, why: str) -> None:
        """Release everything and keep nothing more of this step."""
        self.clear()
        self.refused = why

    def affords(self, x: Tensor, share: float | None = 1.0) -> bool:
        """Return whether a tensor fits into ``share`` of the memory left, and subtract its memory if it does.

        True for wrapped and non-strided tensors, which are not counted; false for batched ones, which end with their
        batch. With a share of None its memory is subtracted anyway; what is left may become negative.
        """
        if _BATCHED(x):
            return False
        if (type(x) not in _EXACT and tensor_leaves.is_wrapped(x)) or x.layout is not torch.strided:
            return True
        storage = x.untyped_storage()
        if (key := storage._cdata) in self._storages:
            return self._bytes_left >= 0
        size = storage.nbytes()
        if share is not None and size > self._bytes_left * share:
            return False
        self._storages.add(key)
        self._bytes_left -= size
        return True

    def has_room(self, value: Any) -> bool:
        """Return whether all tensors in a value would fit together; subtracts nothing."""
        dense = [x for _, x in tensor_leaves.tensors(value) if tensor_leaves.is_strided(x)]
        sizes = {s._cdata: s.nbytes() for s in (x.untyped_storage() for x in dense)}
        return sum(n for key, n in sizes.items() if key not in self._storages) <= self._bytes_left


def _stand_in(module: nn.Module) -> nn.Module | None:
    """Return a shallow copy of a module that has neither parameters nor buffers; None if it has, or cannot be copied.

    The original must not be kept alive: loss modules created anew in each step share a root name only once their
    predecessor is gone (``module_names``).
    """
    if any(True for _ in static.parameters(module)) or any(True for _ in static.buffers(module)):
        return None
    try:
        twin: nn.Module = object_copies.shallow_copy(module)
    except object_copies.UnreadableError:
        return None
    return twin


def _without_graph(x: Tensor) -> Tensor:
    """Return the tensor, detached if it belongs to a graph, which must not be kept alive."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().requires_grad_(x.requires_grad) if x.grad_fn is not None else x


def _copied(x: Tensor) -> Tensor:
    """Return a detached copy with the same ``requires_grad``."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().clone().requires_grad_(x.requires_grad)
