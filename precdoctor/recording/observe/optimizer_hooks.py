"""The optimizer step: attempts, loss scalers, clipping. Module ``optimizer_rows`` makes the rows.

A step is an *attempt*: ``scaler.step(optimizer)`` or ``optimizer.step()``, whichever is outermost. A scaler that skips
does not call the optimizer at all (unless it is fused), so one hook alone would miss attempts. A script that skips by
itself calls neither: see ``loss_scalers`` and ``abandoned_attempts``. Optimizers that step during a backward pass as
their gradients arrive, often one per parameter, make one attempt together, which ends with the pass.
"""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from precdoctor.recording.kernels.outside_user_modes import modes_open, only_estimates
from precdoctor.recording.microscope.guard import Guard
from precdoctor.recording.model import static
from precdoctor.recording.model.optimizer_contents import gradients_of, groups_of, parameters_of, steps_in_progress
from precdoctor.recording.observe.closures import Closures, JudgedClosure
from precdoctor.recording.observe.frozen_and_buffers import FrozenAndBuffers
from precdoctor.recording.observe.gradient_looks import EarlyLook, GradientLooks
from precdoctor.recording.observe.optimizer_rows import OptimizerRows
from precdoctor.recording.process import memory_limits
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.shadowing.shadow import Shadow
from precdoctor.recording.slots.deferred import CUDA, Deferred, defer
from precdoctor.recording.steps.abandoned_attempts import AbandonedAttempts, Found
from precdoctor.recording.steps.loss_scalers import Scalers
from precdoctor.recording.steps.missing_zero_grad import KeptGradients
from precdoctor.recording.steps.optimizerless_steps import OptimizerlessSteps
from precdoctor.recording.steps.outer_optimizers import OuterOptimizers, makes_states
from precdoctor.recording.steps.step_attempt import Attempt, GradientsAside
from precdoctor.recording.steps.weight_updates import intention_of


class OptimizerHooks:
    """The global optimizer hooks and the patches around them."""

    def __init__(
        self,
        recorder: Recorder,
        optimizerless: OptimizerlessSteps,
        abandoned: AbandonedAttempts,
        kept_gradients: KeptGradients,
        guard: Guard,
        scene: Scene,
        frozen_and_buffers: FrozenAndBuffers,
        shadow: Shadow | None,
        early: EarlyLook,
    ) -> None:
        self._recorder = recorder
        self._guard, self._shadow = guard, shadow
        self._optimizerless = optimizerless
        self._abandoned = abandoned
        self._kept_gradients = kept_gradients
        self._attempt: Attempt | None = None
        #: The optimizer that stepped last in a backward pass.
        self._last_in_backward: weakref.ref[torch.optim.Optimizer] | None = None
        self._names: dict[int, tuple[weakref.ref[torch.optim.Optimizer], str]] = {}
        self._counts: dict[str, int] = {}
        self._rows = OptimizerRows(recorder, self._name, frozen_and_buffers)
        self._outer = OuterOptimizers(recorder, self.begin_by_library, self.end_by_library)
        self.scalers = Scalers(
            recorder, kept_gradients, self.begin_by_scaler, self.end_by_scaler, self.leave_out, self._optimizer_of
        )
        self._looks = GradientLooks(
            recorder, self.scalers, lambda: self._attempt is not None and self._attempt.closure, early
        )
        self._closures = Closures(
            recorder, guard, self._looks, scene, lambda: self._attempt if self._attempt and self._armed() else None
        )

    def install(self) -> None:
        """Register the hooks with torch, for every optimizer and scaler of the process."""
        recorder, abandoned = self._recorder, self._abandoned
        begin = guarded(recorder)(lambda: recorder.claim.make())  # noqa: PLW0108 - each fork has another claim
        pre, post = guarded(recorder)(self._pre_step), guarded(recorder)(self._post_step)

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            if ("deepspeed" in sys.modules and not self._outer.runs and makes_states()) or not self._armed():
                return None
            if recorder.drain is None and not begin():
                return None
            judged = pre(optimizer, closure=args[1] if len(args) > 1 else kwargs.get("closure"))
            if judged is None:
                return None
            return ((args[0], judged, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": judged})

        def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if self._attempt is not None and self._armed():
                post(optimizer)

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
        recorder.when_forked.append(self._forget)
        scalers = self.scalers
        scalers.install()
        self._outer.install()
        abandoned.install(self._gradients_discarded, scalers.has_unscaled, scalers.has_updated)
        abandoned.forward_in_attempt, abandoned.backward_in_attempt = self._forward_begins, self._pass_has_ended
        self._looks.install()

    def _armed(self) -> bool:
        """Return whether hooks may run now. Recording may begin here: a script can step before it calls any module."""
        recorder, threads = self._recorder, self._recorder.threads
        if modes_open() and only_estimates():
            return False
        if torch.compiler.is_compiling() or (get_ident() != threads.own and threads.elsewhere()):
            return False
        armed = recorder.state == "armed" or (recorder.state == "idle" and recorder.arm())
        return armed and not (CUDA.get("_initialized", True) and recorder.capture.runs)

    def _forget(self) -> None:
        """In a forked child, forget what was written to the parent's log."""
        self._attempt = self._looks.look = None
        self._names.clear()
        self._counts.clear()

    # --- attempts ----------------------------------------------------------------------------------------------------

    def _name(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the optimizer's name (``AdamW#0``); give it one and log its facts if it is new."""
        known = self._names.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        kind = static.text(type(optimizer).__name__)
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        name = f"{kind}#{number}"
        self._names[id(optimizer)] = (weakref.ref(optimizer), name)
        if self._recorder.facts is not None:
            self._recorder.facts.optimizer(name, optimizer, intention_of(optimizer))
        return name

    def _optimizer_of(self, key: int) -> torch.optim.Optimizer | None:
        known = self._names.get(key)
        return known[0]() if known is not None else None

    def _open(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        by_scaler: bool,
        closure: bool = False,
        groups: list[dict[str, Any]] | None = None,
    ) -> Attempt:
        """Begin an attempt: log its facts, and read its gradients unless a closure is still to make them."""
        if self._attempt is not None:
            self._end_raised(self._attempt)
        if self._recorder.options.may_halt:
            self._guard.halt_if_asked()
        attempt = self._attempt = Attempt(optimizer, self._name(optimizer), by_scaler=by_scaler)
        attempt.closure = closure
        self._optimizerless.has_optimizer = True
        self._abandoned.meet(optimizer)
        self._abandoned.attempt_open = True
        facts = self._recorder.current
        facts.optimizer = attempt.name
        attempt.in_backward = attempt.is_shared = self._recorder.in_backward
        attempt.is_unnamed = closure and self._recorder.live and not self._recorder.names.roots
        groups = groups_of(optimizer) if groups is None else groups
        self._note_groups(optimizer, groups)
        if self._recorder.live:
            if self._recorder.facts is not None:
                self._recorder.facts.more_groups(attempt.name, groups)
            self._outer.look()
            facts.gradients_of = None if attempt.in_backward else self._rows.owned(optimizer, closure=closure)
        if not closure:  # else gradients are still those of the step before
            self._looks.before_step(optimizer, groups)
        return attempt

    def _join(self, attempt: Attempt, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """Begin the step of one more optimizer in a shared attempt."""
        attempt.optimizer = optimizer
        self._note_groups(optimizer, groups, first=False)
        if attempt.in_backward:
            self._looks.before_further(optimizer, groups)

    def _end_raised(self, attempt: Attempt) -> None:
        """End an attempt whose step raised: torch called no hook at its end."""
        if attempt.aside is not None:
            attempt.aside.restore()
        self._close(attempt)

    def _forward_begins(self) -> None:
        """As a forward pass begins outside of the open attempt's closure, end the attempt: its step has raised."""
        attempt = self._attempt
        if attempt is None or attempt.by_scaler or attempt.is_shared:
            return
        if not steps_in_progress(attempt.optimizer):
            self._end_raised(attempt)

    def _pass_has_ended(self) -> None:
        """At the end of a backward pass, end the attempt made in it; record weights that only now have names."""
        if (attempt := self._attempt) is not None and attempt.in_backward:
            self._last_in_backward = weakref.ref(attempt.optimizer)
            self._close(attempt)
        elif attempt is not None and attempt.is_unnamed:
            attempt.is_unnamed = False
            self._rows.weights(attempt.optimizer)

    def _has_released(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this is no step: with gradient release, optimi has made it in the last backward pass."""
        ref = self._last_in_backward
        last = ref() if ref is not None and not self._recorder.micro_step else None
        return last is optimizer and all(p.grad is None for p in parameters_of(optimizer))

    def _note_groups(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], *, first: bool = True
    ) -> None:
        for group in groups:
            if "lr" in group:
                rate = lr if type(lr := group["lr"]) is float else defer(lr, by_drain=True)
                self._recorder.current.lrs.append(rate)
        if self._recorder.live and not (self._attempt is not None and self._attempt.is_unnamed):
            self._rows.weights(optimizer, first=first)

    def _close(self, attempt: Attempt) -> None:
        if self._recorder.trace is not None:
            self._recorder.trace.end()
        self._attempt = self._looks.look = None
        facts = self._recorder.current
        facts.not_reached = not attempt.reached
        facts.thrown_losses = self._abandoned.thrown_losses.get(id(attempt.optimizer), 0)
        unscaled = self.scalers.unscaled
        by_scaler = attempt.by_scaler or (bool(unscaled) and self.scalers.has_unscaled(attempt.optimizer))
        plain = attempt.reached and not (by_scaler or attempt.is_shared or attempt.closure)
        self._kept_gradients.attempt_ended(attempt.optimizer, attempt.name, plain=plain)
        if unscaled:
            self.scalers.attempted(attempt.optimizer)
        self._abandoned.attempt_ended()
        self._recorder.end_step()

    def begin_by_scaler(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        attempt = self._open(optimizer, by_scaler=True)
        look, self._looks.look = self._looks.look, None
        attempt.skipped = self._guard.skips_step(optimizer, scaler, look)
        self._compare(attempt)

    def end_by_scaler(self, _optimizer: torch.optim.Optimizer) -> None:
        """End the attempt as ``scaler.step(optimizer)`` returns or raises."""
        if self._attempt is not None and self._attempt.by_scaler:
            self._close(self._attempt)

    def begin_by_library(self, loss_scale: Deferred) -> None:
        """Note that a step of DeepSpeed's or Megatron's begins; the optimizers inside make the attempt."""
        if self._attempt is not None:
            self._close(self._attempt)
        self._recorder.current.loss_scale = loss_scale

    def end_by_library(self, inner: torch.optim.Optimizer | None, overflow: bool | None, grad_norm: Deferred) -> None:
        """End the attempt as the step of DeepSpeed's or Megatron's returns or raises.

        Args:
            inner: an optimizer of torch's inside the step; None if there is none.
            overflow: whether the library skipped the step because of non-finite gradients; None if it does not check.
            grad_norm: over all ranks, before clipping.
        """
        facts, attempt = self._recorder.current, self._attempt
        if overflow is not None and (overflow or facts.loss_scale is not None):
            facts.found_inf = float(overflow)
        if attempt is not None:
            if grad_norm is not None and attempt.reached and facts.gradients_of is None:
                facts.grad_norm = grad_norm
            self._close(attempt)
        elif overflow and inner is not None:
            self.leave_out(None, inner)
            self._optimizerless.has_optimizer = True

    def _gradients_discarded(self, optimizer: torch.optim.Optimizer, found: Found | None) -> None:
        """Record an attempt whose gradients were discarded, or are about to be; ``found`` is their norm and amax."""
        if not self.scalers.leaves_out(optimizer):
            self.leave_out(None, optimizer, found)

    def leave_out(
        self, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer, found: Found | None = None
    ) -> None:
        """Record an attempt that the script gave up: it asked neither the scaler nor the optimizer to step."""
        if self._recorder.capture.runs:
            return
        had_optimizer = self._optimizerless.has_optimizer
        attempt = self._open(optimizer, by_scaler=False)
        self._optimizerless.has_optimizer = had_optimizer  # an optimizer may serve only for its ``zero_grad``
        (facts := self._recorder.current).left_out = True
        if found is not None and facts.gradients_of is None:
            facts.grad_norm, facts.grad_amax = found
        self._guard.left_out(optimizer, scaler)
        if self._recorder.trace is not None:
            self._trace("gradients", optimizer)
        self._close(attempt)

    def _pre_step(self, optimizer: torch.optim.Optimizer, closure: object) -> JudgedClosure | None:
        """Run before ``optimizer.step()``. Return the closure to call instead of the given one, or None."""
        attempt, groups = self._attempt, groups_of(optimizer)
        # A wrapper whose groups are a property makes no attempt; the optimizer that it drives does.
        if not groups or (attempt is None and self._last_in_backward is not None and self._has_released(optimizer)):
            return None
        if attempt is not None and attempt.reached and _is_inside(attempt, optimizer):
            return None
        already_bad = False
        if attempt is not None and attempt.is_shared:
            already_bad = self._guard.found_bad(self._recorder.step)
            self._join(attempt, optimizer, groups)
        elif attempt is None or not attempt.by_scaler:
            attempt = self._open(optimizer, by_scaler=False, closure=closure is not None, groups=groups)
            attempt.is_shared = attempt.is_shared or self._outer.runs
        elif attempt.optimizer is not optimizer:
            attempt.driven.append(optimizer)
        attempt.closure = closure is not None
        plain = not attempt.by_scaler and not attempt.closure
        # The guard waits for the device, so launch first what the step records in any case.
        ahead = plain and self._recorder.live and self._recorder.options.on_nonfinite in ("examine", "observe")
        if ahead:
            self._rows.given_gradients(attempt)
        if plain and not already_bad:
            look, self._looks.look = self._looks.look, None
            attempt.skipped = self._guard.skips_step(optimizer, None, look)
        if not attempt.by_scaler and self._shadow is not None:
            self._compare(attempt)
        attempt.reached = not attempt.skipped
        self._kept_gradients.step_begins(attempt.optimizer)
        if attempt.closure and self._recorder.options.on_nonfinite != "observe":
            attempt.given = gradients_of(optimizer, memory_limits.for_copies(self._recorder.options))
        if self._recorder.trace is not None:
            self._trace("gradients", optimizer)
        if attempt.skipped:
            attempt.aside = GradientsAside(parameters_of(optimizer))
            return None
        if self._recorder.live:
            if not attempt.closure and not ahead:
                self._rows.given_gradients(attempt)
            self._rows.copy_weights(attempt)
        return self._closures.judged(attempt, closure) if attempt.closure and not attempt.by_scaler else None

    def _post_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run after ``optimizer.step()``: record updates and states, and close the attempt if it is complete."""
        attempt = self._attempt
        if attempt is None or (attempt.optimizer is not optimizer and not attempt.by_scaler):
            return
        if attempt.inner_steps and attempt.optimizer is optimizer:
            attempt.inner_steps -= 1
            return
        if attempt.closure:
            self._looks.after_closure(optimizer)
        if self._recorder.trace is not None:
            self._trace("weights", optimizer)
        if attempt.aside is not None:
            attempt.aside.restore()
        else:
            if self._recorder.live and attempt.closure:
                self._rows.given_gradients(attempt)
            given: list[tuple[Tensor, Tensor]] = []
            if attempt.given and all(grad._version == version for _, grad, version in attempt.given):
                given = [(p, grad) for p, grad, _ in attempt.given]
            self._guard.after_step(optimizer, attempt.before, given)
            if self._recorder.live:
                self._rows.updates(attempt)
                self._rows.states(attempt)
        attempt.before, attempt.gradients, attempt.given = {}, {}, []
        if not (attempt.by_scaler or attempt.is_shared):
            self._close(attempt)

    def _compare(self, attempt: Attempt) -> None:
        """Compare the step with a wide reference if ``shadow`` asked for it and it is due."""
        if self._shadow is not None:
            finite = not self._guard.found_bad(self._recorder.step)
            self._shadow.step_begins(attempt.name, closure=attempt.closure, finite=finite)

    def _trace(self, kind: str, optimizer: torch.optim.Optimizer) -> None:
        """Hand gradients or weights to the trace of the step, if one is running."""
        if (trace := self._recorder.trace) is not None and trace.running:
            found = ((self._guard.full_name(p), p.grad if kind == "gradients" else p) for p in parameters_of(optimizer))
            trace.look_at(kind, found)


def _is_inside(attempt: Attempt, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step runs inside an open attempt's step, and note it in the attempt.

    If the attempt's step has raised, the attempt is still open, but the new step does not run inside it.
    """
    depth = steps_in_progress(attempt.optimizer)
    if optimizer is attempt.optimizer:
        attempt.inner_steps += depth > 1
        return depth > 1
    if depth:
        attempt.driven.append(optimizer)
    return bool(depth)
