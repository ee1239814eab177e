"""Records an optimizer's state besides the weights: moments, momentum buffers, FP32 master copies of 16-bit weights.

State is recorded after the step, and on fewer steps than the rest: the fastest common moment (beta 0.9) averages over
ten steps. Master weights are recorded with the weights, just before the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.kernels.outside_user_modes import detached, modes_open
from precdoctor.recording.model import quantised_tensors, static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.model.optimizer_contents import groups_of, parameters_of, state_of
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.slots.batched_launch import BatchedLaunch

#: Returns, of a tensor with a parameter's shape, the part that is recorded under one name.
Part = Callable[[Tensor], Tensor]
_HALF = (torch.float16, torch.bfloat16)
#: State is recorded on sampled steps that this divides, and on any sampled step this many steps after the last one. A
#: power of two, so that two runs share steps.
STATE_EVERY = 8


class StateRows:
    """Makes the ``opt_state`` rows of every optimizer."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recorded_steps: dict[str, int] = {}
        self._together = BatchedLaunch()
        recorder.when_forked.append(self._recorded_steps.clear)

    def due(self, name: str) -> bool:
        """Return whether the state of this optimizer is recorded after the current step."""
        step, last = self._recorder.step, self._recorded_steps.get(name)
        return last is None or (step != last and step % STATE_EVERY == 0) or step - last >= STATE_EVERY

    def record(
        self,
        name: str,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Iterable[tuple[Tensor, Place, str, Part]],
    ) -> None:
        """Record the state after a step.

        Args:
            name: of the optimizer.
            optimizers: the optimizer and those it drives, which may hold its state.
            parameters: of the optimizer, with place, name, and the function that returns the part with this name.
        """
        recorder = self._recorder
        if not recorder.options.takes("opt_state"):
            return
        self._recorded_steps[name] = recorder.step
        common = Place(name, "", name.partition("#")[0])
        with self._together as together:
            for parameter, place, own, part in parameters:
                for key, x in _state_tensors(optimizers, parameter):
                    if type(x) is not Tensor and quantised_tensors.is_quantised(x):
                        self._record_quantised(place, "opt_state", f"{own}.{key}", x)
                        continue
                    if _is_master(key, x, parameter):
                        continue
                    # LBFGS keeps vectors over all parameters in the state of the first one.
                    owner, called = (common, key) if x.numel() > parameter.numel() else (place, f"{own}.{key}")
                    plain = detached(x) if modes_open() else x.detach()
                    own_part = part(plain) if x.shape == parameter.shape else plain
                    recorder.measure(owner, "opt_state", called, own_part, together=together)

        for optimizer in optimizers:
            self._record_scaling_parameters(optimizer)

    def _record_scaling_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Record weight, gradient and state of quantised parameters that are no tensors: no other room sees them."""
        names = self._recorder.names
        for group in groups_of(optimizer):
            for parameter in static.elements(dict.get(group, "params")):
                if issubclass(type(parameter), Tensor) or not quantised_tensors.is_quantised(parameter):
                    continue
                found = names.search_parameter(parameter)
                if found is None or not self._recorder.wants(found[0]):
                    continue
                place, own = found
                self._record_quantised(place, "weight", own, parameter)
                self._record_quantised(place, "weight_grad_step", own, static.attribute(parameter, "_grad"))
                for key, x in _state_tensors((optimizer,), parameter):
                    if quantised_tensors.is_quantised(x):
                        self._record_quantised(place, "opt_state", f"{own}.{key}", x)

    def _record_quantised(self, place: Place, kind: str, name: str, x: Any) -> None:
        """Record the dequantised elements and the block multipliers of a quantised tensor."""
        recorder = self._recorder
        if not recorder.options.takes(kind):
            return
        with kernels.apart_from_user_modes():
            found = quantised_tensors.quantised(x)
        if found is None:
            return
        entry = recorder.measure(place, kind, name, found.values)
        if entry is not None:
            entry.format = found.format
        called = f"{name}.grad" if kind == "weight_grad_step" else name
        recorder.measure(place, "block_scale", called, found.multipliers)


class Masters:
    """Finds parameters of an optimizer that are FP32 copies of a model's 16-bit weights.

    The optimizer gets the copies instead of the weights: ``[p.float().clone() for p in model.parameters()]``, or the
    like in optimizer wrappers.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._weights: static.ByIdentity[Tensor, weakref.ref[Tensor]] = static.ByIdentity()
        self._searched: static.ByIdentity[torch.optim.Optimizer, tuple[int, int]] = static.ByIdentity()
        recorder.when_forked += [self._weights.clear, self._searched.clear]

    def weight_of(self, parameter: Tensor) -> Tensor | None:
        """Return the model's weight that a parameter is the master copy of; None if it is none."""
        known = self._weights.get(parameter)
        return known() if known is not None else None

    def look_at(self, optimizer: torch.optim.Optimizer, is_known: Callable[[Tensor], bool]) -> None:
        """Find the master copies among an optimizer's parameters; again only if their number or the models change.

        Shapes must agree, and the copy rounded must equal the weight, which holds between two steps. The comparison
        waits for the device once, so ``--on-nonfinite observe`` skips it for copies on a device.

        Args:
            optimizer: about to step.
            is_known: returns whether the weight that a parameter is a copy of is known already.
        """
        parameters = parameters_of(optimizer)
        now = len(parameters), len(self._recorder.names.roots)
        if self._searched.get(optimizer) == now:
            return
        self._searched.put(optimizer, now)
        wide = (p for p in parameters if p.dtype is torch.float32 and self._recorder.names.parameter(p) is None)
        copies = [p for p in wide if not is_known(p)]
        if self._recorder.options.on_nonfinite == "observe":
            copies = [p for p in copies if p.is_cpu]
        if not copies:
            return
        own = {id(p) for p in parameters}
        free = [w for w in self._half_weights() if id(w) not in own]
        for copy in copies:
            if (found := next((w for w in free if _is_rounded(copy, w)), None)) is not None:
                free = [w for w in free if w is not found]
                self._weights.put(copy, weakref.ref(found))

    def _half_weights(self) -> Iterator[Tensor]:
        """Iterate over the named 16-bit weights of all models."""
        names = self._recorder.names
        for _, module in names.models():
            yield from (p for p in static.parameters(module) if p.dtype in _HALF and names.parameter(p) is not None)


def masters_in_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    """Iterate over the FP32 copies of a 16-bit parameter in the optimizer's state."""
    if parameter.dtype not in _HALF:
        return iter(())
    kept = _state_tensors((optimizer,), parameter)
    return (x for key, x in kept if issubclass(type(x), Tensor) and _is_master(key, x, parameter))


def _state_tensors(optimizers: Iterable[torch.optim.Optimizer], parameter: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over name and tensor of a parameter's state, without step counters and undecodable 8-bit state."""
    for optimizer in optimizers:
        kept = state_of(optimizer, parameter)
        tensors = {
            key: x for key, x in kept.items() if key != "step" and (x.ndim if type(x) is Tensor else _has_elements(x))
        }
        if any(issubclass(type(x), Tensor) and not tensor_leaves.counts(x) for x in tensors.values()):
            continue  # the rest of an 8-bit state is scales and code books
        yield from tensors.items()


def _has_elements(x: Any) -> bool:
    """Return whether a state entry is quantised or has at least one dimension."""
    if not issubclass(type(x), Tensor):
        return quantised_tensors.is_quantised(x)
    with torch._C.DisableTorchFunctionSubclass():
        return bool(x.ndim)


def _is_master(key: str, x: Tensor, parameter: Tensor) -> bool:
    """Return whether a state entry is an FP32 master copy of the parameter, by name, dtype and shape."""
    named = "master" in key or key.startswith("fp32")
    return named and x.dtype is torch.float32 and parameter.dtype in _HALF and x.shape == parameter.shape


def _is_rounded(copy: Tensor, weight: Tensor) -> bool:
    """Return whether the weight is the rounded copy; waits for the device."""
    if copy.shape != weight.shape or copy.device != weight.device:
        return False
    wide, narrow = tensor_leaves.plain(copy), tensor_leaves.plain(weight)
    if wide is None or narrow is None or wide.shape != narrow.shape:
        return False
    with kernels.apart_from_user_modes():
        return torch.equal(wide.detach().to(narrow.dtype), narrow.detach())
