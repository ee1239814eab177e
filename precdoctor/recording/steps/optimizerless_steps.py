"""Steps of scripts without an optimizer: ``p.data.add_(p.grad, alpha=-lr)`` after each backward pass.

Nothing announces these steps. So as a forward pass begins, one watched parameter is checked: the step has ended if the
parameter has changed since its gradient arrived (on the CPU; LOMO and the like update it in the backward pass) or its
gradient is gone (on a device, where comparing values would wait). All of this stops once an optimizer makes a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.process import memory_limits
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.slots.batched_launch import HELD, BatchedLaunch, Update
from precdoctor.recording.steps.abandoned_attempts import AbandonedAttempts

#: Most elements of a parameter that is copied for the comparison.
_MAX_COPY = 1 << 20


class _Before(NamedTuple):
    """A weight and its gradient as the backward pass left them."""

    parameter: weakref.ref[Tensor]
    weight: Tensor
    gradient: Tensor


class OptimizerlessSteps:
    """Watches one parameter between a backward pass and the next forward pass; see the module docstring.

    ``record_others`` records what is no trained weight of a root: frozen weights, buffers, scales.

    Attributes:
        reached: parameters whose gradients have arrived in this backward pass.
        gradients_are_gone: whether a gradient had been dropped again when the last backward pass ended.
        has_optimizer: whether an optimizer steps in this process: then its attempts are the steps.
    """

    def __init__(
        self,
        recorder: Recorder,
        abandoned: AbandonedAttempts,
        record_others: Callable[[torch.nn.Module, BatchedLaunch], None],
    ) -> None:
        self._recorder, self._record_others = recorder, record_others
        self._abandoned = abandoned
        self._weights, self._updates = BatchedLaunch(), BatchedLaunch(HELD)
        self._forget()
        recorder.when_forked.append(self._forget)

    def _forget(self) -> None:
        self._watched: weakref.ref[Tensor] | None = None
        self._watched_copy: Tensor | None = None
        #: Values of small parameters as their gradients arrived in this backward pass, by ``id``.
        self._values_at_arrival: dict[int, Tensor] = {}
        #: Gradient of the watched parameter as the pass ended; None once a step was made by hand, and on a device.
        self._watched_gradient: Tensor | None = None
        #: Whether a step was made by hand; before that no weights are copied: the first step may be an optimizer's.
        self._by_hand = False
        #: Weights and gradients of a sampled step, within ``--scene-memory``.
        self._copies: list[_Before] = []
        #: The smallest parameter whose gradient has arrived in this backward pass, and whether the watched one's has.
        self._smallest: weakref.ref[Tensor] | None = None
        self._watched_has_gradient = False
        #: Whether weights are plain tensors: if the watched one is gone, it has been replaced.
        self._has_plain_weights = False
        self.reached: list[Tensor] = []
        self.gradients_are_gone = False
        self.has_optimizer = False

    def gradient_arrived(self, parameter: Tensor) -> None:
        """Note that a parameter's gradient has arrived; copy the parameter if it may be the one to watch."""
        self.reached.append(parameter)
        smallest = self._smallest() if self._smallest is not None else None
        again = self._watched is not None and self._watched() is parameter
        is_smallest = smallest is None or parameter.numel() < smallest.numel()
        if is_smallest:
            self._smallest = weakref.ref(parameter)
        self._watched_has_gradient |= again
        if (again or is_smallest) and parameter.numel() <= _MAX_COPY:
            with kernels.apart_from_user_modes():
                values = tensor_leaves.plain(parameter)
                if values is not None and values.is_cpu:
                    self._values_at_arrival[id(parameter)] = values.detach().clone()

    def _watch(self) -> None:
        """Watch the smallest parameter that got a gradient; one without may never be updated."""
        watched = self._watched() if self._watched is not None and self._watched_has_gradient else None
        smallest = self._smallest() if self._smallest is not None else None
        if smallest is not None and (watched is None or smallest.numel() < watched.numel()):
            self._watched = self._smallest
        self._smallest, self._watched_has_gradient = None, False

    def leaves_derived(self, weights: list[Tensor]) -> None:
        """Note the plain tensors that got gradients, in a script whose weights are in no module."""
        if not self.has_optimizer:
            self._has_plain_weights = True
            for x in weights:
                self.gradient_arrived(x)

    def backward_ended(self) -> None:
        """Copy the watched parameter before it is updated; on sampled steps record the weights of the forward pass."""
        self._watch()
        parameter = self._watched() if self._watched is not None else None
        arrived, self._values_at_arrival, self._copies = self._values_at_arrival, {}, []
        reached, self.reached = self.reached, []
        self.gradients_are_gone = any(p.is_leaf and p.grad is None for p in reached)
        if self.has_optimizer or parameter is None:
            return
        with kernels.apart_from_user_modes():
            values = tensor_leaves.plain(parameter)
            if values is None:  # FSDP has freed its gathered parameter: no script updates it
                self._watched = self._watched_copy = None
                return
            small = values.is_cpu and values.numel() <= _MAX_COPY
            known = arrived.get(id(parameter))
            self._watched_copy = None if not small else values.detach().clone() if known is None else known
            gradient = parameter.grad if parameter.is_leaf and small and not self._by_hand else None
            dense = None if gradient is None else tensor_leaves.plain(gradient.detach())
            self._watched_gradient = dense.clone() if dense is not None and dense.shape == values.shape else None
        if self._recorder.live:
            self._record_weights()

    def _record_weights(self) -> None:
        """Record weights, and copy weights and gradients for update rows as far as memory allows; record buffers."""
        options = self._recorder.options
        room = memory_limits.for_copies(options) if self._by_hand and options.takes("update") else 0
        with self._weights as together:
            for parameter, place, name in self._known():
                self._recorder.measure(place, "weight", name, parameter, restart=True, together=together)
                room -= 2 * parameter.numel() * parameter.element_size()
                gradient = parameter.grad if parameter.is_leaf else None  # torch warns if it is read on others
                if room >= 0 and gradient is not None:
                    self._copy_both(parameter, gradient)
            for _, module in self._recorder.names.models():
                self._record_others(module, together)

    def _known(self) -> Iterator[tuple[Tensor, Place, str]]:
        """Iterate over the trained, named parameters with place and name."""
        names = self._recorder.names
        for root, module in names.models():
            for parameter in static.parameters(module) if root.trained else ():
                found = names.parameter(parameter)
                if found is not None and parameter.requires_grad and self._recorder.wants(found[0]):
                    yield parameter, *found

    def _copy_both(self, parameter: Tensor, gradient: Tensor) -> None:
        with kernels.apart_from_user_modes():
            weight, dense = tensor_leaves.plain(parameter), tensor_leaves.plain(gradient.detach())
            if weight is not None and dense is not None and weight.shape == dense.shape:
                self._copies.append(_Before(weakref.ref(parameter), weight.detach().clone(), dense.clone()))

    def _record_updates(self) -> None:
        """Record how the weights changed. The intended update is unknown, but zero wherever the gradient is."""
        before, self._copies = self._copies, []
        with self._updates as together:
            for old in before:
                parameter = old.parameter()
                found = self._recorder.names.parameter(parameter) if parameter is not None else None
                if parameter is None or found is None:
                    continue
                with kernels.apart_from_user_modes():
                    now = tensor_leaves.plain(parameter)
                    if now is None or now.shape != old.weight.shape:
                        continue
                launch = Update(old.weight, old.gradient)
                self._recorder.measure(
                    found[0], "update", found[1], parameter, now.detach(), launch=launch, together=together
                )

    def forward_begins(self) -> None:
        """As a root module is called, end the step if it was abandoned or the weights were updated."""
        self._abandoned.forward_begins()
        if not self.has_optimizer:
            self.end_step_if_updated()

    def end_open_step(self) -> None:
        """At the end of the run, end the step if it was abandoned or the weights were updated."""
        self._abandoned.run_ends()
        self.end_step_if_updated()

    def end_step_if_updated(self) -> None:
        """End the step if the watched parameter has changed or was replaced, or if its gradient is gone."""
        if self.has_optimizer or self._watched is None or not self._recorder.micro_step:
            return
        parameter = self._watched()
        if parameter is None:
            updated = self._has_plain_weights  # replaced: ``w = (w - lr * w.grad).detach()``
        elif self._watched_copy is None:
            updated = parameter.grad is None
        else:
            with kernels.apart_from_user_modes():
                values = tensor_leaves.plain(parameter)
                updated = values is not None and not torch.equal(self._watched_copy, values.detach())
                if updated and values is not None and self._is_ascent(parameter, values.detach() - self._watched_copy):
                    return  # SAM moves there to get the gradient; its optimizer's step comes later
        if updated:
            self._watched = self._watched_copy = None
            self._by_hand = True
            if self._copies:
                self._record_updates()
            self._recorder.end_step()

    def _is_ascent(self, parameter: Tensor, change: Tensor) -> bool:
        """Return whether a weight that a known optimizer trains has moved to where the loss is larger."""
        if self._watched_gradient is None or not self._abandoned.is_trained(parameter):
            return False
        return bool((change * self._watched_gradient).sum() > 0)
