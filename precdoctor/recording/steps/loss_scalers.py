"""Follows loss scalers: the current scale, growth tracker, found Infs, and whether gradients are unscaled yet.

A scaler keeps all of this in device tensors. ``get_scale()`` would wait for them and is never called.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import static
from precdoctor.recording.model.optimizer_contents import parameters_of
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.deferred import defer, read
from precdoctor.recording.steps.missing_zero_grad import KeptGradients

#: Called with scaler and optimizer as a step begins, or if the script skips the step after ``unscale_``.
AttemptHook = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]
StepHook = Callable[[torch.optim.Optimizer], None]
#: Returns the optimizer with this id, the key of a scaler's per-optimizer state; None if it was never met.
Known = Callable[[int], "torch.optim.Optimizer | None"]


class Scalers:
    """Patches ``torch.amp.GradScaler`` and, if loaded, FSDP's ``ShardedGradScaler``, which overrides some methods."""

    def __init__(
        self,
        recorder: Recorder,
        kept: KeptGradients,
        begin: AttemptHook,
        end: StepHook,
        left_out: AttemptHook,
        optimizer_of: Known,
    ) -> None:
        self._recorder = recorder
        self._kept = kept
        self._begin = begin
        self._end = end
        self._left_out = left_out
        self._optimizer_of = optimizer_of
        #: By id: optimizers that were given to ``unscale_`` and have made no attempt since, with their scalers.
        self.unscaled: dict[int, tuple[weakref.ref[torch.amp.GradScaler], weakref.ref[torch.optim.Optimizer]]] = {}
        #: Ids of the optimizers in ``unscaled`` whose scaler has been updated since, after finite gradients.
        self._updated: set[int] = set()
        recorder.when_forked += [self.unscaled.clear, self._updated.clear]
        #: Scalers whose ``scale`` was used since their last ``update``: gradients carry their scale.
        self.in_use: dict[int, weakref.ref[torch.amp.GradScaler]] = {}
        self._sharded_patched = False

    def install(self) -> None:
        """Patch ``GradScaler``; every CPU and CUDA scaler of torch derives from it."""
        kind = torch.amp.GradScaler
        kind.step = self._stepping(kind.step)  # type: ignore[method-assign]
        self._patch(kind)

    def still_scaled(self, parameters: Iterable[Tensor]) -> bool | None:
        """Return whether one of these parameters' gradients still carries a loss scale.

        False if the script has written to gradients after the backward pass: it unscales by hand. None if no scaler is
        in use, and before the first step.
        """
        if not (in_use := [scaler for ref in self.in_use.values() if (scaler := ref()) is not None]):
            return None
        stages = {
            key: state["stage"].value
            for scaler in in_use
            for key, state in static.attribute(scaler, "_per_optimizer_states", {}).items()
            if state["stage"].value  # OptState: 0 is READY, 1 UNSCALED, 2 STEPPED
        }
        if 1 not in stages.values():
            written = self._kept.written_since_backward(parameters)
            return None if written is None else not written
        optimizers = [self._optimizer_of(key) for key in stages]
        if any(o is None for o in optimizers):  # an optimizer is unknown before its first step
            return False
        unscaled = {id(p) for o in optimizers if o is not None for p in parameters_of(o)}
        return any(p.requires_grad and p.grad is not None and id(p) not in unscaled for p in parameters)

    def _meet(self, scaler: torch.amp.GradScaler) -> None:
        """Log a scaler's facts the first time it is used in a run."""
        if self._recorder.facts is not None:
            self._recorder.facts.scaler(scaler)

    # --- patches -----------------------------------------------------------------------------------------------------

    def _patch(self, kind: type[torch.amp.GradScaler]) -> None:
        """Have calls noted of those methods that a class defines itself."""
        before = {"update": self._note_update}
        after: dict[str, Callable[..., None]] = {"scale": self._note_losses, "unscale_": self._note_unscaled}
        for name in (before.keys() | after.keys()) & vars(kind).keys():
            setattr(kind, name, self._noting(getattr(kind, name), before.get(name), after.get(name)))

    def _noting(
        self,
        original: Callable[..., Any],
        before: Callable[..., None] | None,
        after: Callable[..., None] | None,
    ) -> Callable[..., Any]:
        """Wrap a method: call ``before`` with its arguments; then ``after`` with its result and these."""
        guard = guarded(self._recorder)
        begin, end = guard(before) if before is not None else None, guard(after) if after is not None else None

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if begin is not None:
                begin(*args, **kwargs)
            result = original(*args, **kwargs)
            if end is not None:
                end(result, *args, **kwargs)
            return result

        return method

    def _note_losses(self, scaled: Any, scaler: torch.amp.GradScaler, outputs: Any, *_: Any, **__: Any) -> None:
        """Remember the losses that ``scale`` was given, and its results."""
        if self._recorder.state == "armed" and _is_enabled(scaler):
            self._meet(scaler)
            self.in_use[id(scaler)] = weakref.ref(scaler)
            self._kept.losses.given(scaler, outputs, scaled)

    def _note_unscaled(
        self, _result: None, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *_: Any, **__: Any
    ) -> None:
        """Remember the optimizer whose gradients ``unscale_``, which raises if called twice, has unscaled."""
        if self._recorder.state == "armed" and _is_enabled(scaler):
            self.unscaled[id(optimizer)] = (weakref.ref(scaler), weakref.ref(optimizer))
            self._updated.discard(id(optimizer))
            self._kept.unscaled(optimizer)

    def _note_update(self, scaler: torch.amp.GradScaler, *_: Any, **__: Any) -> None:
        """End the attempts that the script left out; before ``update``, which merges the found Infs and clears them."""
        if self.unscaled and self._recorder.state == "armed" and not self._recorder.capture.runs:
            self._end_left_out(scaler)
        self._kept.losses.updated(scaler)
        self.in_use.pop(id(scaler), None)

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``step``: it is an attempt."""
        begin, end = guarded(self._recorder)(self._step_begins), guarded(self._recorder)(self._step_ended)

        @functools.wraps(original)
        def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.state not in ("armed", "idle") or not _is_enabled(scaler):
                return original(scaler, optimizer, *args, **kwargs)
            begin(scaler, optimizer)
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                end(scaler, optimizer)

        return step

    def _step_begins(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        recorder = self._recorder
        if (recorder.state == "idle" and not recorder.arm()) or recorder.capture.runs:
            return
        recorder.claim.make()
        if recorder.state != "armed":
            return
        self._patch_sharded()
        self._meet(scaler)
        self._note_scale(scaler)
        self._begin(scaler, optimizer)

    def _note_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Put the current scale and growth tracker into the step's facts, without waiting for the device."""
        facts = self._recorder.current
        facts.loss_scale = defer(static.attribute(scaler, "_scale"), by_drain=True)
        facts.growth_tracker = defer(static.attribute(scaler, "_growth_tracker"), by_drain=True)

    def _step_ended(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self._recorder.state != "armed" or self._recorder.capture.runs:
            return
        self._note_found(scaler, optimizer)
        self._kept.losses.stepped()
        self._kept.stepped_by_scaler(optimizer, self._recorder.slots.touched.values())
        self._end(optimizer)

    def _note_found(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        """Put ``found_inf``, summed over devices, unread into the step's facts. Return False if nothing was checked."""
        state = dict.get(static.attribute(scaler, "_per_optimizer_states", {}), id(optimizer), {})
        found = list(state.get("found_inf_per_device", {}).values())
        if found:
            total = found[0] if len(found) == 1 else torch.stack([f.to(found[0].device) for f in found]).sum()
            self._recorder.current.found_inf = defer(total, by_drain=True)
        return bool(found)

    # --- attempts that the script leaves out --------------------------------------------------------------------------

    def attempted(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget that the gradients of this attempt's optimizer were unscaled.

        An optimizer that wraps this one, or is wrapped by it, has the same parameters and is forgotten as well.
        """
        first = _first_parameter(optimizer)
        for key, (_, known) in list(self.unscaled.items()):
            other = known()
            if other is None or other is optimizer or _first_parameter(other) is first:
                del self.unscaled[key]
                self._updated.discard(key)

    def has_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer was given to ``unscale_`` and has made no attempt since."""
        known = self.unscaled.get(id(optimizer))
        return known is not None and known[1]() is optimizer

    def has_updated(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the scaler was updated since that ``unscale_``, having found only finite gradients."""
        return self.has_unscaled(optimizer) and id(optimizer) in self._updated

    def leaves_out(self, optimizer: torch.optim.Optimizer) -> bool:
        """End the attempt whose gradients are being discarded. Return False if no scaler has unscaled any."""
        scaler = self.unscaled[id(optimizer)][0]() if self.has_unscaled(optimizer) else None
        return scaler is not None and self._leave_out(scaler, optimizer)

    def _end_left_out(self, scaler: torch.amp.GradScaler) -> None:
        """As ``update`` is called, end the attempts with non-finite gradients that no optimizer stepped with.

        Finite gradients may be kept: loops that update the scaler after every micro-batch add to them. Their attempt
        ends if the script discards them.
        """
        for used, known in list(self.unscaled.values()):
            optimizer = known()
            if used() is not scaler or optimizer is None:
                continue
            if self._was_finite(scaler, optimizer):
                self._updated.add(id(optimizer))
                self._kept.scaler_updated(optimizer)
            else:
                self._leave_out(scaler, optimizer)

    def _was_finite(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the scaler found only finite gradients; True if unknown.

        May wait for the device. With ``--on-nonfinite observe`` it never waits but returns True: the attempt then ends
        when the gradients are discarded.
        """
        if not self._note_found(scaler, optimizer):
            return True
        self._note_scale(scaler)
        found = self._recorder.current.found_inf
        if callable(found) and self._recorder.options.on_nonfinite == "observe":
            return True
        return not read(found)

    def _leave_out(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        """End an attempt that the script left out. Return False if its optimizer had no gradients."""
        if not self._note_found(scaler, optimizer):
            if self._recorder.current.found_inf is None:
                return False
        else:
            self._note_scale(scaler)
        self._patch_sharded()
        self._meet(scaler)
        self._left_out(scaler, optimizer)
        return True

    def _patch_sharded(self) -> None:
        """Patch FSDP's scaler once the script has loaded its module, which is too heavy to import here."""
        module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
        if module is not None and not self._sharded_patched:
            self._sharded_patched = True
            self._patch(module.ShardedGradScaler)


def _first_parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    return next(iter(parameters_of(optimizer)), None)


def _is_enabled(scaler: torch.amp.GradScaler) -> bool:
    return static.attribute(scaler, "_enabled") is True
