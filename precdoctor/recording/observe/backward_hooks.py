"""Hooks of the backward pass: loss, micro-steps, and each parameter's gradient as this rank accumulates it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from precdoctor.recording.deepscan.window import StepWindow
from precdoctor.recording.fp8.fp8_casts import Casts
from precdoctor.recording.kernels.outside_user_modes import modes_open, only_estimates
from precdoctor.recording.microscope.guard import Guard
from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import Place, Root
from precdoctor.recording.model.weight_pieces import gathered
from precdoctor.recording.observe.gradient_looks import EarlyLook
from precdoctor.recording.observe.logits import Logits
from precdoctor.recording.observe.module_hooks import ModuleHooks
from precdoctor.recording.ops.dispatched_ops import open_modes, step_aside, step_back, sweep
from precdoctor.recording.process import attach
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.scene.loss_code import LossCode, is_bad
from precdoctor.recording.slots.batched_launch import Gradients
from precdoctor.recording.slots.deferred import CUDA, defer
from precdoctor.recording.steps.abandoned_attempts import AbandonedAttempts
from precdoctor.recording.steps.missing_zero_grad import KeptGradients
from precdoctor.recording.steps.optimizerless_steps import OptimizerlessSteps
from precdoctor.recording.steps.scaled_losses import PRODUCT, constant_factor, given_factor

_LOSS = Place("", "", "")
#: Frames of these packages are skipped when a backward call's line is recorded: the line of their caller says more.
_FRAMEWORKS = ("torch", "accelerate", "transformers", "lightning", "pytorch_lightning", "deepspeed")


class BackwardHooks:
    """Patches ``torch.autograd.backward`` (``Tensor.backward`` calls it by attribute) and hooks leaf gradients."""

    def __init__(
        self,
        recorder: Recorder,
        optimizerless: OptimizerlessSteps,
        abandoned: AbandonedAttempts,
        kept_gradients: KeptGradients,
        loss_code: LossCode,
        casts: Casts,
        guard: Guard,
        window: StepWindow,
        module_hooks: ModuleHooks,
        *,
        logits: Logits,
        early: EarlyLook,
    ) -> None:
        self._recorder = recorder
        self._casts, self._window = casts, window
        self._loss_code = loss_code
        self._optimizerless = optimizerless
        self._abandoned = abandoned
        self._kept_gradients = kept_gradients
        self._gradients = Gradients()
        self._judge = guard.after_backward
        self._module_hooks = module_hooks
        self._logits, self._early = logits, early
        #: By id of the parameter: its hook. Between samples these hooks are removed.
        self._hooked: dict[int, tuple[weakref.ref[Tensor], RemovableHandle]] = {}
        recorder.when_step_begins.append(self._step_begins)

    def install(self) -> None:
        """Patch ``torch.autograd.backward``. Call once per process. Signature and ``__wrapped__`` are kept."""
        original = torch.autograd.backward
        recorder, loss_code = self._recorder, self._loss_code
        begin, end = guarded(recorder)(self._before_backward), guarded(recorder)(self._after_backward)
        casts_begin = guarded(recorder)(self._casts.backward_begins)
        casts_end = guarded(recorder)(self._casts.backward_ended)
        hooks = self._module_hooks

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            # Reentrant checkpointing calls backward inside a backward pass; that is no micro-step of its own.
            inside = torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling()
            inside = inside or (modes_open() > 0 and only_estimates())
            threads = recorder.threads
            elsewhere = get_ident() != threads.own and threads.elsewhere()
            if inside or elsewhere or not (recorder.state == "armed" or self._arms()):
                original(*args, **kwargs)
                return
            if loss_code.running:
                loss_code.close()
            tensors = args[0] if args else kwargs.get("tensors")
            begin(tensors, args[1] if len(args) > 1 else kwargs.get("grad_tensors"))
            looking = casts_begin() if self._casts.met else None
            aside = step_aside() if open_modes else None
            try:
                original(*args, **kwargs)
            finally:
                if aside:
                    step_back(aside)
                if hooks.out:
                    hooks.resume()
                if looking is not None:
                    casts_end(looking)
                end(tensors)

        torch.autograd.backward = backward

    def _arms(self) -> bool:
        """Begin to record at a backward call: weights may be plain tensors, in no module. Return whether it began."""
        recorder = self._recorder
        return recorder.state == "idle" and self._loss_code.running and recorder.arm()

    def _before_backward(self, tensors: Tensor | Iterable[Tensor] | None, gradients: Any) -> None:
        """Record what is known before the backward pass; ``gradients`` are those given for its roots, or None.

        Then drop interrupted calls, let an open scan follow, and take module hooks out while checkpoints recompute.
        """
        try:
            roots = static.tensors(tensors)
            if self._logits.mode is not None:
                self._logits.close()
            self._recorder.in_backward = True
            if not (CUDA.get("_initialized", True) and self._recorder.capture.runs):
                self._note_loss(roots, gradients)
                if self._loss_code.supported:
                    self._loss_code.backward_begins(roots, gradients)
        finally:
            if self._window.is_open:
                self._window.enter_backward()
            hooks, stack = self._module_hooks, getattr(self._recorder.local, "stack", None)
            if stack:  # a keyboard interrupt ends a call without running our hooks
                hooks.let_go(stack)
            if hooks.out:
                hooks.resume()
            if hooks.recomputes and self._optimizerless.has_optimizer and not (stack or self._recorder.live):
                hooks.take_out()

    def _note_loss(self, roots: list[Tensor], gradients: Any) -> None:
        """Record the roots of the backward pass: loss values, constant factors, and on sampled steps their rows."""
        recorder, claim = self._recorder, self._recorder.claim
        if recorder.drain is None or claim.forwards_are_steps:
            claim.backward_begins()
        self._abandoned.backward_begins()
        self._kept_gradients.backward_begins()
        facts, losses = recorder.current, self._kept_gradients.losses
        losses.passes += 1
        if losses.in_use:
            losses.backward_begins(roots, gradients)
        if losses.pass_is_scaled is False:
            facts.unscaled_passes.append(recorder.micro_step)
            facts.unscaled_losses.append(len(facts.losses))
            if recorder.live or losses.unscaled_line[0] is None:
                losses.unscaled_line = attach.caller_outside(*_FRAMEWORKS) or losses.unscaled_line
        if recorder.trace is not None:
            recorder.trace.look_at("loss", [("loss", x) for x in roots])
        if facts.backward_file is None and (where := attach.caller_outside(*_FRAMEWORKS)) is not None:
            facts.backward_file, facts.backward_line = where
        for index, root in enumerate(roots):
            if root.numel() == 1 and root.is_floating_point():
                facts.losses.append(defer(root, by_drain=True))
                facts.narrow_loss = facts.narrow_loss or root.dtype is torch.float16
                node = root.grad_fn
                if node is not None and node.name() == PRODUCT and (factor := constant_factor(root)) is not None:
                    facts.root_factors.append(factor)
                elif gradients is not None and (factor := given_factor(gradients)) is not None:
                    facts.root_factors.append(factor)
                    facts.unscaled_losses.append(len(facts.losses) - 1)
            if recorder.live:
                name = "" if len(roots) == 1 else str(index)
                recorder.measure(_LOSS, "loss", name, root)
        if recorder.live or not self._optimizerless.has_optimizer:
            self.hook_parameters()

    def _after_backward(self, tensors: Any) -> None:
        """Record what is known after the backward pass, also if it raised; ``tensors`` are its roots."""
        try:
            if self._window.is_open:
                self._window.leave()
            if open_modes:
                sweep()
            if self._gradients.seen:
                self._gradients.end()
        finally:
            try:
                self._end_pass(tensors)
            finally:
                if self._loss_code.bare:
                    self._loss_code.reopen()

    def _end_pass(self, tensors: Any) -> None:
        """Count the micro-step and inform the step's observers; without an optimizer the guard judges the gradients."""
        self._recorder.in_backward = False
        if CUDA.get("_initialized", True) and self._recorder.capture.runs:
            return
        optimizerless = self._optimizerless
        weights: list[Tensor] = []
        if not optimizerless.has_optimizer:
            weights = self._loss_code.weights
            optimizerless.leaves_derived(weights)
        self._recorder.end_micro_step()
        if self._early.hook is not None or self._early.arriving:
            self._early.backward_ended()
        self._abandoned.backward_ended()
        self._kept_gradients.backward_ended()
        if not optimizerless.has_optimizer or optimizerless.reached:
            optimizerless.backward_ended()
        if not optimizerless.has_optimizer:
            loss_bad = issubclass(type(tensors), Tensor) and is_bad(tensors)
            self._judge(weights, loss_bad=loss_bad, whole=not optimizerless.gradients_are_gone)

    def hook_parameters(self) -> None:
        """Put a post-accumulate hook on every parameter that needs a gradient and has no hook of ours yet.

        Called as a backward pass begins: all its parameters exist by then, and no gradient has been accumulated.
        """
        names = self._recorder.names
        for root in names.roots.values():
            module = root.module()
            if module is None:
                continue
            whole = {id(shard): own for shard, own in gathered(module)}
            for parameter in static.parameters(module):
                target = whole.get(id(parameter), parameter)  # the hooks of a shard run only after the reduction
                if target is not parameter:
                    names.name_alike(parameter, target)
                if target.requires_grad and target.is_leaf:
                    self._hook(target)

    def _hook(self, parameter: Tensor) -> None:
        known = self._hooked.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return
        handle = parameter.register_post_accumulate_grad_hook(self._gradient_hook())
        _put_first(parameter, handle.id)
        self._hooked[id(parameter)] = weakref.ref(parameter), handle

    def _step_begins(self) -> None:
        """Between samples, remove our hooks from parameters, except beside other hooks, whose order must not change."""
        if self._logits.mode is not None:
            self._logits.close()
        if self._module_hooks.out:
            self._module_hooks.resume()
        if not self._hooked or self._recorder.live or not self._optimizerless.has_optimizer:
            return
        for key, (ref, handle) in list(self._hooked.items()):
            parameter = ref()
            hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks is None or len(hooks) < 2:
                handle.remove()
                del self._hooked[key]

    def _gradient_hook(self) -> Callable[[Tensor], None]:
        """Return a post-accumulate hook, which records the gradient of the one parameter that it is put on."""
        recorder, optimizerless, gradients = self._recorder, self._optimizerless, self._gradients
        owner: Root | None = None

        def precdoctor_weight_grad(parameter: Tensor) -> None:
            if recorder.live or not optimizerless.has_optimizer or owner is None or not owner.trained:
                record_gradient(parameter)

        @guarded(recorder)
        def record_gradient(parameter: Tensor) -> None:
            nonlocal owner
            found = recorder.names.search_parameter(parameter)
            grad = parameter.grad
            if found is None or grad is None:
                return
            place, name = found
            owner = recorder.names.roots.get(place.root)
            if owner is not None:
                owner.trained = True
            if not optimizerless.has_optimizer:
                optimizerless.gradient_arrived(parameter)
            if not (recorder.live and recorder.in_backward):
                return
            if parameter.is_cuda:
                self._early.arriving.append(weakref.ref(parameter))
            if recorder.wants(place):
                together = gradients.waiting_room(grad)
                recorder.measure(place, "weight_grad", name, grad, restart=True, together=together)

        return precdoctor_weight_grad


def _put_first(parameter: Tensor, key: int) -> None:
    """Make the hook with this key run first: an older hook may step with the gradient and drop it."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if issubclass(type(hooks), dict) and len(hooks) > 1 and key in hooks:
        ordered = sorted(hooks.items(), key=lambda item: item[0] != key)  # torch runs them in the order of insertion
        hooks.clear()
        hooks.update(ordered)
