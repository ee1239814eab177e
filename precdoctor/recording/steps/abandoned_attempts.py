"""Attempts that a script gives up by itself: its gradients hold an Inf or a NaN, and it throws them away.

Hand-written loss scaling does it, and so do loops that look at the norm before they step. Nothing announces such an
attempt. That gradients are thrown away does not tell: gradient surgery, SAM and saliency maps do it with finite ones
all the time, and half of a GAN gets gradients nobody asked for. So a step is only ended where nothing else can be
meant: by the one optimizer of the process, which has never thrown finite gradients away, whose gradients are not finite
while its weights are. It ends as the next forward pass begins; another backward pass through the same graph is surgery.

Loops that call ``zero_grad`` just before ``backward`` do it after that forward pass, whose rows belong to the step to
come. Of those, the step is ended before, once they are known: every backward pass so far began with fresh gradients.
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

#: Backward passes after which a loop is known: the first one of an accumulation also begins with fresh gradients.
_KNOWN_AFTER: Final = 2

#: Norm and amax of gradients.
Found = tuple[Deferred, Deferred]
LeaveOut = Callable[[torch.optim.Optimizer, Found | None], None]


class AbandonedAttempts:
    """Watches ``zero_grad``, and the forward and backward passes around it."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        #: Ends the attempt of an optimizer; set on installation, as are the three questions.
        self._leave_out: LeaveOut = lambda _optimizer, _found: None
        self._in_step: Callable[[], bool] = lambda: False
        self._is_unscaled: Callable[[torch.optim.Optimizer], bool] = lambda _optimizer: False
        self._is_updated: Callable[[torch.optim.Optimizer], bool] = lambda _optimizer: False
        #: Told of forward passes that begin, and of backward passes that end, while an attempt is open.
        self.forward_in_attempt: Callable[[], None] = lambda: None
        self.backward_in_attempt: Callable[[], None] = lambda: None
        self._forget()
        context.when_forked.append(self._forget)

    def _forget(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._module: weakref.ref[nn.Module] | None = None
        self.attempt_open = False
        #: Several optimizers, or finite gradients were thrown away: what it means is unknown in this process.
        self._unclear = False
        #: What was thrown away, as long as no forward pass has followed.
        self._thrown: tuple[weakref.ref[torch.optim.Optimizer], Found] | None = None
        #: By optimizer, how many losses of the step had come when their gradients were thrown away.
        self.thrown_losses: dict[int, int] = {}
        self._left_out = False
        self._went_forward = False
        self._zeroed = False
        self._backwards = 0
        self._always_fresh = True

    def install(
        self,
        leave_out: LeaveOut,
        in_step: Callable[[], bool],
        is_unscaled: Callable[[torch.optim.Optimizer], bool],
        is_updated: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        """Patch ``zero_grad`` of optimizers and modules.

        Args:
            leave_out: ends the attempt of an optimizer as one that the script left out; given norm and amax of its
                gradients, if they have been read.
            in_step: whether an optimizer is in the middle of its step.
            is_unscaled: whether a scaler has unscaled the gradients of an optimizer that has not stepped since.
            is_updated: whether that scaler was updated meanwhile, and the gradients were finite.
        """
        self._leave_out, self._in_step = leave_out, in_step
        self._is_unscaled, self._is_updated = is_unscaled, is_updated
        optimizer, module = torch.optim.Optimizer, nn.Module
        optimizer.zero_grad = self._noting(  # type: ignore[method-assign]
            optimizer.zero_grad, self._optimizer_throws, self._is_used_up
        )
        module.zero_grad = self._noting(module.zero_grad, self._module_throws)  # type: ignore[method-assign]

    def _noting(
        self,
        original: Callable[..., Any],
        note: Callable[[Any], None],
        is_nothing: Callable[[Any], bool] = lambda _owner: False,
    ) -> Callable[..., Any]:
        context, noted = self._context, guarded(self._context)(note)

        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if context.state == "armed" and not torch.compiler.is_compiling() and not is_nothing(owner):
                noted(owner)
            return original(owner, *args, **kwargs)

        return zero_grad

    # --- what happens around it --------------------------------------------------------------------------------------

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps, or is about to."""
        known = self._optimizer() if self._optimizer is not None else None
        if known is None:
            self._optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            self._unclear = True

    def forward_begins(self) -> None:
        """A root module is called."""
        if not torch.is_grad_enabled():
            return
        if self.attempt_open:
            self.forward_in_attempt()
        if self._thrown is not None:
            self._end_thrown()
        if self._always_fresh and self._context.micro_step:
            self._end_if_fresh()
        self._went_forward = True

    def run_ends(self) -> None:
        """A script that has left attempts out before may have done so with the last one."""
        self._end_thrown()
        if self._left_out:
            self._end_if_fresh()
        if len(self.thrown_losses) == 1:  # the open step has no attempt to say whose count holds
            (self._context.current.thrown_losses,) = self.thrown_losses.values()

    def _end_thrown(self) -> None:
        thrown, self._thrown = self._thrown, None
        optimizer = thrown[0]() if thrown is not None else None
        if thrown is not None and optimizer is not None and not self._in_step():
            self._end(optimizer, thrown[1])

    def _end_if_fresh(self) -> None:
        """The next ``zero_grad`` comes too late, so that it must be known that it comes."""
        known = self._always_fresh and self._backwards >= _KNOWN_AFTER
        if not known or not self._context.micro_step or self._went_forward:
            return
        optimizer = self._known()
        if optimizer is None or self._in_step():
            return
        if self._is_updated(optimizer):
            self._end(optimizer, None)
        elif not self._is_unscaled(optimizer):
            found = self._look(parameters_of(optimizer))
            if found is not None and _is_lost(found, optimizer):
                self._end(optimizer, found)

    def _end(self, optimizer: torch.optim.Optimizer, found: Found | None) -> None:
        self._left_out = True
        self._leave_out(optimizer, found)

    def backward_begins(self) -> None:
        """Not one inside another."""
        self._thrown = None
        self._backwards += 1
        self._always_fresh = self._always_fresh and self._zeroed
        self._zeroed = False

    def backward_ended(self) -> None:
        """Gradients are there."""
        self._went_forward = False
        if self.attempt_open:
            self.backward_in_attempt()

    def attempt_ended(self) -> None:
        """However it did, there is nothing left to end."""
        self._thrown, self.attempt_open = None, False
        self.thrown_losses.clear()

    def _is_used_up(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the known optimizer has stepped with its gradients already: most often."""
        used = not self._context.micro_step and not self._context.threads.others
        if used and self._optimizer is not None and self._optimizer() is optimizer:
            self._zeroed = True
            return True
        return False

    def _optimizer_throws(self, optimizer: torch.optim.Optimizer) -> None:
        self.meet(optimizer)
        self._zeroed = True
        if self._context.micro_step:
            self.thrown_losses[id(optimizer)] = len(self._context.current.losses)
        if not self._context.micro_step or self._in_step():
            return  # stepped with already, or for a closure to know
        if self._is_unscaled(optimizer):  # nobody unscales what is not for a step
            if not (self._went_forward and self._is_updated(optimizer)):  # else it would take the next step's rows
                self._leave_out(optimizer, None)
        elif (found := self._look(parameters_of(optimizer))) is not None:
            if _is_finite(found):
                self._unclear = True
            elif not self._went_forward and _is_lost(found, optimizer):
                self._thrown = (weakref.ref(optimizer), found)

    def _module_throws(self, module: nn.Module) -> None:
        optimizer = self._known()
        if optimizer is None:  # it has yet to make itself known
            if self._context.micro_step and (found := self._look(list(static.parameters(module)))) is not None:
                self._unclear = self._unclear or _is_finite(found)
        elif not self._unclear and self._covers(module, optimizer):
            self._optimizer_throws(optimizer)

    def _covers(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all that the optimizer trains is in the module; asked again only of another module."""
        if self._module is None or self._module() is not module:
            own = {id(p) for p in static.parameters(module)}
            if not all(id(p) in own for p in parameters_of(optimizer)):
                return False
            self._module = weakref.ref(module)
        return True

    def is_trained(self, parameter: Tensor) -> bool:
        """Whether an optimizer that has shown itself, by its ``zero_grad`` at least, has this parameter."""
        optimizer = self._known()
        return optimizer is not None and any(p is parameter for p in parameters_of(optimizer))

    # --- what it means -----------------------------------------------------------------------------------------------

    def _known(self) -> torch.optim.Optimizer | None:
        return self._optimizer() if self._optimizer is not None else None

    def _look(self, parameters: list[Tensor]) -> Found | None:
        """Norm and amax of their gradients; null without any, and where nobody may look.

        Reading them waits for the device, as the guard does: not with ``--on-nonfinite observe``, nor in a graph being
        captured. Ranks might come to different answers about gradients that are not reduced yet, and count differently.
        """
        if self._unclear or attach.has_other_ranks():
            return None
        if not all(p.is_cpu for p in parameters) and (
            self._context.options.on_nonfinite == "observe" or is_capturing()
        ):
            return None
        return gradient_sentinel(parameters)


def _is_finite(found: Found) -> bool:
    largest = read(found[1])
    return largest is None or math.isfinite(largest)


def _is_lost(found: Found, optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients are not finite and the weights are: SAM's first step would have spoiled them."""
    if _is_finite(found):
        return False
    largest = read(amax(parameters_of(optimizer)))
    return largest is None or math.isfinite(largest)
