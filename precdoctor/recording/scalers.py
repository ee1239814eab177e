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

from precdoctor.recording.batch import defer
from precdoctor.recording.recorder import Recorder, guarded

BeginHook = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]
StepHook = Callable[[torch.optim.Optimizer], None]
#: The optimizer with an id, as a scaler keeps its state; None for one that has not been met.
Known = Callable[[int], "torch.optim.Optimizer | None"]


class Scalers:
    """Patches ``torch.amp.GradScaler`` and, if loaded, FSDP's ``ShardedGradScaler``, which overrides ``scale``."""

    def __init__(self, recorder: Recorder, begin: BeginHook, end: StepHook, optimizer_of: Known) -> None:
        self._recorder = recorder
        self._begin = begin
        self._end = end
        self._optimizer_of = optimizer_of
        self._known: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        #: Scalers whose ``scale`` was used since their last ``update``: gradients carry their scale.
        self._in_use: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self._sharded_patched = False

    def install(self) -> None:
        """Patch the class; every CPU and CUDA scaler of torch derives from it."""
        kind = torch.amp.GradScaler
        for name, wrap in (("scale", self._scaling), ("step", self._stepping), ("update", self._updating)):
            setattr(kind, name, wrap(getattr(kind, name)))

    def still_scaled(self, parameters: Iterable[Tensor]) -> bool | None:
        """Whether one of these gradients carries a loss scale that ``unscale_`` has not taken out; null: no scaler.

        With several optimizers every one whose parameters these are has to be unscaled.
        """
        if not len(self._in_use):
            return None
        stages = {
            key: state["stage"].value
            for scaler in self._in_use
            for key, state in scaler._per_optimizer_states.items()
            if state["stage"].value  # OptState: 0 is READY, 1 UNSCALED, 2 STEPPED
        }
        if 1 not in stages.values():
            return True
        optimizers = [self._optimizer_of(key) for key in stages]
        if any(o is None for o in optimizers):  # before its first step nobody has met it
            return False
        unscaled = {id(p) for o in optimizers if o is not None for group in o.param_groups for p in group["params"]}
        return any(p.requires_grad and p.grad is not None and id(p) not in unscaled for p in parameters)

    def _meet(self, scaler: torch.amp.GradScaler) -> None:
        if scaler not in self._known:
            self._known.add(scaler)
            if self._recorder.facts is not None:
                self._recorder.facts.scaler(scaler)

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @guarded(self._recorder)
        def note(scaler: torch.amp.GradScaler) -> None:
            if self._recorder.state == "armed" and scaler.is_enabled():
                self._meet(scaler)
                self._in_use.add(scaler)

        @functools.wraps(original)
        def scale(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            note(scaler)
            return original(scaler, *args, **kwargs)

        return scale

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = guarded(self._recorder)(self._step_begins), guarded(self._recorder)(self._step_ended)

        @functools.wraps(original)
        def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.state not in ("armed", "idle") or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            begin(scaler, optimizer)
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                end(scaler, optimizer)

        return step

    def _updating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @guarded(self._recorder)
        def note(scaler: torch.amp.GradScaler) -> None:
            self._in_use.discard(scaler)

        @functools.wraps(original)
        def update(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            note(scaler)
            return original(scaler, *args, **kwargs)

        return update

    def _step_begins(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self._recorder.state == "idle" and not self._recorder.arm():
            return
        self._patch_sharded()
        self._meet(scaler)
        facts = self._recorder.current
        facts.loss_scale = defer(scaler._scale)
        facts.growth_tracker = defer(scaler._growth_tracker)
        self._begin(scaler, optimizer)

    def _step_ended(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self._recorder.state != "armed":
            return
        state = scaler._per_optimizer_states.get(id(optimizer), {})
        found = list(state.get("found_inf_per_device", {}).values())
        if found:
            total = found[0] if len(found) == 1 else torch.stack([f.to(found[0].device) for f in found]).sum()
            self._recorder.current.found_inf = defer(total)
        self._end(optimizer)

    def _patch_sharded(self) -> None:
        """FSDP's scaler overrides ``scale``; its module is heavy, so it is only patched where the script loads it."""
        module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
        if module is not None and not self._sharded_patched:
            self._sharded_patched = True
            kind = module.ShardedGradScaler
            if "scale" in vars(kind):
                kind.scale = self._scaling(kind.scale)
