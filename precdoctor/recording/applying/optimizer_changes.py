"""Optimizers: their eps, and FP32 master weights for 16-bit ones."""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from precdoctor.recording.applying.ledger import Ledger
from precdoctor.recording.process.attach import is_distributed
from precdoctor.runlog.changes import Change

_HALF = (torch.float16, torch.bfloat16)


def install_eps(change: Change, ledger: Ledger) -> None:
    """Set eps as parameter groups are made, and before each step: a checkpoint brings the old one back."""

    def adjust(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            was = group.get("eps")
            if isinstance(was, float) and was != change.to and _is_meant(was, change):
                group["eps"] = float(change.to)
                ledger.done(change, type(optimizer).__name__, was)

    original = torch.optim.Optimizer.add_param_group

    @functools.wraps(original)
    def add_param_group(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        adjust(optimizer)

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign, assignment]
    register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: adjust(optimizer))


def _is_meant(was: float, change: Change) -> bool:
    """Of several optimizers those with the eps that was diagnosed."""
    return not isinstance(change.before, (int, float)) or math.isclose(was, change.before, rel_tol=1e-6)


class MasterWeights:
    """Lets an optimizer step on FP32 copies of 16-bit weights.

    For the time of the step a parameter *is* its FP32 master (``Parameter.data``), so that the optimizer, whatever it
    is, keeps its state in FP32 and adds its update there; afterwards the 16-bit weight is the master rounded. A weight
    the script changes itself between steps is taken over, element by element.

    Not done with a closure (it would run the model on FP32 weights) nor under ``torch.distributed``, whose wrappers
    hold on to parameters in ways of their own. Masters are not part of a checkpoint.
    """

    def __init__(self, change: Change, ledger: Ledger) -> None:
        self._change = change
        self._ledger = ledger
        self._masters: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._away: list[tuple[Tensor, Tensor, Tensor]] = []

    def install_before(self) -> None:
        """To be called before the recorder registers its hooks: it is to see the FP32 weights before the step."""
        register_optimizer_step_pre_hook(self._take_over)

    def install_after(self) -> None:
        """To be called after that: it is to see them also after the step."""
        register_optimizer_step_post_hook(self._give_back)

    def _take_over(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._away:
            return  # an optimizer that drives another one
        half = [p for g in optimizer.param_groups for p in g["params"] if p.dtype in _HALF and p.grad is not None]
        if not half:
            return
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            self._ledger.refused(self._change, f"{type(optimizer).__name__} steps with a closure")
            return
        if is_distributed():
            self._ledger.refused(self._change, "it would not be sound under torch.distributed")
            return
        was = str(half[0].dtype).removeprefix("torch.")
        with torch.no_grad():
            for parameter in half:
                data, gradient = parameter.data, parameter.grad
                assert gradient is not None
                parameter.data = self._master(parameter)
                parameter.grad = gradient.float()
                self._away.append((parameter, data, gradient))
        self._ledger.done(self._change, type(optimizer).__name__, was)

    def _master(self, parameter: Tensor) -> Tensor:
        known = self._masters.get(id(parameter))
        if known is None or known[0]() is not parameter:
            master = parameter.detach().float().clone()
            self._masters[id(parameter)] = (weakref.ref(parameter), master)
            return master
        master = known[1]
        unmoved = master.to(parameter.dtype) == parameter.detach()
        return master.copy_(torch.where(unmoved, master, parameter.detach().float()))

    def _give_back(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        away, self._away = self._away, []
        with torch.no_grad():
            for parameter, data, gradient in away:
                data.copy_(parameter.data)
                parameter.data = data
                parameter.grad = gradient
