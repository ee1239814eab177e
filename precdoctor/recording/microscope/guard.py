"""The guard: checks, before the optimizer changes the weights, that all it would use is finite, and acts if it is not.

It looks once per step at the loss and at the gradients in the form the optimizer will get. That is at most one wait for
the device, on sampled steps a second one for the new weights, and none with ``--on-nonfinite observe``. Gradients are
reduced over ranks by then, so all ranks decide alike and no collective of ours is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.kernels.list_layout import Layout
from precdoctor.recording.microscope import event_rows
from precdoctor.recording.microscope.evaluations import Evaluations
from precdoctor.recording.microscope.given_up import GivenUp
from precdoctor.recording.microscope.incidents import Incidents, LastGradients
from precdoctor.recording.microscope.optimizer_replay import SpoiltStep, bad_settings
from precdoctor.recording.model import live_objects, static
from precdoctor.recording.model.optimizer_contents import parameters_of
from precdoctor.recording.ops.source_lines import innermost_user_line, line_columns
from precdoctor.recording.process import attach
from precdoctor.recording.process.attach import STOPPED_BY_US
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.compiled_function import trained_in
from precdoctor.recording.scene.loss_code import LossCode
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.slots.deferred import is_capturing, read
from precdoctor.recording.slots.step_batch import looks_like_a_scale
from precdoctor.recording.steps.persistent_state import BufferWatch, OptimizerStateWatch, Poisoned, state_tensors
from precdoctor.recording.steps.sentinel import Look, amax, are_sharded, gradient_sentinel, gradients_of, largest
from precdoctor.recording.steps.step_attempt import Streak

#: Maximum number of poisoned tensors named per incident.
_MAX_POISONED = 8


class Guard:
    """Judges each step attempt; calls ``suspect`` to have the next step scanned."""

    def __init__(self, context: StepContext, scene: Scene, loss_code: LossCode, suspect: Callable[[], None]) -> None:
        self._context, self._scene, self._suspect = context, scene, suspect
        self.incidents = Incidents(context, scene)
        self.given_up = GivenUp(context, scene, loss_code, self.incidents, self.found_bad, self._loss_is_bad)
        self.evaluations = Evaluations(context, scene, self.incidents)
        context.when_forked.append(self._forget)
        self._last_gradients = LastGradients(context, self._number_of_bad_step)
        self._forget()

    def _forget(self) -> None:
        self._last_bad: int | None = None
        #: By optimizer: if several share a scaler, one backoff is one skip of each.
        self._streaks: static.ByIdentity[torch.optim.Optimizer, Streak] = static.ByIdentity()
        self._buffers = BufferWatch(self._context, self._scene.earlier)
        self._state = OptimizerStateWatch(self._context)
        self._weights: static.ByIdentity[torch.optim.Optimizer, Layout] = static.ByIdentity()
        #: The gradient amax of the step in progress; None if it was not read.
        self._gradient: float | None = None
        self._last_gradients.left = None
        #: Whether a buffer of a trained model has been non-finite since an earlier step.
        self._poisoned_before = False
        #: For a step with a closure: whether the optimizer has written to weights already; whether it can be skipped.
        self.has_moved, self.may_skip = False, True

    @property
    def _policy(self) -> str:
        return self._context.options.on_nonfinite

    def halt_if_asked(self) -> None:
        """Stop the run before a step attempt changes anything, if ``--halt-on`` has asked for it.

        Raises:
            SystemExit: to stop the run; the log is closed.
        """
        if (why := self._context.halt) is not None:
            self._stop(f"{why}; stopped at step {self._context.step}")

    def skips_step(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, look: Look | None = None
    ) -> bool:
        """Judge loss and gradients, examine what is wrong; return whether the optimizer must not change the weights.

        Args:
            look: at this step's gradients, if they were read already.

        Raises:
            SystemExit: to stop the run (``--on-nonfinite stop``); the log is closed.
        """
        policy = self._context.options.on_nonfinite
        if policy == "observe":
            return False
        if self._context.trace is not None and self._context.traced:
            return self._skips_traced_step(optimizer, scaled=scaler is not None)
        judge_last = None if self._last_gradients.left is None else self._last_gradients.take(self._context.step)
        if policy in ("skip", "stop") and are_sharded(parameters_of(optimizer)):
            self._refuse_sharded()
        launched = self._buffers.launch()
        # Waiting for what was launched last suffices: the rest has arrived by then.
        poisoned = self._buffers.judge(*launched) if launched[1] else []
        gradients_bad = self._gradients_are_bad(optimizer, look)
        if judge_last is not None:
            judge_last()
        loss_bad = self._loss_is_bad(scaled=scaler is not None or self._context.current.loss_scale is not None)
        if self.has_moved and (gradients_bad or loss_bad) and not self._finite_before(optimizer)["weights"]:
            return False  # the optimizer made the weights bad: after_step reports it
        step = self._context.current.step
        streak = self._streaks.get(optimizer) or self._streaks.put(optimizer, Streak())
        self._context.current.bad = gradients_bad or loss_bad
        streak.add(bad=gradients_bad or loss_bad)
        if not gradients_bad and not loss_bad:
            if poisoned:
                self._examine_buffers(poisoned, streak)
            if len(self._scene.calls) > 1 or not self._context.micro_step:
                self.given_up.step_begins(lambda: self._finite_before(optimizer))
            return False
        if scaler is not None and not loss_bad and not streak.is_stuck(scaler):
            self._leave_to_scaler(poisoned, streak)
            return False
        follows, self._last_bad = self._last_bad == step - 1, step
        if not (follows and policy == "examine"):  # else bad weights of the step before explain this one
            more = {"finite_before": self._finite_before(optimizer)}
            self._examine(loss_bad=loss_bad, gradients_bad=gradients_bad, more=more, poisoned=poisoned, streak=streak)
        if policy == "stop":
            self._stop(f"--on-nonfinite stop, at step {step}")
        return policy == "skip" and self.may_skip and (gradients_bad or not attach.has_other_ranks())

    def left_out(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Examine a step that the script itself leaves out. The weights are safe, so the run is never stopped.

        Args:
            optimizer: whose step is left out.
            scaler: that has unscaled its gradients; None if they were discarded because they are non-finite.
        """
        context = self._context
        if self._policy == "observe" or context.traced:
            return
        found = context.current.found_inf
        gradients_bad = scaler is None or bool(read(found))
        poisoned = self._buffers.judge(*self._buffers.launch())
        known = scaler is not None or context.current.loss_scale is not None
        scaled = known or any(map(looks_like_a_scale, context.current.root_factors))
        loss_bad = self._loss_is_bad(scaled=scaled)
        streak = self._streaks.get(optimizer) or self._streaks.put(optimizer, Streak())
        streak.add(bad=gradients_bad or loss_bad)
        if not gradients_bad and not loss_bad:
            self._examine_buffers(poisoned, streak)
            return
        if scaled and not loss_bad and (scaler is None or not streak.is_stuck(scaler)):
            self._leave_to_scaler(poisoned, streak)
            return
        follows, self._last_bad = self._last_bad == context.step - 1, context.step
        if not follows:
            more = {"finite_before": self._finite_before(optimizer)}
            self._examine(loss_bad=loss_bad, gradients_bad=gradients_bad, more=more, poisoned=poisoned, streak=streak)

    def _leave_to_scaler(self, poisoned: list[Poisoned], streak: Streak) -> None:
        """Let the scaler skip the step; examine the second skip in a row all the same."""
        self._examine_buffers(poisoned, streak)
        if streak.is_suspicious and not poisoned:
            self._suspect()
            self._examine(loss_bad=False, gradients_bad=True, more={"suspicion": True}, poisoned=[], streak=streak)

    def after_backward(self, weights: Sequence[Tensor], *, loss_bad: bool, whole: bool) -> None:
        """Judge a backward pass of a script that updates its weights by hand, where no step is announced.

        Gradients are only judged if all weights are on the CPU.

        Args:
            weights: plain tensors that have gradients now; empty if modules hold the weights.
            loss_bad: whether the loss is known to be non-finite.
            whole: whether all gradients are still there.

        Raises:
            SystemExit: to stop the run (``--on-nonfinite stop``); the log is closed.
        """
        context = self._context
        if self._policy == "observe" or context.traced:
            return
        step, early = context.step, not weights and context.step == context.options.first_step
        weights = weights or trained_in(c.module for c in self._scene.calls) or context.names.trained_weights()
        found = gradient_sentinel(weights) if weights and all(p.is_cpu for p in weights) else None
        if found is not None and whole and not early:  # else an optimizer may step yet, and record them itself
            context.current.grad_norm, context.current.grad_amax = found
        gradients_bad = found is not None and not math.isfinite(largest(found[1]))
        scaled = any(map(looks_like_a_scale, context.current.root_factors))
        if not (loss_bad or (gradients_bad and not scaled)):
            return
        if step == context.options.first_step and live_objects.instances(torch.optim.Optimizer):
            return  # they may step yet, and announce it
        follows, self._last_bad = self._last_bad in {step - 1, step}, step
        if not follows:
            self._examine(loss_bad=loss_bad, gradients_bad=gradients_bad, more={}, poisoned=[], streak=Streak())
        if self._policy == "stop":
            self._stop(f"--on-nonfinite stop, at step {step}")

    def found_bad(self, step: int) -> bool:
        """Return whether loss, gradients or weights of ``step`` are an incident; what a loss scaler skips is none."""
        return self._last_bad == step

    def _skips_traced_step(self, optimizer: torch.optim.Optimizer, *, scaled: bool) -> bool:
        """Return whether to skip a step that ``--arm-next`` traces; in an autopsy never: it repeats the first run."""
        if self._policy != "skip" or self._context.options.trace_steps is not None or scaled:
            return False
        with kernels.apart_from_user_modes():
            return self._gradients_are_bad(optimizer, None) or self._loss_is_bad(scaled=False)

    def after_step(
        self, optimizer: torch.optim.Optimizer, before: Mapping[int, Tensor], given: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Report an optimizer state (on the CPU) or weights that the optimizer has made non-finite.

        Weights are read on sampled steps, and if a learning rate is not finite. Waits for weights on a device.

        Args:
            before: copies of weights from before the step, by ``id``, as far as there are any.
            given: for a step with a closure: parameters and the gradients it began with.

        Raises:
            SystemExit: to stop the run.
        """
        context = self._context
        if context.trace is not None and context.traced:
            return
        policy = context.options.on_nonfinite
        if policy == "observe" or self._last_bad == context.current.step or not self.incidents.has_room:
            return
        gradient, self._gradient = self._gradient, None
        reads_weights = context.live or any(type(r) is float and not math.isfinite(r) for r in context.current.lrs)
        if not reads_weights and not self._state.due(optimizer, gradient):
            return
        parameters = parameters_of(optimizer)
        on_cpu = all(p.is_cpu for p in parameters)
        if not on_cpu and (not reads_weights or is_capturing()):
            return
        layout = self._weights.get(optimizer) or self._weights.put(optimizer, Layout())
        if not reads_weights or math.isfinite(largest(amax(parameters, layout))):
            due = on_cpu and (not context.live or self._state.due(optimizer, gradient))
            if due and (poisoned := self._state.look(optimizer)):
                self._report_state(optimizer, poisoned)
            return
        self._last_bad = context.step
        self._report_optimizer(optimizer, before, given)
        if policy == "stop":
            self._stop(f"--on-nonfinite stop, at step {context.step}")

    def _report_optimizer(
        self, optimizer: torch.optim.Optimizer, before: Mapping[int, Tensor], given: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Log an incident: the optimizer has made weights non-finite. Replay its step to find the op."""
        context = self._context
        line = innermost_user_line(past_own=True)
        step = SpoiltStep(optimizer, before, line, values=not context.options.redact_names)
        if not (bad := step.bad_parameters()):
            return  # parameters of a kind that the replay cannot read
        self.incidents.examined += 1
        first, settings = bad[0], bad_settings(optimizer, bad)
        data: dict[str, Any] = {"policy": self._policy, "bad_parameters": len(bad), "bad_settings": settings}
        if done := step.replay_until_closure(given) or step.replay(first):
            self.incidents.log(done, {**data, "weight": self.full_name(first)})
        else:
            rows = step.parameter_events(bad, self._named)
            self.incidents.log_step([{**row, **line_columns(line)} for row in rows], data)
        name = context.names.full_name(first) or "a parameter"
        attach.say(f"step {context.step}: the optimizer made {name} non-finite; training goes on")

    def _report_state(self, optimizer: torch.optim.Optimizer, poisoned: list[Poisoned]) -> None:
        context = self._context
        step = SpoiltStep(optimizer, {}, None, values=not context.options.redact_names)
        rows = step.state_events(poisoned, self._named)
        self.incidents.examined += 1
        spoilt = [p.parameter for p in poisoned if p.parameter is not None]
        data: dict[str, Any] = {
            "policy": self._policy,
            "target": "optimizer-state",
            "bad_settings": bad_settings(optimizer, spoilt),
            "poisoned": [event_rows.poisoned(p) for p in poisoned[:_MAX_POISONED]],
        }
        self.incidents.log_step(rows, data)
        name = poisoned[0].name
        attach.say(f"step {context.step}: state {name} of the optimizer has become non-finite; training goes on")

    def full_name(self, parameter: Tensor) -> str:
        """``root/module/name`` of a parameter."""
        return "/".join(self._named(parameter))

    def _named(self, parameter: Tensor) -> tuple[str, str, str]:
        found = self._context.names.parameter(parameter)
        return ("", "", "") if found is None else (found[0].root, found[0].module, found[1])

    def _number_of_bad_step(self, step: int) -> str:
        self._last_bad = step
        return self.incidents.number()

    # --- loss and gradients ------------------------------------------------------------------------------------------

    def _gradients_are_bad(self, optimizer: torch.optim.Optimizer, look: Look | None) -> bool:
        """Return whether a gradient is non-finite, from an earlier look if that covers the optimizer."""
        if look is not None and (look.of is None or look.covers(parameters_of(optimizer))):
            known = look.amax if type(look.amax) is float else largest(look.amax)
            if (finite := math.isfinite(known)) or look.of is None:
                self._gradient = known
                if finite and look.late is not None:
                    self._last_gradients.left = self._context.step, look.late
                return not finite
        # Either not read yet, or bad before clipping by value, which makes infinities finite.
        self._gradient = largest(amax(gradients_of(parameters_of(optimizer))))
        return not math.isfinite(self._gradient)

    def _loss_is_bad(self, *, scaled: bool) -> bool:
        """Return whether a loss is bad; an FP16 loss that only overflows times the loss scale is left to the scaler."""
        losses = self._context.current.losses
        if len(losses) == 1 and type(losses[0]) is float and math.isfinite(losses[0]):  # the usual case
            return False
        values = [v for v in map(read, losses) if v is not None]
        if not scaled or all(map(math.isfinite, values)):
            return not all(map(math.isfinite, values))
        return any(map(math.isnan, values)) or not self._context.current.narrow_loss

    def _finite_before(self, optimizer: torch.optim.Optimizer) -> dict[str, bool]:
        """Return whether the parts of a checkpoint were finite as the step began."""
        state = amax(x for _, _, x in state_tensors(optimizer))
        return {
            "weights": math.isfinite(largest(amax(parameters_of(optimizer)))),
            "optimizer_state": math.isfinite(largest(state)),
            "buffers": not self._poisoned_before,
        }

    # --- incidents ---------------------------------------------------------------------------------------------------

    def _examine_buffers(self, poisoned: list[Poisoned], streak: Streak) -> None:
        """Examine bad buffers of a step whose loss and gradients are finite, or that a scaler skips."""
        if poisoned and self.incidents.has_room:
            more = {"target": "buffers"}
            self._examine(loss_bad=False, gradients_bad=False, more=more, poisoned=poisoned, streak=streak)

    def _examine(
        self, *, loss_bad: bool, gradients_bad: bool, more: dict[str, Any], poisoned: list[Poisoned], streak: Streak
    ) -> None:
        """Log an incident; examine the step if few were examined so far."""
        data: dict[str, Any] = {
            "policy": self._policy,
            "loss_is_bad": loss_bad,
            "gradients_are_bad": gradients_bad,
            "skips_in_a_row": streak.skips,
            "poisoned": [event_rows.poisoned(p) for p in poisoned[:_MAX_POISONED]],
            **more,
        }
        self._poisoned_before = self._poisoned_before or bool(poisoned)
        what = "the loss" if loss_bad else "a gradient" if gradients_bad else f"buffer {poisoned[0].full_name}"
        look_at = "outputs" if loss_bad else "gradients" if gradients_bad else "buffers"
        self.incidents.examine(look_at, what, data, self._consequence())

    def _consequence(self) -> str:
        skip = "; the step is skipped" if self.may_skip else "; the step is not skipped, it has begun; training goes on"
        return {"stop": "", "skip": skip}.get(self._policy, "; training goes on")

    def _stop(self, message: str) -> None:
        self._context.close(reason="stopped", message=message)
        but = ", but for those that have been updated already" if self._context.in_backward or self.has_moved else ""
        attach.say(f"stopping the run ({message}); the weights are as they were before this step{but}")
        raise SystemExit(STOPPED_BY_US)

    def _refuse_sharded(self) -> None:
        message = f"--on-nonfinite {self._policy} does not work with sharded gradients, because ranks would disagree"
        self._context.close(reason="refused", message=message)
        attach.say(f"{message}; use --on-nonfinite examine")
        raise SystemExit(2)
