"""Checks tensors that live longer than a step and are not weights: buffers (running statistics, queues, codebooks) and
optimizer state. A NaN in one of them may show in the loss many steps later, or never.

Small buffers are checked in every step in which they were written to, in one read; large ones on sampled steps.
Optimizer state is checked on some sampled steps, and after a gradient whose square may leave the range of the state.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.model import quantised_tensors, static, tensor_leaves
from precdoctor.recording.model.module_names import Root
from precdoctor.recording.model.optimizer_contents import parameters_of, state_of
from precdoctor.recording.ops.tensor_facts import badness
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import Deferred, read
from precdoctor.recording.steps.sentinel import amax

#: Elements; larger buffers are read on sampled steps only.
_SMALL = 1 << 16
#: Least number of steps between two sampled steps that read the optimizer state.
_STATE_EVERY = 32
#: A gradient within two binades of the root of the state's largest number is a reason to read the state.
_MARGIN = 0.25
_FLOAT16_ROOT = math.sqrt(torch.finfo(torch.float16).max)


@dataclass(frozen=True)
class Poisoned:
    """A tensor that has become non-finite."""

    root: str
    module: str
    name: str
    tensor: Tensor
    #: The last step at which the tensor was finite; None if it was never read before.
    last_finite: int | None
    #: The parameter that the tensor is state of; None for a buffer.
    parameter: Tensor | None = None

    @property
    def full_name(self) -> str:
        """FQN of the module, and the tensor's name in it."""
        return ".".join(filter(None, (self.module, self.name)))


@dataclass
class _BufferRead:
    """The result of the last read of a buffer."""

    stamp: object
    finite: bool
    step: int


class BufferWatch:
    """Checks the floating-point buffers of every root; see the module docstring.

    Args:
        context: the recorder.
        earlier: returns the values of a buffer before the forward pass; None if they were not copied.
    """

    def __init__(self, context: StepContext, earlier: Callable[[Tensor], Tensor | None] = lambda _: None) -> None:
        self._context, self._earlier = context, earlier
        self._last_reads: dict[tuple[int, str], _BufferRead] = {}
        self._owners: dict[str, tuple[int, list[weakref.ref[nn.Module]]]] = {}
        #: Version of the names at which no module had a buffer; None if some have.
        self._version_without_buffers: int | None = None

    def launch(self) -> tuple[Deferred, list[tuple[nn.Module, str, Tensor]]]:
        """Start to read the buffers written to since the last call. Return their amax, and owner, name and buffer."""
        if self._version_without_buffers == self._context.names.version:
            return None, []
        changed = list(self._buffers_to_read())
        if not changed:
            there_are = any(owners for _, owners in self._owners.values())
            self._version_without_buffers = None if there_are else self._context.names.version
            return None, []
        return amax(buffer for _, _, buffer in changed), changed

    def judge(self, value: Deferred, changed: list[tuple[nn.Module, str, Tensor]]) -> list[Poisoned]:
        """Return the buffers that have become non-finite, from the result of :meth:`launch`; waits for the device.

        A buffer that was non-finite before its first forward pass (a mask, a limit not reached yet) is not reported.
        """
        if not changed:
            return []
        step, names = self._context.step, self._context.names
        largest = read(value)
        all_finite = largest is None or math.isfinite(largest)
        found = []
        for owner, name, buffer in changed:
            key, before = (id(owner), name), self._last_reads.get((id(owner), name))
            finite = all_finite or not badness(buffer.detach())
            self._last_reads[key] = _BufferRead(tensor_leaves.buffer_stamp(owner, name, buffer), finite, step)
            place = names.find(owner)
            if not finite and place is not None and (self._was_finite(buffer) if before is None else before.finite):
                last = None if before is None else before.step
                found.append(Poisoned(place.root, place.module, name, buffer.detach(), last))
        return found

    def _was_finite(self, buffer: Tensor) -> bool:
        """Return whether the buffer is known to have been finite before the forward pass."""
        earlier = self._earlier(buffer)
        return earlier is not None and not badness(earlier)

    @property
    def bad(self) -> bool:
        """Whether a buffer was non-finite when last read, even if it always was."""
        return any(not seen.finite for seen in self._last_reads.values())

    def _buffers_to_read(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Iterate over owner, name and buffer of the buffers to read now."""
        for root in list(self._context.names.roots.values()):
            for owner in self._owners_of(root):
                for name, buffer in static.held(owner, "_buffers").items():
                    if buffer is None or not tensor_leaves.counts(buffer) or buffer.is_inference():
                        continue
                    seen = self._last_reads.get((id(owner), name))
                    if seen is not None and seen.stamp == tensor_leaves.buffer_stamp(owner, name, buffer):
                        continue
                    if buffer.numel() <= _SMALL or self._context.live or seen is None:
                        yield owner, name, buffer

    def _owners_of(self, root: Root) -> Iterator[nn.Module]:
        """Iterate over the modules of a root that have buffers; cached until the names change."""
        version = self._context.names.version
        known = self._owners.get(root.name)
        if known is None or known[0] != version:
            module = root.module()
            parts = static.modules(module) if module is not None else ()
            known = self._owners[root.name] = (version, [weakref.ref(m) for m in parts if static.held(m, "_buffers")])
        return (m for ref in known[1] if (m := ref()) is not None)


@dataclass(eq=False)
class _WatchedOptimizer:
    """What is known of one optimizer's state."""

    ref: weakref.ref[torch.optim.Optimizer]
    #: The step after which the state was last read.
    read_step: int | None = None
    #: The last step after which the state was finite, as read or as its gradients imply.
    finite_step: int | None = None
    reported: bool = False
    #: The step in which the state's range was determined, and the magnitude whose square leaves that range.
    range_root: tuple[int, float] | None = None


class OptimizerStateWatch:
    """Checks the state tensors of every optimizer; see the module docstring."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        #: By the optimizer's id, which another one may get once it is gone.
        self._watched: dict[int, _WatchedOptimizer] = {}

    def due(self, optimizer: torch.optim.Optimizer, gradient: float | None) -> bool:
        """Return whether to read the state after this step.

        Args:
            optimizer: has just stepped.
            gradient: amax of its gradients; None if unknown.
        """
        own, step = self._watched.get(id(optimizer)), self._context.current.step
        if own is None or own.ref() is not optimizer:
            own = self._watched[id(optimizer)] = _WatchedOptimizer(weakref.ref(optimizer))
        if own.reported:
            return False
        if self._context.live and (own.read_step is None or step - own.read_step >= _STATE_EVERY):
            return True
        if gradient is None:
            return False
        if gradient >= _MARGIN * _FLOAT16_ROOT and gradient >= _MARGIN * _range_root(own, optimizer, step):
            return True
        if own.finite_step is not None and type(optimizer).__module__.startswith("torch.optim"):
            own.finite_step = step
        return False

    def look(self, optimizer: torch.optim.Optimizer) -> list[Poisoned]:
        """Return the non-finite state tensors of an optimizer that is :meth:`due`, once. Waits for the device."""
        own = self._watched[id(optimizer)]
        last, own.read_step = own.finite_step, self._context.step
        largest = read(amax(x for _, _, x in state_tensors(optimizer)))
        if largest is None or math.isfinite(largest):
            own.finite_step = self._context.step
            return []
        own.reported = True
        found = []
        for parameter, name, x in state_tensors(optimizer):
            if (dense := tensor_leaves.plain(x)) is not None and badness(dense.detach()):
                place = self._context.names.parameter(parameter)
                root, module = (place[0].root, place[0].module) if place is not None else ("", "")
                found.append(Poisoned(root, module, name, x, last, parameter))
        return found


def _range_root(own: _WatchedOptimizer, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Return the magnitude whose square leaves the range of the state; cached, as walking the state is slow."""
    known = own.range_root
    if known is None or not 0 <= step - known[0] < _STATE_EVERY:
        kinds = {x.dtype for _, _, x in state_tensors(optimizer)}
        narrowest = min((torch.finfo(kind).max for kind in kinds), default=math.inf)
        known = own.range_root = step, math.sqrt(narrowest)
    return known[1]


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Iterate over parameter, name and tensor of an optimizer's state, without step counters.

    Quantised state yields its scales: they are not finite if an element of their block was not.
    """
    for parameter in parameters_of(optimizer):
        for name, x in state_of(optimizer, parameter).items():
            held: Any = x if type(x) is Tensor or not quantised_tensors.is_quantised(x) else quantised_tensors.scales(x)
            if issubclass(type(held), Tensor) and tensor_leaves.counts(held) and name != "step":
                yield parameter, name, held
