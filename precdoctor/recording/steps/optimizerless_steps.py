"""Scripts that train without an optimizer: ``p.data.add_(p.grad, alpha=-lr)`` after each backward pass.

Nothing announces their steps. A step has ended when, at the next forward pass, the weights are no longer what they were
as their gradients arrived (CPU; LOMO and its like update them in the backward pass), or their gradients are gone
(elsewhere, where comparing values would wait for the device). All this stands aside for good as soon as an optimizer
makes a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
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

#: Larger parameters are not copied to be compared.
_MAX_COPY = 1 << 20


class _Before(NamedTuple):
    """A weight and its gradient as the backward pass has left them."""

    parameter: weakref.ref[Tensor]
    weight: Tensor
    gradient: Tensor


class OptimizerlessSteps:
    """Watches one parameter between a backward pass and the next forward pass."""

    def __init__(self, recorder: Recorder, thrown: AbandonedAttempts) -> None:
        self._recorder = recorder
        self._thrown = thrown
        self._weights, self._updates = BatchedLaunch(), BatchedLaunch(HELD)
        self._forget()
        recorder.when_forked.append(self._forget)

    def _forget(self) -> None:
        self._watched: weakref.ref[Tensor] | None = None
        self._copy: Tensor | None = None
        #: What small parameters were as this backward pass brought their gradients, by ``id``.
        self._arrived: dict[int, Tensor] = {}
        #: Its gradient then, where an optimizer is known that may be about to make its first step.
        self._slope: Tensor | None = None
        #: A step has been made by hand: only then are weights copied, for the first step of all may be an optimizer's.
        self._by_hand = False
        #: Of a sampled step, within ``--scene-memory``.
        self._before: list[_Before] = []
        #: The smallest parameter that this backward pass has brought a gradient to, and whether the watched one is.
        self._smallest: weakref.ref[Tensor] | None = None
        self._watched_again = False
        #: The weights are plain tensors: what is gone of them has been replaced.
        self._bare = False
        #: Those that this backward pass has brought gradients to, and whether one of these was gone as it ended.
        self.reached: list[Tensor] = []
        self.gradients_are_gone = False
        #: An optimizer steps in this process: attempts are the steps, and there is nothing to guess.
        self.has_optimizer = False

    def gradient_arrived(self, parameter: Tensor) -> None:
        """A parameter has got its gradient: the smallest one of the step is watched."""
        self.reached.append(parameter)
        smallest = self._smallest() if self._smallest is not None else None
        again = self._watched is not None and self._watched() is parameter
        is_smallest = smallest is None or parameter.numel() < smallest.numel()
        if is_smallest:
            self._smallest = weakref.ref(parameter)
        self._watched_again |= again
        if (again or is_smallest) and parameter.numel() <= _MAX_COPY:
            with kernels.apart_from_user_modes():
                values = tensor_leaves.plain(parameter)
                if values is not None and values.is_cpu:
                    self._arrived[id(parameter)] = values.detach().clone()

    def _watch(self) -> None:
        """Watch the smallest parameter; one that got no gradient any more may never be updated."""
        watched = self._watched() if self._watched is not None and self._watched_again else None
        smallest = self._smallest() if self._smallest is not None else None
        if smallest is not None and (watched is None or smallest.numel() < watched.numel()):
            self._watched = self._smallest
        self._smallest, self._watched_again = None, False

    def leaves_derived(self, weights: list[Tensor]) -> None:
        """Plain tensors have got gradients, in a script whose weights no module has."""
        if not self.has_optimizer:
            self._bare = True
            for x in weights:
                self.gradient_arrived(x)

    def backward_ended(self) -> None:
        """Note the watched parameter as it is before anyone updates it; the weights this step's forward used."""
        self._watch()
        parameter = self._watched() if self._watched is not None else None
        arrived, self._arrived, self._before = self._arrived, {}, []
        reached, self.reached = self.reached, []
        self.gradients_are_gone = any(p.is_leaf and p.grad is None for p in reached)
        if self.has_optimizer or parameter is None:
            return
        with kernels.apart_from_user_modes():
            values = tensor_leaves.plain(parameter)
            if values is None:  # a gathered parameter of FSDP, its memory given back: no script updates that
                self._watched = self._copy = None
                return
            small = values.is_cpu and values.numel() <= _MAX_COPY
            known = arrived.get(id(parameter))
            self._copy = None if not small else values.detach().clone() if known is None else known
            gradient = parameter.grad if parameter.is_leaf and small and not self._by_hand else None
            dense = None if gradient is None else tensor_leaves.plain(gradient.detach())
            self._slope = dense.clone() if dense is not None and dense.shape == values.shape else None
        if self._recorder.live:
            self._record_weights()

    def _record_weights(self) -> None:
        options = self._recorder.options
        room = memory_limits.for_copies(options) if self._by_hand and options.takes("update") else 0
        with self._weights as together:
            for parameter, place, name in self._known():
                site = self._recorder.site(place, "weight", name, parameter)
                self._recorder.measure(site, parameter, restart=True, together=together)
                room -= 2 * parameter.numel() * parameter.element_size()
                gradient = parameter.grad if parameter.is_leaf else None  # torch warns about others
                if room >= 0 and gradient is not None:
                    self._copy_both(parameter, gradient)

    def _known(self) -> Iterator[tuple[Tensor, Place, str]]:
        names = self._recorder.names
        for root in names.roots.values():
            module = root.module()
            for parameter in static.parameters(module) if module is not None and root.trained else ():
                found = names.parameter(parameter)
                if found is not None and parameter.requires_grad and self._recorder.wants(found[0]):
                    yield parameter, *found

    def _copy_both(self, parameter: Tensor, gradient: Tensor) -> None:
        with kernels.apart_from_user_modes():
            weight, dense = tensor_leaves.plain(parameter), tensor_leaves.plain(gradient.detach())
            if weight is not None and dense is not None and weight.shape == dense.shape:
                self._before.append(_Before(weakref.ref(parameter), weight.detach().clone(), dense.clone()))

    def _record_updates(self) -> None:
        """How the weights have changed; what was meant is not known, but it is zero where the gradient is."""
        before, self._before = self._before, []
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
                site = self._recorder.site(found[0], "update", found[1], parameter)
                launch = Update(old.weight, old.gradient)
                self._recorder.measure(site, parameter, now.detach(), launch=launch, together=together)

    def forward_begins(self) -> None:
        """A root module is called: a step may have ended before it."""
        self._thrown.forward_begins()
        if not self.has_optimizer:
            self.end_step_if_updated()

    def end_open_step(self) -> None:
        """The run ends: so may a step have done."""
        self._thrown.run_ends()
        self.end_step_if_updated()

    def end_step_if_updated(self) -> None:
        """At a forward pass and at the end of the run: end the step if the weights were updated since."""
        if self.has_optimizer or self._watched is None or not self._recorder.micro_step:
            return
        parameter = self._watched()
        if parameter is None:
            updated = self._bare  # ``w = (w - lr * w.grad).detach()``
        elif self._copy is None:
            updated = parameter.grad is None
        else:
            with kernels.apart_from_user_modes():
                values = tensor_leaves.plain(parameter)
                updated = values is not None and not torch.equal(self._copy, values.detach())
                if updated and values is not None and self._is_ascent(parameter, values.detach() - self._copy):
                    return  # to where an optimizer wants to know the gradient (SAM): its step is yet to come
        if updated:
            self._watched = self._copy = None
            self._by_hand = True
            if self._before:
                self._record_updates()
            self._recorder.end_step()

    def _is_ascent(self, parameter: Tensor, change: Tensor) -> bool:
        """Whether a weight that an optimizer is known to train was moved to where the loss is larger."""
        if self._slope is None or not self._thrown.is_trained(parameter):
            return False
        return bool((change * self._slope).sum() > 0)
