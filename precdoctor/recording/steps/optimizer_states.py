"""What an optimizer keeps beside the weights: moments and momentum buffers, and FP32 master copies of 16-bit weights.

State rows are taken after the step, and less often than the rest: the fastest common moment (beta 0.9) averages over
ten steps. Master weights are taken with the weights, just before the step.
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

#: Gives of a tensor of a parameter's shape the part that is recorded under one name.
Part = Callable[[Tensor], Tensor]
_HALF = (torch.float16, torch.bfloat16)
#: Sampled steps take the state of an optimizer this many steps apart: a power of two, so that two runs have some in
#: common.
STATE_EVERY = 8


class StateRows:
    """``opt_state`` rows of every optimizer."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._taken: dict[str, int] = {}
        self._together = BatchedLaunch()
        recorder.when_forked.append(self._taken.clear)

    def due(self, name: str) -> bool:
        """Whether the step that is ending is one of those after which the state of this optimizer is taken."""
        step, last = self._recorder.step, self._taken.get(name)
        return last is None or (step != last and step % STATE_EVERY == 0) or step - last >= STATE_EVERY

    def take(
        self,
        name: str,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Iterable[tuple[Tensor, Place, str, Part]],
    ) -> None:
        """Measure the state as a step has left it.

        Args:
            name: of the optimizer.
            optimizers: that optimizer, and those it drives: it may keep its state in them.
            parameters: of the optimizer, with places and names, and what gives the part of a tensor that has this name.
        """
        recorder = self._recorder
        if not recorder.options.takes("opt_state"):
            return
        self._taken[name] = recorder.step
        common = Place(name, "", name.partition("#")[0])
        with self._together as together:
            for parameter, place, own, part in parameters:
                for key, x in _kept_for(optimizers, parameter):
                    if type(x) is not Tensor and quantised_tensors.is_quantised(x):
                        self._take_quantised(place, "opt_state", f"{own}.{key}", x)
                        continue
                    if _is_master(key, x, parameter):
                        continue
                    # LBFGS keeps vectors over all parameters at the first one
                    owner, called = (common, key) if x.numel() > parameter.numel() else (place, f"{own}.{key}")
                    plain = detached(x) if modes_open() else x.detach()
                    own_part = part(plain) if x.shape == parameter.shape else plain
                    recorder.measure(recorder.site(owner, "opt_state", called, x), own_part, together=together)

        for optimizer in optimizers:
            self._take_scaling_parameters(optimizer)

    def _take_scaling_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Weight, gradient and state of parameters that are no tensors: nothing else of the recorder sees them."""
        names = self._recorder.names
        for group in groups_of(optimizer):
            for parameter in static.elements(dict.get(group, "params")):
                if issubclass(type(parameter), Tensor) or not quantised_tensors.is_quantised(parameter):
                    continue
                found = names.search_parameter(parameter)
                if found is None or not self._recorder.wants(found[0]):
                    continue
                place, own = found
                self._take_quantised(place, "weight", own, parameter)
                self._take_quantised(place, "weight_grad_step", own, static.attribute(parameter, "_grad"))
                for key, x in _kept_for((optimizer,), parameter):
                    if quantised_tensors.is_quantised(x):
                        self._take_quantised(place, "opt_state", f"{own}.{key}", x)

    def _take_quantised(self, place: Place, kind: str, name: str, x: Any) -> None:
        """The dequantised elements, and what its blocks were multiplied by."""
        recorder = self._recorder
        if not recorder.options.takes(kind):
            return
        with kernels.apart_from_user_modes():
            found = quantised_tensors.quantised(x)
        if found is None:
            return
        entry = recorder.measure(recorder.site(place, kind, name, found.values), found.values)
        if entry is not None:
            entry.format = found.format
        called = f"{name}.grad" if kind == "weight_grad_step" else name
        scales = recorder.site(place, "block_scale", called, found.multipliers)
        if recorder.options.takes(scales.kind):
            recorder.measure(scales, found.multipliers)


class Masters:
    """Which parameters of an optimizer are FP32 copies of 16-bit weights of a model, for which the model's are not
    given to it: ``[p.float().clone() for p in model.parameters()]``, and what optimizer wrappers make of it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._weights: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._looked: dict[int, tuple[weakref.ref[torch.optim.Optimizer], int, int]] = {}
        recorder.when_forked.append(self._forget)

    def _forget(self) -> None:
        self._weights.clear()
        self._looked.clear()

    def weight_of(self, parameter: Tensor) -> Tensor | None:
        """The model's weight of which a parameter is the master copy."""
        known = self._weights.get(id(parameter))
        return known[1]() if known is not None and known[0]() is parameter else None

    def look_at(self, optimizer: torch.optim.Optimizer, is_known: Callable[[Tensor], bool]) -> None:
        """Find the masters among its parameters; done again only when it has got other ones, or the model is known.

        Shapes must agree, and the master rounded must be the weight, as it is between two steps. Comparing them waits
        for the device once, and is not done with ``--on-nonfinite observe``, which never waits.

        Args:
            optimizer: about to step.
            is_known: whether it is known otherwise of which weight a parameter is the copy.
        """
        parameters = parameters_of(optimizer)
        known = self._looked.get(id(optimizer))
        now = len(parameters), len(self._recorder.names.roots)
        if known is not None and known[0]() is optimizer and known[1:] == now:
            return
        self._looked[id(optimizer)] = (weakref.ref(optimizer), *now)
        wide = (p for p in parameters if p.dtype is torch.float32 and self._recorder.names.parameter(p) is None)
        copies = [p for p in wide if not is_known(p)]
        if self._recorder.options.on_nonfinite == "observe":
            copies = [p for p in copies if p.is_cpu]
        if not copies:
            return
        own = {id(p) for p in parameters}
        free = [w for w in self._half_weights() if id(w) not in own]
        for copy in copies:
            found = next((w for w in free if _is_rounded(copy, w)), None)
            if found is not None:
                free = [w for w in free if w is not found]
                self._weights[id(copy)] = (weakref.ref(copy), weakref.ref(found))

    def _half_weights(self) -> Iterator[Tensor]:
        names = self._recorder.names
        for root in names.roots.values():
            module = root.module()
            if module is not None:
                yield from (p for p in static.parameters(module) if p.dtype in _HALF and names.parameter(p) is not None)


def masters_in_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    """FP32 copies of a 16-bit parameter that an optimizer keeps in its state."""
    if parameter.dtype not in _HALF:
        return iter(())
    kept = _kept_for((optimizer,), parameter)
    return (x for key, x in kept if issubclass(type(x), Tensor) and _is_master(key, x, parameter))


def _kept_for(optimizers: Iterable[torch.optim.Optimizer], parameter: Any) -> Iterator[tuple[str, Any]]:
    """Name and tensor of what they keep for a parameter, beside step counters and quantised state."""
    for optimizer in optimizers:
        kept = state_of(optimizer, parameter)
        tensors = {
            key: x for key, x in kept.items() if key != "step" and (x.ndim if type(x) is Tensor else _has_elements(x))
        }
        if any(issubclass(type(x), Tensor) and not tensor_leaves.counts(x) for x in tensors.values()):
            continue  # 8-bit state: what else there is are its scales and code books
        yield from tensors.items()


def _has_elements(x: Any) -> bool:
    if not issubclass(type(x), Tensor):
        return quantised_tensors.is_quantised(x)
    with torch._C.DisableTorchFunctionSubclass():
        return bool(x.ndim)


def _is_master(key: str, x: Tensor, parameter: Tensor) -> bool:
    named = "master" in key or key.startswith("fp32")
    return named and x.dtype is torch.float32 and parameter.dtype in _HALF and x.shape == parameter.shape


def _is_rounded(copy: Tensor, weight: Tensor) -> bool:
    if copy.shape != weight.shape or copy.device != weight.device:
        return False
    wide, narrow = tensor_leaves.plain(copy), tensor_leaves.plain(weight)
    if wide is None or narrow is None or wide.shape != narrow.shape:
        return False
    with kernels.apart_from_user_modes():
        return torch.equal(wide.detach().to(narrow.dtype), narrow.detach())
