"""Rows of a sampled optimizer step: weights before it, gradients as the optimizer gets them, updates, states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.kernels.outside_user_modes import detached, modes_open
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.model.optimizer_contents import groups_of, parameters_in, parameters_of
from precdoctor.recording.model.weight_pieces import Pieces, stored
from precdoctor.recording.observe.frozen_and_buffers import FrozenAndBuffers
from precdoctor.recording.process import memory_limits
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.slots.batched_launch import HELD, BatchedLaunch, Update
from precdoctor.recording.steps.optimizer_states import Masters, StateRows, masters_in_state
from precdoctor.recording.steps.step_attempt import Attempt
from precdoctor.recording.steps.weight_updates import corrections_on_device, intended_update


class NamedParameter(NamedTuple):
    """A parameter of an optimizer, or the part of a flat parameter that belongs to one weight, with the weight's name.

    Attributes:
        parameter: the optimizer's parameter.
        place: module of the weight.
        name: of the weight.
        group: the parameter group.
        weight: the model's weight that the parameter or part is a copy of; None if it is no copy.
        part: the weight's elements in the flat parameter; None for all.
    """

    parameter: Tensor
    place: Place
    name: str
    group: dict[str, Any]
    weight: Tensor | None = None
    part: slice | None = None

    @property
    def trains(self) -> bool:
        """Whether the optimizer updates the parameter; copies and tensors with a hand-made gradient count as well."""
        return self.weight is not None or self.parameter.requires_grad or self.parameter.grad is not None

    def of(self, x: Tensor) -> Tensor:
        """Return this weight's part of a tensor with the parameter's shape."""
        return x if self.part is None else x.detach().reshape(-1)[self.part]


class OptimizerRows:
    """Makes the rows; ``name_of`` returns an optimizer's name."""

    def __init__(
        self, recorder: Recorder, name_of: Callable[[torch.optim.Optimizer], str], frozen_and_buffers: FrozenAndBuffers
    ) -> None:
        self._recorder, self._name_of = recorder, name_of
        self._next_copied = 0
        self._frozen_and_buffers = frozen_and_buffers
        self._masters = Masters(recorder)
        self._pieces = Pieces(lambda: (m for r in recorder.names.roots.values() if (m := r.called()) is not None))
        self._state_rows = StateRows(recorder)
        self._weights, self._given, self._updates = BatchedLaunch(), BatchedLaunch(), BatchedLaunch(HELD)

    def _held(self, optimizer: torch.optim.Optimizer) -> Iterator[NamedParameter]:
        """Iterate over the floating-point and complex parameters with place and name.

        Master copies get their weights' names, flat ones are split, parameters that no module owns are ``group.index``.
        """
        recorder = self._recorder
        for g, group in enumerate(groups_of(optimizer)):
            for i, parameter in enumerate(parameters_in(group)):
                if not (parameter.is_floating_point() or parameter.is_complex()):  # inlines tensor_leaves.counts
                    continue
                found = recorder.names.parameter(parameter)
                if found is None and (parts := list(self._parts(parameter, group))):
                    yield from (held for held in parts if recorder.wants(held.place))
                    continue
                if found is None and (weight := self._masters.weight_of(parameter)) is not None:
                    found = recorder.names.parameter(weight)
                else:
                    weight = None
                place, name = found or (Place(self._name_of(optimizer), "", type(optimizer).__name__), f"{g}.{i}")
                if recorder.wants(place):
                    yield NamedParameter(parameter, place, name, group, weight)

    def _parts(self, copy: Tensor, group: dict[str, Any]) -> Iterator[NamedParameter]:
        """Iterate over the weights that a flat master copy holds."""
        for piece in self._pieces.of(copy):
            weight = piece.weight()
            found = self._recorder.names.parameter(weight) if weight is not None else None
            if found is not None:
                yield NamedParameter(copy, *found, group, weight, piece.part)

    def owned(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> frozenset[tuple[str, str, str]] | None:
        """Return root, module and name of the optimizer's parameters; None if a gradient of theirs has no row in this
        step.

        Args:
            optimizer: about to step.
            closure: whether the step has one: the gradients and their rows do not exist yet.
        """
        recorder = self._recorder
        options = recorder.options
        if options.include or options.exclude or not options.takes("weight_grad"):
            return None
        parameters = parameters_of(optimizer)
        found = [recorder.names.parameter(p) for p in parameters]
        own = [(f[0].root, f[0].module, f[1]) for f in found if f is not None]
        if len(own) < len(found):
            return None
        if not closure:  # a gradient from an earlier step's backward pass has no row in this one
            sites = [e.site for e in recorder.slots.touched.values() if e.site.kind == "weight_grad"]
            arrived = {(s.place.root, s.place.module, s.name) for s in sites}
            if not arrived.issuperset([key for p, key in zip(parameters, own, strict=True) if p.grad is not None]):
                return None
        return frozenset(own)

    def weights(self, optimizer: torch.optim.Optimizer, *, first: bool = True) -> None:
        """Record weights and master copies before the step, and what no optimizer updates.

        Args:
            optimizer: about to step.
            first: whether this is the step's first optimizer or group; only then record what no optimizer updates.
        """
        recorder = self._recorder
        self._pieces.begin()
        self._masters.look_at(optimizer, lambda p: bool(self._pieces.of(p)))
        with self._weights as together:
            shared_out = False
            for held in self._held(optimizer):
                parameter, place, name = held.parameter, held.place, held.name
                if not held.trains:
                    continue
                shared_out = shared_out or held.part is not None
                own = parameter if held.weight is None else stored(held.weight)
                if tensor_leaves.plain(own) is not None:
                    recorder.measure(place, "weight", name, own, restart=True, together=together)
                masters: Iterable[Tensor] = ()
                if held.weight is None:
                    masters = masters_in_state(optimizer, parameter)
                elif own.dtype != parameter.dtype:
                    masters = (held.of(parameter),)
                for master in masters:
                    recorder.measure(place, "master_weight", name, master, restart=True, together=together)
            if not first:
                return
            if shared_out:
                self._replicated(together)
            for _, module in recorder.names.models():
                self._frozen_and_buffers.record(module, together)

    def _replicated(self, together: BatchedLaunch) -> None:
        """Record weights whose master copies other ranks may hold, because ranks are compared by them."""
        recorder = self._recorder
        for weight in self._pieces.replicated():
            found = recorder.names.parameter(weight)
            if found is not None and recorder.wants(found[0]):
                recorder.measure(found[0], "weight", found[1], weight, restart=True, together=together)

    def given_gradients(self, attempt: Attempt) -> None:
        """Record gradients as the optimizer gets them, still scaled for a fused one that unscales them itself."""
        recorder = self._recorder
        if not recorder.options.takes("weight_grad_step"):
            return
        scaled = attempt.by_scaler and static.attribute(attempt.optimizer, "grad_scale") is not None
        with self._given as together:
            for held in self._held(attempt.optimizer):
                if held.parameter.grad is not None:
                    given = held.parameter.grad if held.part is None else held.of(held.parameter.grad)
                    entry = recorder.measure(held.place, "weight_grad_step", held.name, given, together=together)
                    if entry is not None:
                        entry.scaled = scaled

    def copy_weights(self, attempt: Attempt) -> None:
        """Copy weights about to change, up to ``--scene-memory``, round robin over the steps."""
        if not self._recorder.options.takes("update"):
            return
        changing = {id(h.parameter): h.parameter for h in self._held(attempt.optimizer) if h.trains}
        candidates = [p for p in changing.values() if attempt.closure or p.grad is not None]
        budget, taken = memory_limits.for_copies(self._recorder.options), 0
        start = self._next_copied % len(candidates) if candidates else 0
        with kernels.apart_from_user_modes():
            for parameter in candidates[start:] + candidates[:start]:
                dense = tensor_leaves.plain(parameter)
                size = 0 if dense is None else dense.numel() * dense.element_size()
                if dense is None or size > budget:
                    continue
                budget -= size
                taken += 1
                attempt.before[id(parameter)] = dense.detach().clone()
                attempt.gradients[id(parameter)] = parameter.grad
        self._next_copied = start + taken

    def updates(self, attempt: Attempt) -> None:
        """Record, per weight, the update that the optimizer intended and the change that remained after rounding."""
        recorder = self._recorder
        if not attempt.before:
            return
        with self._updates as together:
            with kernels.apart_from_user_modes():
                corrections = corrections_on_device(attempt.optimizer)
            last: tuple[Tensor | None, Tensor | kernels.Adam | None] = None, None
            for held in self._held(attempt.optimizer):
                parameter = held.parameter
                before = attempt.before.get(id(parameter))
                grad = attempt.gradients.get(id(parameter)) if parameter.grad is None else parameter.grad
                if before is None or grad is None:
                    continue
                with kernels.apart_from_user_modes():
                    after = tensor_leaves.plain(parameter)
                    if last[0] is not parameter:  # several parts of one parameter
                        intended = intended_update(attempt.optimizer, parameter, grad, before, held.group, corrections)
                        last = parameter, intended
                    intended = last[1]
                    if after is None or intended is None or not after.shape == before.shape == intended.shape:
                        continue
                    if held.part is not None:
                        before, after = held.of(before), held.of(after)
                        intended = intended.part(held.of) if isinstance(intended, kernels.Adam) else held.of(intended)
                    if isinstance(intended, kernels.Adam) and not kernels.supports_update(before, after, intended):
                        intended = intended.update(before)
                launch = Update(before, intended)
                own = parameter if held.part is None else held.of(parameter)
                after = detached(after) if modes_open() else after.detach()
                recorder.measure(held.place, "update", held.name, own, after, launch=launch, together=together)

    def states(self, attempt: Attempt) -> None:
        """Record the optimizer's state after the step, on some of the sampled steps."""
        if attempt.takes_state is None:
            attempt.takes_state = self._state_rows.due(attempt.name)
        if attempt.takes_state:
            held = ((h.parameter, h.place, h.name, h.of) for h in self._held(attempt.optimizer))
            self._state_rows.record(attempt.name, (attempt.optimizer, *attempt.driven), held)
