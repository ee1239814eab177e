"""Attempts that a script gives up by itself: its gradients hold an Inf or a NaN, and it throws them away.

Hand-written loss scaling does it, and so do loops that look at the norm before they step. Nothing announces such an
attempt. That gradients are thrown away does not tell: gradient surgery, SAM and saliency maps do it with finite ones
all the time, and half of a GAN gets gradients nobody asked for. So a step is only ended where nothing else can be
meant: by the one optimizer of the process, which has never thrown finite gradients away, whose gradients are not finite
while its weights are, and with no forward pass in between, whose rows would be those of the step to come.

Loops that call ``zero_grad`` just before ``backward`` do it after that forward pass. Of those, the step is ended as the
forward pass begins, once they are known: every backward pass so far has begun with fresh gradients.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from precdoctor.recording.batch import read
from precdoctor.recording.recorder import Recorder, guarded
from precdoctor.recording.sentinel import amax, gradient_amax

#: Backward passes after which a loop is known: the first one of an accumulation begins with fresh gradients, too.
_KNOWN_AFTER: Final = 2


class ThrownAway:
    """Watches ``zero_grad``, and the forward and backward passes around it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: Ends the attempt of an optimizer; set on installation, as are the two questions.
        self._leave_out: Callable[[torch.optim.Optimizer], None] = lambda _optimizer: None
        self._in_step: Callable[[], bool] = lambda: False
        self._is_unscaled: Callable[[torch.optim.Optimizer], bool] = lambda _optimizer: False
        self._forget()
        recorder.when_forked.append(self._forget)

    def _forget(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._module: weakref.ref[nn.Module] | None = None
        #: Several optimizers, or finite gradients were thrown away: what it means cannot be told in this process.
        self._unclear = False
        self._went_forward = False
        self._zeroed = False
        self._backwards = 0
        self._always_fresh = True

    def install(
        self,
        leave_out: Callable[[torch.optim.Optimizer], None],
        in_step: Callable[[], bool],
        is_unscaled: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        """Patch ``zero_grad`` of optimizers and modules.

        Args:
            leave_out: ends the attempt of an optimizer as one that the script left out.
            in_step: whether an optimizer is in the middle of its step.
            is_unscaled: whether a scaler has unscaled the gradients of an optimizer that has not stepped since.
        """
        self._leave_out, self._in_step, self._is_unscaled = leave_out, in_step, is_unscaled
        optimizer, module = torch.optim.Optimizer, nn.Module
        optimizer.zero_grad = self._noting(optimizer.zero_grad, self._optimizer_throws)  # type: ignore[method-assign]
        module.zero_grad = self._noting(module.zero_grad, self._module_throws)  # type: ignore[method-assign]

    def _noting(self, original: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
        recorder, noted = self._recorder, guarded(self._recorder)(note)

        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.state == "armed" and not torch.compiler.is_compiling():
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
        known = self._always_fresh and self._backwards >= _KNOWN_AFTER
        if known and self._recorder.micro_step and not self._went_forward:
            optimizer = self._optimizer() if self._optimizer is not None else None
            if optimizer is not None and not self._in_step() and not self._is_unscaled(optimizer):
                self._end_if_not_finite(optimizer)
        self._went_forward = True

    def backward_begins(self) -> None:
        """Not one inside another."""
        self._backwards += 1
        self._always_fresh = self._always_fresh and self._zeroed
        self._zeroed = False

    def backward_ended(self) -> None:
        """Gradients are there."""
        self._went_forward = False

    def _optimizer_throws(self, optimizer: torch.optim.Optimizer) -> None:
        self.meet(optimizer)
        self._zeroed = True
        if not self._recorder.micro_step or self._in_step():
            return  # stepped with already, or for a closure to know
        if self._is_unscaled(optimizer):  # nobody unscales what is not for a step
            self._leave_out(optimizer)
        elif self._went_forward:
            self._unclear = self._unclear or self._are_finite(optimizer) is True
        elif self._end_if_not_finite(optimizer) is True:
            self._unclear = True

    def _module_throws(self, module: nn.Module) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None and not self._unclear and self._covers(module, optimizer):
            self._optimizer_throws(optimizer)

    def _covers(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all that the optimizer trains is in the module; asked again only of another module."""
        if self._module is None or self._module() is not module:
            own = {id(p) for p in module.parameters()}
            if not all(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return False
            self._module = weakref.ref(module)
        return True

    # --- what it means -----------------------------------------------------------------------------------------------

    def _end_if_not_finite(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """End the attempt if its gradients are not finite.

        Returns:
            Whether they are; null when nobody has looked.
        """
        finite = self._are_finite(optimizer)
        if finite is False and _weights_are_finite(optimizer):  # SAM's first step would have spoiled them
            self._leave_out(optimizer)
        return finite

    def _are_finite(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Waits for the device, as the guard does; not with ``--on-nonfinite observe``, nor in a graph being captured.

        Ranks might come to different answers about gradients that are not reduced yet, and count differently.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._unclear or not gradients or _is_distributed():
            return None
        if not all(g.is_cpu for g in gradients) and (
            self._recorder.options.on_nonfinite == "observe" or _is_capturing()
        ):
            return None
        largest = read(gradient_amax(p for group in optimizer.param_groups for p in group["params"]))
        return None if largest is None else math.isfinite(largest)


def _weights_are_finite(optimizer: torch.optim.Optimizer) -> bool:
    largest = read(amax(p for group in optimizer.param_groups for p in group["params"]))
    return largest is None or math.isfinite(largest)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_distributed() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and (torch.distributed.get_world_size() > 1)
    )
