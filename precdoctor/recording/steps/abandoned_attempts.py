"""Ends attempts that the script itself gives up: its gradients hold an Inf or a NaN, and it discards them.

Hand-written loss scaling does this, and loops that check the norm before they step. Nothing announces such an attempt,
and that gradients are discarded does not prove it: gradient surgery, SAM and saliency maps discard finite ones all the
time, and half of a GAN gets gradients that it never uses. So a step is ended only if nothing else can be the reason:
the process has one optimizer, which has never discarded finite gradients, and its gradients are not finite while its
weights are. Gradients that a scaler unscaled need no such proof: a script unscales only for a step. The step ends as
the next forward pass begins; another backward pass through the same graph is gradient surgery.

Loops that call ``zero_grad`` just before ``backward`` discard after that forward pass, whose rows belong to the next
step. If every backward pass so far began with fresh gradients, the loop is such a loop: the step is ended before it.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from precdoctor.recording.model import static
from precdoctor.recording.model.optimizer_contents import parameters_of
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import Deferred, is_capturing, read
from precdoctor.recording.steps.sentinel import amax, gradient_sentinel

#: Backward passes until a loop counts as known: the first pass of an accumulation also begins with fresh gradients.
_KNOWN_AFTER: Final = 2

#: L2 norm and amax of gradients.
Found = tuple[Deferred, Deferred]
LeaveOut = Callable[[torch.optim.Optimizer, Found | None], None]


class AbandonedAttempts:
    """Watches ``zero_grad`` and the forward and backward passes around it, and ends the attempts given up.

    Attributes:
        forward_in_attempt: called as a forward pass begins while an attempt is open.
        backward_in_attempt: called as a backward pass ends while an attempt is open.
        attempt_open: whether an attempt is open; set by the optimizer hooks.
        thrown_losses: by id of the optimizer, how many losses of the step came before its gradients were discarded.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        #: Set by :meth:`install`, as are the two functions below.
        self._leave_out: LeaveOut = lambda _optimizer, _found: None
        self._is_unscaled: Callable[[torch.optim.Optimizer], bool] = lambda _optimizer: False
        self._is_updated: Callable[[torch.optim.Optimizer], bool] = lambda _optimizer: False
        self.forward_in_attempt: Callable[[], None] = lambda: None
        self.backward_in_attempt: Callable[[], None] = lambda: None
        self._forget()
        context.when_forked.append(self._forget)

    def _forget(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._module: weakref.ref[nn.Module] | None = None
        self.attempt_open = False
        #: Whether discarded gradients prove nothing in this process: several optimizers, or finite ones were discarded.
        self._is_ambiguous = False
        #: The optimizer whose bad gradients were discarded, until a forward or backward pass begins.
        self._discarded: tuple[weakref.ref[torch.optim.Optimizer], Found] | None = None
        self.thrown_losses: dict[int, int] = {}
        self._has_left_out = False
        self._went_forward = False
        self._zeroed = False
        self._backward_passes = 0
        self._always_fresh = True

    def install(
        self,
        leave_out: LeaveOut,
        is_unscaled: Callable[[torch.optim.Optimizer], bool],
        is_updated: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        """Patch ``zero_grad`` of optimizers and modules.

        Args:
            leave_out: ends the attempt of an optimizer as one that the script gave up; takes the optimizer, and norm
                and amax of its gradients if they have been read.
            is_unscaled: returns whether a scaler has unscaled the optimizer's gradients and it has not stepped since.
            is_updated: returns whether that scaler was updated since, after finite gradients.
        """
        self._leave_out, self._is_unscaled, self._is_updated = leave_out, is_unscaled, is_updated
        optimizer, module = torch.optim.Optimizer, nn.Module
        optimizer.zero_grad = self._noting(  # type: ignore[method-assign]
            optimizer.zero_grad, self._optimizer_discards, self._is_used_up
        )
        module.zero_grad = self._noting(module.zero_grad, self._module_discards)  # type: ignore[method-assign]

    def _noting(
        self,
        original: Callable[..., Any],
        note: Callable[[Any], None],
        is_nothing: Callable[[Any], bool] = lambda _owner: False,
    ) -> Callable[..., Any]:
        """Wrap a ``zero_grad``: call ``note`` before it, unless ``is_nothing`` returns True."""
        context, guarded_note = self._context, guarded(self._context)(note)

        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if context.state == "armed" and not torch.compiler.is_compiling() and not is_nothing(owner):
                guarded_note(owner)
            return original(owner, *args, **kwargs)

        return zero_grad

    # --- optimizers, passes and attempts -----------------------------------------------------------------------------

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer steps, or shows itself by its ``zero_grad``."""
        known = self._optimizer() if self._optimizer is not None else None
        if known is None:
            self._optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            self._is_ambiguous = True

    def forward_begins(self) -> None:
        """As a root module is called, with gradients on, end the step if the script gave its attempt up."""
        if not torch.is_grad_enabled():
            return
        if self.attempt_open:
            self.forward_in_attempt()
        if self._discarded is not None:
            self._end_discarded()
        if self._always_fresh and self._context.micro_step:
            self._end_if_fresh()
        self._went_forward = True

    def run_ends(self) -> None:
        """At the end of the run, end the last step if its gradients were discarded, or would be as in earlier steps."""
        self._end_discarded()
        if self._has_left_out:
            self._end_if_fresh()
        if len(self.thrown_losses) == 1:  # the step ends without an attempt, so its count is not set yet
            (self._context.current.thrown_losses,) = self.thrown_losses.values()

    def _end_discarded(self) -> None:
        """End the attempt whose gradients were discarded, if any."""
        discarded, self._discarded = self._discarded, None
        optimizer = discarded[0]() if discarded is not None else None
        if discarded is not None and optimizer is not None and not self.attempt_open:
            self._end(optimizer, discarded[1])

    def _end_if_fresh(self) -> None:
        """End the attempt if the known loop will discard its gradients: bad ones, or ones a scaler was updated for."""
        known = self._always_fresh and self._backward_passes >= _KNOWN_AFTER
        if not known or not self._context.micro_step or self._went_forward:
            return
        optimizer = self._first_optimizer()
        if optimizer is None or self.attempt_open:
            return
        if self._is_updated(optimizer):
            self._end(optimizer, None)
        elif not self._is_unscaled(optimizer):
            found = self._look(parameters_of(optimizer))
            if found is not None and _is_lost(found, optimizer):
                self._end(optimizer, found)

    def _end(self, optimizer: torch.optim.Optimizer, found: Found | None) -> None:
        self._has_left_out = True
        self._leave_out(optimizer, found)

    def backward_begins(self) -> None:
        """Note an outermost backward pass: gradients discarded before it, with no forward pass between, are surgery."""
        self._discarded = None
        self._backward_passes += 1
        self._always_fresh = self._always_fresh and self._zeroed
        self._zeroed = False

    def backward_ended(self) -> None:
        self._went_forward = False
        if self.attempt_open:
            self.backward_in_attempt()

    def attempt_ended(self) -> None:
        self._discarded, self.attempt_open = None, False
        self.thrown_losses.clear()

    def _is_used_up(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the known optimizer has already stepped with the gradients: the usual case, kept cheap."""
        used = not self._context.micro_step and not self._context.threads.others
        if used and self._optimizer is not None and self._optimizer() is optimizer:
            self._zeroed = True
            return True
        return False

    def _optimizer_discards(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle ``zero_grad`` of an optimizer: end its attempt, remember it for later, or rule it out."""
        self.meet(optimizer)
        self._zeroed = True
        if self._context.micro_step:
            self.thrown_losses[id(optimizer)] = len(self._context.current.losses)
        if not self._context.micro_step or self.attempt_open:
            return  # the gradients were used already, or a closure uses them
        if self._is_unscaled(optimizer):  # a script unscales only for a step
            if not (self._went_forward and self._is_updated(optimizer)):  # else it would get the next step's rows
                self._leave_out(optimizer, None)
        elif (found := self._look(parameters_of(optimizer))) is not None:
            if _is_finite(found):
                self._is_ambiguous = True
            elif not self._went_forward and _is_lost(found, optimizer):
                self._discarded = (weakref.ref(optimizer), found)

    def _module_discards(self, module: nn.Module) -> None:
        """Handle ``zero_grad`` of a module like that of the optimizer that trains it."""
        optimizer = self._first_optimizer()
        if optimizer is None:  # no optimizer has shown itself yet
            if self._context.micro_step and (found := self._look(list(static.parameters(module)))) is not None:
                self._is_ambiguous = self._is_ambiguous or _is_finite(found)
        elif not self._is_ambiguous and self._covers(module, optimizer):
            self._optimizer_discards(optimizer)

    def _covers(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the module has all parameters of the optimizer; cached for one module."""
        if self._module is None or self._module() is not module:
            own = {id(p) for p in static.parameters(module)}
            if not all(id(p) in own for p in parameters_of(optimizer)):
                return False
            self._module = weakref.ref(module)
        return True

    def is_trained(self, parameter: Tensor) -> bool:
        """Return whether the first optimizer met has this parameter."""
        optimizer = self._first_optimizer()
        return optimizer is not None and any(p is parameter for p in parameters_of(optimizer))

    # --- readings of gradients ---------------------------------------------------------------------------------------

    def _first_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the first optimizer met, if it is still alive."""
        return self._optimizer() if self._optimizer is not None else None

    def _look(self, parameters: list[Tensor]) -> Found | None:
        """Return norm and amax of the gradients; None if there are none, or they prove nothing or must not be read.

        On a device reading waits, so it is skipped with ``--on-nonfinite observe`` and while a graph is captured. With
        several ranks it is always skipped: gradients not reduced yet may differ, and step counts with them.
        """
        if self._is_ambiguous or attach.has_other_ranks():
            return None
        if not all(p.is_cpu for p in parameters) and (
            self._context.options.on_nonfinite == "observe" or is_capturing()
        ):
            return None
        return gradient_sentinel(parameters)


def _is_finite(found: Found) -> bool:
    """Return whether all gradients are finite; waits for the device."""
    largest = read(found[1])
    return largest is None or math.isfinite(largest)


def _is_lost(found: Found, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether gradients are not finite and the weights are; after SAM's first step both would be bad."""
    if _is_finite(found):
        return False
    largest = read(amax(parameters_of(optimizer)))
    return largest is None or math.isfinite(largest)
