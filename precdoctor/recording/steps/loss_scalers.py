"""Loss scalers: the scale in force, its growth tracker, what ``step`` found, and whether gradients are unscaled yet.

Everything a scaler knows lies in device tensors; ``get_scale()`` would wait for them and is never called.
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

#: A scaler is updated although this optimizer, whose gradients it has unscaled, was not stepped.
LeftOutHook = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]
BeginHook = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]
StepHook = Callable[[torch.optim.Optimizer], None]
#: The optimizer with an id, as a scaler keeps its state; None for one that has not been met.
Known = Callable[[int], "torch.optim.Optimizer | None"]


class Scalers:
    """Patches ``torch.amp.GradScaler`` and, if loaded, FSDP's ``ShardedGradScaler``, which overrides
    ``scale``, ``unscale_`` and ``update``.
    """

    def __init__(
        self,
        recorder: Recorder,
        kept: KeptGradients,
        begin: BeginHook,
        end: StepHook,
        left_out: LeftOutHook,
        optimizer_of: Known,
    ) -> None:
        self._recorder = recorder
        self._kept = kept
        self._begin = begin
        self._end = end
        self._left_out = left_out
        self._optimizer_of = optimizer_of
        #: Optimizers that ``unscale_`` was called for and that have made no attempt since, each with its scaler.
        self.unscaled: dict[int, tuple[weakref.ref[torch.amp.GradScaler], weakref.ref[torch.optim.Optimizer]]] = {}
        recorder.when_forked.append(self.unscaled.clear)
        #: Those of them whose scaler has been updated since: their gradients were finite.
        self._updated: set[int] = set()
        recorder.when_forked.append(self._updated.clear)
        self._known: static.ByIdentity[torch.amp.GradScaler, bool] = static.ByIdentity()
        #: Scalers whose ``scale`` was used since their last ``update``: gradients carry their scale.
        self.in_use: static.ByIdentity[torch.amp.GradScaler, bool] = static.ByIdentity()
        self._sharded_patched = False

    def install(self) -> None:
        """Patch the class; every CPU and CUDA scaler of torch derives from it."""
        kind = torch.amp.GradScaler
        wraps = {"scale": self._scaling, "unscale_": self._unscaling, "step": self._stepping, "update": self._updating}
        for name, wrap in wraps.items():
            setattr(kind, name, wrap(getattr(kind, name)))

    def still_scaled(self, parameters: Iterable[Tensor]) -> bool | None:
        """Whether one of these gradients carries a loss scale that ``unscale_`` has not taken out; null: no scaler.

        With several optimizers every one whose parameters these are has to be unscaled.
        """
        if not (in_use := self.in_use.keys()):
            return None
        stages = {
            key: state["stage"].value
            for scaler in in_use
            for key, state in static.attribute(scaler, "_per_optimizer_states", {}).items()
            if state["stage"].value  # OptState: 0 is READY, 1 UNSCALED, 2 STEPPED
        }
        if 1 not in stages.values():
            return True
        optimizers = [self._optimizer_of(key) for key in stages]
        if any(o is None for o in optimizers):  # before its first step nobody has met it
            return False
        unscaled = {id(p) for o in optimizers if o is not None for p in parameters_of(o)}
        return any(p.requires_grad and p.grad is not None and id(p) not in unscaled for p in parameters)

    def _meet(self, scaler: torch.amp.GradScaler) -> None:
        if not self._known.get(scaler):
            self._known.put(scaler, True)
            if self._recorder.facts is not None:
                self._recorder.facts.scaler(scaler)

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @guarded(self._recorder)
        def note(scaler: torch.amp.GradScaler, losses: Any) -> None:
            if self._recorder.state == "armed" and _is_enabled(scaler):
                self._meet(scaler)
                self.in_use.put(scaler, True)
                self._kept.losses.given(losses)

        @functools.wraps(original)
        def scale(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            note(scaler, args[0] if args else kwargs.get("outputs"))
            return original(scaler, *args, **kwargs)

        return scale

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
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

    def _unscaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @guarded(self._recorder)
        def note(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
            if self._recorder.state == "armed" and _is_enabled(scaler):
                self.unscaled[id(optimizer)] = (weakref.ref(scaler), weakref.ref(optimizer))
                self._updated.discard(id(optimizer))
                self._kept.unscaled(optimizer)

        @functools.wraps(original)
        def unscale_(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, optimizer, *args, **kwargs)  # raises when it is the second one
            note(scaler, optimizer)
            return result

        return unscale_

    def _updating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @guarded(self._recorder)
        def note(scaler: torch.amp.GradScaler) -> None:
            if self.unscaled and self._recorder.state == "armed" and not self._recorder.capture.runs:
                self._end_left_out(scaler)
            self.in_use.drop(scaler)

        @functools.wraps(original)
        def update(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            note(scaler)  # before it: the update adds up what was found in place, and forgets it
            return original(scaler, *args, **kwargs)

        return update

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
        facts = self._recorder.current
        facts.loss_scale = defer(static.attribute(scaler, "_scale"), by_drain=True)
        facts.growth_tracker = defer(static.attribute(scaler, "_growth_tracker"), by_drain=True)

    def _step_ended(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self._recorder.state != "armed" or self._recorder.capture.runs:
            return
        self._note_found(scaler, optimizer)
        self._kept.losses.stepped()
        self._end(optimizer)

    def _note_found(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the scaler has checked gradients at all; what it found is read later."""
        state = dict.get(static.attribute(scaler, "_per_optimizer_states", {}), id(optimizer), {})
        found = list(state.get("found_inf_per_device", {}).values())
        if found:
            total = found[0] if len(found) == 1 else torch.stack([f.to(found[0].device) for f in found]).sum()
            self._recorder.current.found_inf = defer(total, by_drain=True)
        return bool(found)

    # --- attempts that the script leaves out --------------------------------------------------------------------------

    def attempted(self, optimizer: torch.optim.Optimizer) -> None:
        """An attempt of this optimizer has ended: what was unscaled for it is used up.

        One that wraps another, or is wrapped, has the same parameters.
        """
        first = _first_parameter(optimizer)
        for key, (_, known) in list(self.unscaled.items()):
            other = known()
            if other is None or other is optimizer or _first_parameter(other) is first:
                del self.unscaled[key]
                self._updated.discard(key)

    def has_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``unscale_`` was called for it, and no attempt of it has followed."""
        known = self.unscaled.get(id(optimizer))
        return known is not None and known[1]() is optimizer

    def has_updated(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the scaler was updated since, as its gradients were finite: they stay, or are to be thrown away."""
        return self.has_unscaled(optimizer) and id(optimizer) in self._updated

    def leaves_out(self, optimizer: torch.optim.Optimizer) -> bool:
        """Gradients are thrown away: end the attempt if a scaler has unscaled them for a step. False if none has."""
        scaler = self.unscaled[id(optimizer)][0]() if self.has_unscaled(optimizer) else None
        return scaler is not None and self._leave_out(scaler, optimizer)

    def _end_left_out(self, scaler: torch.amp.GradScaler) -> None:
        """``update`` is called: what it has unscaled and nobody has stepped with was an attempt if it is not finite.

        Finite gradients that stay are added to, by loops that update the scaler after every micro-batch; those that are
        thrown away end the attempt when they are.
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
        """What a scaler that is about to be updated found in the gradients; it is no attempt yet, if so.

        Reading it waits for the device. With ``--on-nonfinite observe`` nobody does: throwing them away will show it.
        """
        if not self._note_found(scaler, optimizer):
            return True
        self._note_scale(scaler)
        found = self._recorder.current.found_inf
        if callable(found) and self._recorder.options.on_nonfinite == "observe":
            return True
        return not read(found)

    def _leave_out(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        if not self._note_found(scaler, optimizer):
            if self._recorder.current.found_inf is None:
                return False  # it had no gradients
        else:
            self._note_scale(scaler)
        self._patch_sharded()
        self._meet(scaler)
        self._left_out(scaler, optimizer)
        return True

    def _patch_sharded(self) -> None:
        """FSDP's scaler overrides them; its module is heavy, so it is only patched where the script loads it."""
        module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
        if module is not None and not self._sharded_patched:
            self._sharded_patched = True
            kind = module.ShardedGradScaler
            if "scale" in vars(kind):
                kind.scale = self._scaling(kind.scale)
            if "unscale_" in vars(kind):
                kind.unscale_ = self._unscaling(kind.unscale_)
            if "update" in vars(kind):
                kind.update = self._updating(kind.update)


def _first_parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    return next(iter(parameters_of(optimizer)), None)


def _is_enabled(scaler: torch.amp.GradScaler) -> bool:
    return static.attribute(scaler, "_enabled") is True
