"""Records what no optimizer updates: frozen weights, averages of weights, buffers, the scales of Transformer Engine.

Also keeps which tensors of a micro-step already have a row, so that none gets two.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.fp8 import engine_scales
from precdoctor.recording.fp8.fp8_casts import Casts
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.batched_launch import BatchedLaunch
from precdoctor.recording.slots.cast_operand import FLOAT8


class RecordedTensors:
    """The tensors that have a row in this micro-step, with their version counters, which in-place writes raise.

    A tensor is the same only if its reference is still alive: the id of a dead one may belong to another tensor.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._micro_step = (-1, -1)
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._storages: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        context.when_forked.append(self._clear)

    def _clear(self) -> None:
        self._tensors.clear()
        self._storages.clear()

    def add(self, x: Tensor) -> None:
        """Note that a tensor has a row."""
        context = self._context
        now = (context.current.step, context.micro_step)
        if now != self._micro_step:
            self._clear()
            self._micro_step = now
        entry = (weakref.ref(x), tensor_leaves.version(x))
        self._tensors[id(x)] = entry
        if x.layout is torch.strided and not tensor_leaves.is_wrapped(x):
            self._storages[x.untyped_storage()._cdata] = entry

    def tensor(self, x: Tensor) -> bool:
        """Return whether this tensor object has a row and has not been written to since."""
        if self._micro_step != (self._context.current.step, self._context.micro_step):
            return False  # the same batch object in another step
        found = self._tensors.get(id(x))
        return found is not None and found[0]() is x and found[1] == tensor_leaves.version(x)

    def storage_of(self, x: Tensor) -> bool:
        """Return whether this tensor, or another with the same memory, has a row and was not written to since."""
        if x.layout is not torch.strided or tensor_leaves.is_wrapped(x):
            return self.tensor(x)
        if self._micro_step != (self._context.current.step, self._context.micro_step):
            return False
        found = self._storages.get(x.untyped_storage()._cdata)
        return found is not None and found[0]() is not None and found[1] == tensor_leaves.version(x)


class FrozenAndBuffers:
    """On sampled steps, records the frozen weights and buffers that were written to since their last row.

    The last one counts if a step records several times: without an optimizer, each of its backward passes does.
    """

    def __init__(self, recorder: Recorder, casts: Casts) -> None:
        self._recorder = recorder
        self._casts = casts
        #: The version or stamp of each tensor at its last row.
        self._weights: static.ByIdentity[Tensor, int] = static.ByIdentity()
        self._stamps: static.ByIdentity[Tensor, object] = static.ByIdentity()
        recorder.when_forked += [self._weights.clear, self._stamps.clear]

    def record(self, module: torch.nn.Module, together: BatchedLaunch) -> None:
        """Record the frozen weights, buffers and scales of one root; ``together`` may defer the launches."""
        modules = static.modules(module)
        self._frozen(module, together)
        self._buffers(modules, together)
        self._scales(modules, together)

    def _frozen(self, module: torch.nn.Module, together: BatchedLaunch) -> None:
        """Record weights written to since their last row that need no gradient; in an inference run, all written to.

        Frozen weights are thus recorded once, averages of weights (EMA) again and again.
        """
        recorder = self._recorder
        for parameter in static.parameters(module):
            if (parameter.requires_grad or parameter.is_inference()) and not recorder.claim.forwards_are_steps:
                continue
            if self._weights.get(parameter) == (version := tensor_leaves.version(parameter)):
                continue
            self._weights.put(parameter, version)
            found = recorder.names.parameter(parameter)
            if found is not None and tensor_leaves.counts(parameter) and recorder.wants(found[0]):
                recorder.measure(found[0], "weight", found[1], parameter, restart=True, together=together)

    def _buffers(self, modules: list[torch.nn.Module], together: BatchedLaunch) -> None:
        """Record floating-point and complex buffers that were written to since their last row."""
        recorder = self._recorder
        owned = ((m, name, b) for m in modules for name, b in static.held(m, "_buffers").items())
        for owner, name, buffer in owned:
            if buffer is None or not tensor_leaves.counts(buffer) or buffer.is_inference():
                continue
            if buffer.dtype in FLOAT8:
                self._casts.holds(owner)
            if self._stamps.get(buffer) == (stamp := tensor_leaves.buffer_stamp(owner, name, buffer)):
                continue
            self._stamps.put(buffer, stamp)
            found = recorder.names.search_parameter(buffer)
            if found is not None and recorder.wants(found[0]):
                recorder.measure(found[0], "buffer", found[1], buffer, restart=True, together=together)

    def _scales(self, modules: list[torch.nn.Module], together: BatchedLaunch) -> None:
        """Record the scales that Transformer Engine keeps outside of buffers, and of fake quantisers (torchao)."""
        recorder = self._recorder
        for owner in modules:
            if engine_scales.HOLDERS.isdisjoint(static.module_dict(owner)):  # inlined: runs for every module
                continue
            divisors = engine_scales.fake_quantisation(owner)
            place = recorder.names.find(owner)
            if place is None or not recorder.wants(place):
                continue
            for name, x in engine_scales.delayed_scaling(owner):
                recorder.measure(place, "buffer", name, x, restart=True, together=together)
            if divisors is not None:
                with kernels.apart_from_user_modes():
                    multipliers = divisors.float().reciprocal()
                recorder.measure(place, "block_scale", "input", multipliers, restart=True)
