"""Makes all changes of a process: torch flags, autocast format, loss scalers, optimizers' eps, FP32 master weights.

Installed in two halves, before and after the recorder's own hooks. Changes of modules are in :mod:`module_changes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from precdoctor.recording.applying.ledger import Ledger
from precdoctor.recording.applying.module_changes import ModuleFormats
from precdoctor.recording.model import static
from precdoctor.recording.process import attach
from precdoctor.recording.process.attach import is_distributed
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.runlog.changes import SETTINGS, Change, Value


class Applier:
    """Makes the changes of ``--apply``."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._changes = [Change.of(raw, "PRECDOCTOR_OPTIONS") for raw in context.options.apply]
        self._ledger = Ledger(context, self._changes)
        self._masters = [
            MasterWeights(c, self._ledger) for c in self._changes if c.setting == "optimizer.master_weights"
        ]

    def install_before(self) -> None:
        """Install what must precede the recorder's hooks, which must see the training as changed."""
        _install_flags(self._of("flag."), self._ledger, self._context)
        _install_scaler_changes(self._of("scaler."), self._ledger)
        for change in self._of("autocast."):
            _install_autocast(change, self._ledger)
        for change in self._of("optimizer.eps"):
            _install_eps(change, self._ledger)
        if modules := self._of("module."):
            ModuleFormats(self._context, modules, self._ledger).install()
        for masters in self._masters:
            masters.install_before()
        for change in (c for c in self._changes if SETTINGS[c.setting].warns):
            self._ledger.refused(change, "the order of calls is the script's: call scaler.unscale_(optimizer) first")

    def install_after(self) -> None:
        """Install what must follow the recorder's hooks."""
        for masters in self._masters:
            masters.install_after()

    def _of(self, prefix: str) -> list[Change]:
        return [c for c in self._changes if c.setting.startswith(prefix)]


def _install_flags(changes: Sequence[Change], ledger: Ledger, context: StepContext) -> None:
    """Set flags now, and again when training begins: scripts set such flags on their first lines."""
    first = {change: _try_to_set(change, ledger) for change in changes}

    def again() -> None:
        for change, before in first.items():
            if (was := _try_to_set(change, ledger)) is not None:
                ledger.done(change, f"torch {torch.__version__}", was if was != change.to else before)

    context.when_armed.insert(0, again)


def _try_to_set(change: Change, ledger: Ledger) -> Value | None:
    """Set a flag; return its former value, None if torch refuses."""
    try:
        return _set_flag(change)
    except RuntimeError as error:  # torch refuses to mix its older and newer flags for the same setting
        attach.let_through(error)
        ledger.refused(change, f"torch refuses it: {error}")
        return None


def _set_flag(change: Change) -> Value:
    name = change.setting.removeprefix("flag.")
    if name == "float32_matmul_precision":
        before: Value = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(str(change.to))
        return before
    if name == "cudnn_allow_tf32":
        holder, attribute = torch.backends.cudnn, "allow_tf32"
    else:
        holder, attribute = torch.backends.cuda.matmul, name.removeprefix("matmul_")  # type: ignore[assignment]
    was = getattr(holder, attribute)
    setattr(holder, attribute, change.to)
    return was if isinstance(was, (bool, int, float, str)) else str(was)


def _install_autocast(change: Change, ledger: Ledger) -> None:
    """Make every autocast region in float16 one in bfloat16."""
    kind: Any = torch.amp.autocast_mode.autocast
    original = kind.__init__

    @functools.wraps(original)
    def then_change(region: Any, *args: Any, **kwargs: Any) -> None:
        original(region, *args, **kwargs)
        if getattr(region, "fast_dtype", None) is torch.float16:
            region.fast_dtype = torch.bfloat16
            ledger.done(change, f"autocast on {region.device}", "float16")

    kind.__init__ = then_change


#: Attribute of ``torch.amp.GradScaler`` by setting; whether this torch has it is tested when a scaler is created.
_ATTRIBUTES = {
    "scaler.init_scale": "_init_scale",
    "scaler.growth_interval": "_growth_interval",
    "scaler.enabled": "_enabled",
}


def _install_scaler_changes(changes: Sequence[Change], ledger: Ledger) -> None:
    """Patch ``torch.amp.GradScaler``, from which every scaler of torch derives."""
    kind: Any = torch.amp.GradScaler
    for change in changes:
        if change.setting == "scaler.min_scale":
            kind.update = _with_floor(kind.update, change, ledger)
            continue
        kind.__init__ = _setting_attribute(kind.__init__, change, ledger)
        if change.setting == "scaler.growth_interval":  # loading a checkpoint restores the old value
            kind.load_state_dict = _setting_attribute(kind.load_state_dict, change, ledger)


def _setting_attribute(original: Callable[..., Any], change: Change, ledger: Ledger) -> Callable[..., Any]:
    """Return a method of GradScaler that also sets the attribute after the original has run."""
    attribute = _ATTRIBUTES[change.setting]

    @functools.wraps(original)
    def then_change(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if not scaler.is_enabled():
            return result
        was = getattr(scaler, attribute, None)
        if was is None:
            ledger.refused(change, f"this torch's GradScaler has no {attribute}")
        else:
            setattr(scaler, attribute, type(was)(change.to))
            ledger.done(change, type(scaler).__name__, was)
        return result

    return then_change


def _with_floor(original: Callable[..., Any], change: Change, ledger: Ledger) -> Callable[..., Any]:
    """Return an ``update`` that keeps the loss scale above a minimum."""

    @functools.wraps(original)
    def update(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled() and scaler._scale is not None:
            scaler._scale.clamp_(min=float(change.to))  # on the device, without waiting for it
            ledger.done(change, type(scaler).__name__, 0.0)
        return result

    return update


_HALF = (torch.float16, torch.bfloat16)


def _install_eps(change: Change, ledger: Ledger) -> None:
    """Set eps when parameter groups are added and before each step: loading a checkpoint restores the old value."""

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
    """Return whether an eps is the one that the diagnosis found; true of any if the diagnosis states none."""
    return not isinstance(change.before, (int, float)) or math.isclose(was, change.before, rel_tol=1e-6)


class MasterWeights:
    """Lets an optimizer step on FP32 copies of 16-bit weights.

    During the step a parameter *is* its FP32 master (``Parameter.data``), so that any optimizer keeps its state in FP32
    and adds its update there; afterwards the 16-bit weight is the rounded master. Elements that the script has changed
    between steps are copied to the master.

    A step that raises leaves 16-bit weights behind as well: those that it had updated so far.

    Not done with a closure (it would run the model on FP32 weights), nor under ``torch.distributed``, whose wrappers
    keep references to parameters. Masters are not part of a checkpoint.
    """

    def __init__(self, change: Change, ledger: Ledger) -> None:
        self._change = change
        self._ledger = ledger
        self._masters: static.ByIdentity[Tensor, Tensor] = static.ByIdentity()
        self._away: list[tuple[Tensor, Tensor, Tensor]] = []
        #: The optimizer whose weights are away.
        self._owner: torch.optim.Optimizer | None = None

    def install_before(self) -> None:
        """Register the pre-step hook; call this before the recorder's, which must see FP32 weights."""
        register_optimizer_step_pre_hook(self._take_over)
        kind: Any = torch.optim.Optimizer
        kind.profile_hook_step = staticmethod(self._giving_back(kind.profile_hook_step))

    def _giving_back(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's decorator of ``step`` that also ends a step that raises: torch calls no hook then."""

        @functools.wraps(original)
        def decorator(step: Callable[..., Any]) -> Callable[..., Any]:
            hooked = original(step)

            @functools.wraps(hooked)
            def then_give_back(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
                try:
                    return hooked(optimizer, *args, **kwargs)
                except BaseException:
                    self._give_back(optimizer, args, kwargs)
                    raise

            return then_give_back

        return decorator

    def install_after(self) -> None:
        """Register the post-step hook; call this after the recorder's, which must see FP32 weights."""
        register_optimizer_step_post_hook(self._give_back)

    def _take_over(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Replace the 16-bit weights that have gradients by their masters, and widen the gradients."""
        if self._away:
            return  # the step of an optimizer inside that of another one
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
                master, widened = self._master(parameter), gradient.float()
                self._owner = optimizer
                self._away.append((parameter, data, gradient))
                parameter.data = master
                parameter.grad = widened
        self._ledger.done(self._change, type(optimizer).__name__, was)

    def _master(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master; elements changed since the last step are taken from the parameter."""
        master = self._masters.get(parameter)
        if master is None:
            return self._masters.put(parameter, parameter.detach().float().clone())
        unmoved = master.to(parameter.dtype) == parameter.detach()
        return master.copy_(torch.where(unmoved, master, parameter.detach().float()))

    def _give_back(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Give the parameters their 16-bit weights back, rounded from the masters, and their gradients."""
        if optimizer is not self._owner:
            return  # the step of an optimizer inside that of another one
        away, self._away, self._owner = self._away, [], None
        with torch.no_grad():
            for parameter, data, gradient in away:
                data.copy_(parameter.data)
                parameter.data = data
                parameter.grad = gradient
