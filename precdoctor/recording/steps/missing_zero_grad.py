"""Finds gradients that are never zeroed: each backward pass adds to the gradients of the step before.

Nothing announces a missing ``zero_grad``. So one gradient of each optimizer is watched by identity and version counter:
as a backward pass begins, is it still as the last pass or step left it? The check costs a comparison, and notices
whoever zeroes, drops or replaces the gradient. A GAN's discriminator gets the generator's gradients on top but zeroes
them, so it is not reported. If anything but clipping writes to the gradient before a step, the step does not count.

Writes through ``.data`` change no version counter. So before anything is reported, a few small gradients are copied
after a step and compared as the next backward pass begins, and all gradients are checked by identity and version.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.model.optimizer_contents import parameters_of
from precdoctor.recording.model.tensor_leaves import plain_gradient
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import Deferred, defer, is_capturing, read
from precdoctor.recording.slots.slot_table import Entry
from precdoctor.recording.steps.rescaled_sums import RescaledSums
from precdoctor.recording.steps.scaled_losses import MixedPasses, ScaledLosses

#: Steps in a row with kept gradients before they are confirmed by a comparison and reported.
ENOUGH: Final = 8
#: Number of gradients that are copied for the comparison, smallest first, and their most elements in all.
_COPIED: Final = 8
_MOST_ELEMENTS: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _GradientState:
    """A gradient as the last backward pass or step left it.

    Attributes:
        version: its version counter at that time.
        copy: its values at that time; None if they were not copied.
    """

    parameter: weakref.ref[Tensor]
    grad: weakref.ref[Tensor]
    version: int
    copy: Tensor | None = None

    @classmethod
    def of(cls, parameter: Tensor) -> _GradientState | None:
        """Return a parameter's gradient as it is now; None if there is none, or it has no version counter."""
        grad = plain_gradient(parameter)
        return None if grad is None else cls(weakref.ref(parameter), weakref.ref(grad), grad._version)

    def gradient(self) -> Tensor | None:
        """Return the parameter's gradient; None if it has been replaced or dropped."""
        parameter = self.parameter()
        grad = parameter.grad if parameter is not None else None  # first: it keeps the weakly referenced gradient alive
        return grad if grad is not None and self.grad() is grad else None

    @property
    def untouched(self) -> bool:
        """Whether the gradient is the same tensor and has not been written to."""
        parameter = self.parameter()
        grad = parameter.grad if parameter is not None else None
        return grad is not None and self.grad() is grad and grad._version == self.version


class _Watch:
    """The watched gradient of one optimizer, and the evidence that its gradients are kept."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, step: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = name
        self.state: _GradientState | None = None
        #: Version counter of the watched gradient as the optimizer's step began; -1 if there was none.
        self.step_version = -1
        #: Whether every backward pass since the last attempt began with the gradient untouched.
        self.intact = False
        #: Backward passes since the last attempt; passes summed in the gradient, the first of them in step ``since``.
        self.passes = self.summed = 0
        self.since = step
        #: Steps in a row that used kept gradients.
        self.steps = 0
        self.reported = False
        self.copies: list[_GradientState] = []
        self.copies_match: Deferred = None
        self.unchanged = self.compared = 0
        #: ``unscale_`` calls on these gradients since the last attempt; the most in one; attempts with several.
        self.unscaled = self.most_unscaled = self.repeated = self.attempts = 0
        self.sums = RescaledSums()
        self.mixed = MixedPasses()

    def look(self) -> bool:
        """Note the watched gradient's current state, and return whether it has changed.

        If the gradient is gone, watch another parameter's.
        """
        state, optimizer = self.state, self.optimizer()
        known = state.parameter() if state is not None else None
        grad = known.grad if known is not None else None
        if state is not None and type(grad) is Tensor and grad.layout is torch.strided and not grad.is_inference():
            if (same := state.grad() is grad) and state.version == grad._version:
                return False
            state.grad = state.grad if same else weakref.ref(grad)
            state.version = grad._version
            return True
        self.state = _GradientState.of(known) if known is not None else None
        if self.state is None and optimizer is not None:
            self.state = next((s for p in parameters_of(optimizer) if (s := _GradientState.of(p)) is not None), None)
        return True


class KeptGradients:
    """Watches the gradients of every optimizer from one step to the next."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._watches: dict[int, _Watch] = {}
        context.when_forked.append(self._watches.clear)
        context.when_closing.append(guarded(context)(self._run_ends))
        #: Losses given to a scaler whose scaled result was not used.
        self.losses = ScaledLosses(context)

    # --- backward passes ---------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """As an outermost backward pass begins, note for each optimizer whether its gradient is untouched."""
        for watch in self._watches.values():
            if self._context.live and watch.sums.expected:
                watch.sums.measure()
            if watch.state is None or not watch.state.untouched:
                watch.intact = False
                watch.unscaled = watch.summed = 0
                if self.losses.in_use:
                    watch.mixed.forget()
                watch.since = self._context.current.step
            elif watch.copies:
                self._compare(watch)

    def backward_ended(self) -> None:
        """As an outermost backward pass ends, note the new gradients; finish the watches of deleted optimizers."""
        for key, watch in tuple(self._watches.items()):
            if watch.optimizer() is None:
                self._end_series(self._watches.pop(key))
                continue
            changed = watch.look()
            if self.losses.in_use:
                watch.mixed.pass_ended(self.losses, self._context.micro_step - 1, changed=changed)
            if changed:
                watch.passes += 1
                watch.summed += 1
                if self._context.live and watch.sums.expected and (optimizer := watch.optimizer()) is not None:
                    watch.sums.measure(parameters_of(optimizer))

    def written_since_backward(self, parameters: Iterable[Tensor]) -> bool | None:
        """Return whether the script wrote to gradients after their backward pass; None before the first step.

        Judged by the watched gradients of these parameters. If none of these is watched, all must have been written to
        more often than the watched ones, or these decide.
        """
        own = {id(p): p for p in parameters}
        seen = [w.state for w in self._watches.values() if w.passes and w.state is not None]
        mine = [s for s in seen if id(s.parameter()) in own]
        if seen and not mine:
            states = map(_GradientState.of, own.values())
            if min((s.version for s in states if s is not None), default=0) > max(s.version for s in seen):
                return True
        seen = mine or seen
        return any(s.gradient() is not None and not s.untouched for s in seen) if seen else None

    # --- steps -------------------------------------------------------------------------------------------------------

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradient's version as the optimizer begins its step: later writes are the optimizer's own."""
        watch = self._watches.get(id(optimizer))
        if watch is not None and watch.optimizer() is optimizer:
            grad = watch.state.gradient() if watch.state is not None else None
            watch.step_version = grad._version if grad is not None else -1
            if self._context.live and watch.sums.expected:
                watch.sums.measure()

    def attempt_ended(self, optimizer: torch.optim.Optimizer, name: str, *, plain: bool) -> None:
        """Judge the gradients of an attempt that has ended, and note how it leaves them.

        Args:
            optimizer: of the attempt.
            name: its name in the log.
            plain: the optimizer has stepped alone, without a closure, outside of backward passes, and without a loss
                scaler, which would have divided the kept gradients by its scale.
        """
        watch = self._watches.get(id(optimizer))
        if watch is None or watch.optimizer() is not optimizer:
            watch = self._watches[id(optimizer)] = _Watch(optimizer, name, self._context.step)
            watch.summed, grad = self._context.micro_step, None
        else:
            watch.name = name
            grad = self._judge(watch, plain=plain)
            watch.attempts += 1
            if watch.unscaled:
                self._count_unscaled(watch)
            if self._context.live and watch.sums.step_ended(watch.passes, self._context.current.clip_norm):
                self._report_sums(watch)
        watch.intact, watch.passes, watch.mixed.done = True, 0, False
        if self.losses.in_use:
            watch.mixed.forget()
        if grad is not None and watch.state is not None:
            watch.state.version = grad._version
        else:
            watch.look()
        if watch.steps >= ENOUGH and not watch.reported and not watch.steps & (watch.steps - 1):
            self._copy(watch, optimizer)

    def _judge(self, watch: _Watch, *, plain: bool) -> Tensor | None:
        """Count the step if its gradients include those of the step before, else end the series.

        Returns:
            The watched gradient; None if it is gone.
        """
        state, step = watch.state, self._context.current.step
        grad = state.gradient() if state is not None else None
        clipped = self._context.current.clip_norm is not None
        written = state is None or watch.step_version != state.version
        if not plain or grad is None or grad._version != watch.step_version or (written and not clipped):
            self._end_series(watch)
            watch.summed, watch.since = 0, step + 1
        elif not watch.intact or not watch.passes:
            if watch.steps or watch.reported or watch.copies:
                self._end_series(watch)
        else:
            watch.steps += 1
            self._tell_if_sure(watch)
        return grad

    def _known(self, optimizer: torch.optim.Optimizer) -> _Watch | None:
        watch = self._watches.get(id(optimizer))
        return watch if watch is not None and watch.optimizer() is optimizer else None

    # --- confirmation and reports ------------------------------------------------------------------------------------

    def _copy(self, watch: _Watch, optimizer: torch.optim.Optimizer) -> None:
        """Copy small gradients after a step, and note identity and version of all."""
        watch.copies, room = [], _MOST_ELEMENTS
        if is_capturing():
            return
        found = [state for p in parameters_of(optimizer) if (state := _GradientState.of(p)) is not None]
        with kernels.apart_from_user_modes():
            for i, state in enumerate(sorted(found, key=_size)):
                grad = state.gradient()
                room -= _size(state)
                copied = grad is not None and i < _COPIED and room >= 0
                copy = grad.detach().clone() if grad is not None and copied else None
                watch.copies.append(_GradientState(state.parameter, state.grad, state.version, copy))

    def _compare(self, watch: _Watch) -> None:
        """Compare the gradients with the copies as the next backward pass begins; the result stays on the device."""
        states, watch.copies = watch.copies, []
        if is_capturing():
            return
        watch.unchanged, watch.compared = sum(state.untouched for state in states), len(states)
        with kernels.apart_from_user_modes(), torch.no_grad():
            pairs = [(s.copy, g) for s in states if s.copy is not None and (g := s.gradient()) is not None]
            if not pairs:
                return
            device = pairs[0][0].device
            copies_match = torch.stack([(a == b).all().to(device) for a, b in pairs]).all()
            some = torch.stack([(a != 0).any().to(device) for a, _ in pairs]).any()
            watch.copies_match = defer((copies_match & some).float())

    def _tell_if_sure(self, watch: _Watch, *, ended: bool = False) -> None:
        """Report kept gradients if the comparison confirms them.

        Reading the comparison's result waits for the device; with ``--on-nonfinite observe`` only if ``ended``.
        """
        if watch.reported or watch.copies_match is None:
            return
        if callable(watch.copies_match) and self._context.options.on_nonfinite == "observe" and not ended:
            return
        copies_match, watch.copies_match = read(watch.copies_match), None
        if copies_match:
            watch.reported = True
            self._report(watch)

    def _end_series(self, watch: _Watch) -> None:
        """End a series of steps with kept gradients, with a last report if it was reported before."""
        reported = watch.reported
        if watch.steps:
            self._tell_if_sure(watch, ended=True)
        if reported:
            self._report(watch)
        watch.steps, watch.reported, watch.copies_match = 0, False, None
        watch.copies = []

    def _report(self, watch: _Watch) -> None:
        message = f"the gradients of {watch.name} have not been zeroed since step {watch.since}"
        numbers = {"since": watch.since, "steps": watch.steps, "summed": watch.summed}
        self._event(watch, "kept-gradients", message, **numbers, kept=watch.unchanged, of=watch.compared)

    def _event(self, watch: _Watch, what: str, message: str, **numbers: Any) -> None:
        """Log a warning event at the place of the watched parameter."""
        data = {"message": message, "what": what, "optimizer": watch.name, **numbers}
        parameter = watch.state.parameter() if watch.state is not None else None
        found = self._context.names.parameter(parameter) if parameter is not None else None
        where = {"root": found[0].root, "module": found[0].module} if found is not None else {}
        self._context.event("warning", data=data, **where)

    def _run_ends(self) -> None:
        self.losses.run_ends()
        for watch in self._watches.values():
            self._end_series(watch)
            if watch.repeated > 1:
                self._report_unscaled(watch)
            self._report_sums(watch)
            if watch.mixed.steps > 1:
                self._report_mixed(watch)

    # --- repeated unscaling ------------------------------------------------------------------------------------------

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        watch = self._known(optimizer)
        if watch is None:
            name = type(optimizer).__name__  # it gets a number at its first attempt
            watch = self._watches[id(optimizer)] = _Watch(optimizer, name, self._context.step)
            watch.look()
        watch.unscaled += 1
        watch.mixed.done = True

    def scaler_updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the unscaled gradient as it is now, after clipping: the script keeps it."""
        watch = self._known(optimizer)
        if watch is not None and watch.state is not None and watch.state.gradient() is not None:
            watch.look()

    def _count_unscaled(self, watch: _Watch) -> None:
        """Count an attempt whose gradients were unscaled more than once; report the first."""
        times, watch.unscaled = watch.unscaled, 0
        facts = self._context.current
        if times < 2 or facts.left_out or facts.not_reached:
            return
        watch.repeated += 1
        watch.most_unscaled = max(watch.most_unscaled, times)
        if watch.repeated == 1:
            self._report_unscaled(watch)

    def _report_sums(self, watch: _Watch) -> None:
        if (found := watch.sums.found()) is not None:
            message = f"{watch.name} steps with gradients that were multiplied by {found['factor']:.3g} after each pass"
            self._event(watch, "rescaled-sum", message, **found)

    def _report_unscaled(self, watch: _Watch) -> None:
        message = f"{watch.name} steps with gradients that were unscaled {watch.most_unscaled} times"
        times, steps = watch.most_unscaled, watch.repeated
        self._event(watch, "unscaled-again", message, times=times, steps=steps, of=watch.attempts)

    # --- losses without the scale ------------------------------------------------------------------------------------

    def stepped_by_scaler(self, optimizer: torch.optim.Optimizer, entries: Iterable[Entry]) -> None:
        """Count an attempt whose gradients come from passes with and without the scale; report the first.

        ``entries`` are those of the step so far; empty unless it is sampled.
        """
        watch = self._known(optimizer)
        if watch is None:
            return
        early, names, found = watch.mixed.early, self._context.names, set()
        if early:  # gradients that only unscaled passes made
            rows = (e for e in entries if e.site.kind == "weight_grad" and {e.first_micro_step, e.micro_step} <= early)
            found = {(e.site.place, e.site.name) for e in rows}
        others: bool | None = None if early and not self._context.live else False
        if found:
            others = any(p.grad is not None and names.parameter(p) in found for p in parameters_of(optimizer))
        if watch.mixed.stepped(self.losses, others=others):
            self._report_mixed(watch)

    def _report_mixed(self, watch: _Watch) -> None:
        file, line = watch.mixed.line
        self._context.event("warning", file=file, line=line, data=watch.mixed.data(watch.name))


def _size(state: _GradientState) -> int:
    grad = state.gradient()
    return grad.numel() if grad is not None else 0
