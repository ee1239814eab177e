"""Opens a dispatch mode for the whole of a step: all ops between two step ends on the training thread.

A mode is opened where the step before has ended (for the first step: at the first root call) and closed for good where
the step ends, so that it sees the loss, the optimizer, weight averages and the script's own arithmetic. If several
watchers want a step, the first one gets it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from precdoctor.recording.deepscan.window_mode import WindowMode
from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.dispatched_ops import (
    differentiates_forward,
    in_backward,
    is_compiled_graph,
    open_modes,
    put_on,
    retire,
    retire_all,
    retired,
    something_is_compiled,
    sweep,
    take_off,
    will_come_back,
)
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import is_capturing


class Watcher(Protocol):
    """Provides modes for the steps that it wants to look at.

    Attributes:
        off: whether it will want no step at all.
        without_modules: whether it also wants steps of a script that calls no module.
    """

    off: bool
    without_modules: bool

    def mode(self, step: int) -> WindowMode | None:
        """Return the mode to open on the coming step; None for none."""

    def refused(self, root: str, why: str) -> None:
        """Called if its mode must not be opened, or not beside the top-level module ``root``."""

    def ended(self, mode: WindowMode) -> None:
        """Called when the step of its mode is over."""

    def forget(self) -> None:
        """Called in a forked child, or as another run begins."""


class StepWindow:
    """The window of a process; at most one mode is open in it. Watchers are asked for a mode in their order."""

    def __init__(self, context: StepContext, watchers: Sequence[Watcher]) -> None:
        self._context, self._watchers = context, watchers
        self._hooks = self._hooks_of(guarded(context)(self._enter_module), guarded(context)(self._leave_module))
        self._mode: WindowMode | None = None
        self._watcher: Watcher | None = None
        self._handles: list[Any] = []
        self._forget()

    @staticmethod
    def _hooks_of(enter: Callable[..., Any], leave: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
        """Return module hooks that do nothing while compiling; plain functions, because Dynamo traces into them."""

        def before(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                enter(module, args)

        def after(module: nn.Module, args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling():
                leave(module, args, result)

        return before, after

    def install(self) -> None:
        """Register the callbacks; after all other hooks, because a window does not open beside another mode."""
        context = self._context
        context.when_forked.append(self._forget)
        context.when_turned_off.append(self._close)
        begins, steps = guarded(context)(self.begin_step), guarded(context)(self._optimizer_steps)
        # never removed: the window closes inside the step's own hooks, where a hook must not be removed
        register_optimizer_step_pre_hook(lambda optimizer, *_: steps(optimizer) if self.is_open else None)
        context.when_step_begins.append(begins)
        self._patch_forward_differentiation()

    def _patch_forward_differentiation(self) -> None:
        """Close the window and retire our other modes as forward-mode differentiation begins.

        Tangents would be rounded in another way with a mode on the stack.
        """
        original: Callable[[], Any] = forward_ad.enter_dual_level
        close = guarded(self._context)(self._make_way)

        @functools.wraps(original)
        def enter_dual_level() -> Any:
            if open_modes and not torch.compiler.is_compiling():
                close()
            return original()

        forward_ad.enter_dual_level = enter_dual_level

    def _make_way(self) -> None:
        """Close the window if it is this thread's, and retire our modes on top of the thread's stack."""
        if self.is_open and self._thread == threading.get_ident():
            self._close()
        retire_all()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Report to the mode that an optimizer is about to step."""
        if self._mode is not None:
            self._mode.steps_in_backward = in_backward()
            self._mode.optimizer_steps(optimizer)

    def _forget(self) -> None:
        self._close()  # a forked child inherits what is open
        self._mode = self._watcher = None
        for watcher in self._watchers:
            watcher.forget()
        #: Whether no watcher will want a step.
        self.off = all(watcher.off for watcher in self._watchers)
        #: The top-level module whose forward runs.
        self._root: nn.Module | None = None
        #: A module called outside of root calls (evaluation, augmentation); the mode is off while it runs.
        self._module_aside: nn.Module | None = None
        #: The top-level module that was last called in training.
        self._last: weakref.ref[nn.Module] | None = None
        #: The last step for which the watchers were asked.
        self._asked_step: int | None = None
        #: Whether a mode is open, and the thread on whose stack it is.
        self.is_open, self._thread = False, 0

    # --- opening and closing -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Open the window where the step before has ended: code before the forward pass belongs to the coming step."""
        if self.off:
            return
        context, module = self._context, self._last() if self._last is not None else None
        if module is None and context.current.step == context.options.first_step:
            return  # nothing has been trained yet
        if will_come_back() or self._thread not in (0, threading.get_ident()):
            return
        if open_modes:
            sweep()
        if not self.is_open and self._take_mode(module) and self._allows(module):
            self._enter()

    def enter_root(self, module: nn.Module) -> None:
        """Open the window at a root call, or note the root in the open one.

        The module's hooks have been chosen by now, and its forward has not begun.
        """
        if open_modes:
            sweep()
        if self.off or (in_backward() and (self.is_open or retired())):
            return
        if self.is_open and (self._thread != threading.get_ident() or self._must_not_compile()):
            self._close()
        if not self.is_open:
            self._last, self._thread = weakref.ref(module), threading.get_ident()
        asked = self._asked_step == self._context.current.step and not self._context.evidence
        if not self.is_open and not asked and self._take_mode(module) and self._allows(module):
            self._enter()
        elif self.is_open and (why := unfit(module)) is not None:
            self._close()
            self._refuse(module, why)
        if self.is_open and self._mode is not None:
            self._root, mode = module, self._mode
            mode.modules.clear()  # an exception that passes no hook leaves modules in the list
            mode.micro_step, mode.resting = self._context.micro_step, not self._in_time(mode)
            self._enter_module(module, ())

    def root_called(self, module: nn.Module, arguments: Any) -> None:
        """Pass the arguments of a root call on to the open mode."""
        if self._mode is not None and module is self._root:
            self._mode.module_entered(module, arguments)

    def enter_backward(self) -> None:
        """Called as ``backward`` begins."""
        if self._mode is not None and self.is_open:
            self._mode.modules.clear()
            self._mode.micro_step = self._context.micro_step
            self._mode.resting = not self._in_time(self._mode)
            self._mode.backward_entered()

    def leave(self) -> None:
        """Called as ``backward`` has ended."""
        if self._mode is not None and self.is_open:
            self._mode.modules.clear()
            self._mode.stage, self._mode.resting = "optimizer", False
            self._mode.backward_left()

    def _take_mode(self, module: nn.Module | None) -> bool:
        """Ask the watchers for a mode for this step and keep it; return whether there is one."""
        if self._context.trace is not None or self._mode is not None:
            return False
        if module is not None:
            self._asked_step = self._context.current.step
        for watcher in self._watchers:
            if module is None and not watcher.without_modules:
                continue
            if not watcher.off and (mode := watcher.mode(self._context.current.step)) is not None:
                self._mode, self._watcher = mode, watcher
                return True
        return False

    def _in_time(self, mode: WindowMode) -> bool:
        """Return whether the mode examines the current micro-step."""
        return mode.most_micro_steps is None or self._context.micro_step < mode.most_micro_steps

    def _must_not_compile(self) -> bool:
        """Return whether the window must be closed because code is compiled."""
        return something_is_compiled() and not (self._mode is not None and self._mode.beside_compiled)

    def _allows(self, module: nn.Module | None) -> bool:
        """Return whether the mode may be opened; pass a refusal on to the watcher."""
        why: str | None = "torch.compile is in use: a compiled graph would not run as it does without us"
        if not self._must_not_compile():
            why = why_not(module)
        if why is not None:
            self._refuse(module, why)
        return why is None

    def _refuse(self, module: nn.Module | None, why: str) -> None:
        """Give the mode up and pass the reason to its watcher."""
        watcher, self._mode, self._watcher = self._watcher, None, None
        if watcher is not None:
            place = self._context.names.find(unwrap(module)) if module is not None else None
            watcher.refused(place.root if place is not None else "", why)

    def _enter(self) -> None:
        """Put the mode on the stack and register the module hooks."""
        assert self._mode is not None
        self._mode.stage, self._mode.micro_step = "script", self._context.micro_step
        place, (before, after) = nn.modules.module, self._hooks
        self._handles = [
            place.register_module_forward_pre_hook(before),
            place.register_module_forward_hook(after, always_call=True),
        ]
        self.is_open, self._thread = True, threading.get_ident()
        put_on(self._mode)

    def _close(self) -> None:
        """Close the window for good: if something still keeps the mode on a stack, it only runs ops there."""
        self.is_open, self._root, self._module_aside = False, None, None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._mode is not None:
            self._mode.modules.clear()
            retire(self._mode)

    def end_step(self) -> None:
        """Close the window at the step's end and hand the mode back to its watcher."""
        if self.is_open:
            self._close()
        mode, watcher = self._mode, self._watcher
        self._mode = self._watcher = None
        if mode is not None and watcher is not None:
            self._context.current.scan_ns += mode.spent_ns
            watcher.ended(mode)

    # --- modules -----------------------------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        """Note a module whose forward begins; turn the mode off if it is called outside of root calls."""
        mode = self._mode
        if mode is None or not self.is_open or self._thread != threading.get_ident():
            return
        if mode.full and not in_backward():
            self._close()  # even a mode that only runs ops makes each of them take ten times as long
            return
        if self._root is None and not in_backward():
            if self._module_aside is None:  # evaluation, augmentation: any mode would change what some functions do
                self._module_aside = module
                take_off(mode)
            return
        if module is self._root and len(mode.modules) == 1:
            return  # enter_root has added it
        above = mode.modules[-1] if mode.modules else ("", "")
        place = self._context.names.find(module)
        inside = (place.root, place.module) if place is not None else (
            above[0], f"{above[1]}.{type(module).__name__}".lstrip("."))  # fmt: skip
        mode.modules.append(inside)
        if module is not self._root:
            mode.module_entered(module, args)

    def _leave_module(self, module: nn.Module, _args: Any, result: Any) -> None:
        """Remove a module whose forward has ended; turn the mode on again after a module outside of root calls."""
        mode = self._mode
        if mode is None or not self.is_open or self._thread != threading.get_ident():
            return
        if self._module_aside is not None:
            if module is self._module_aside:
                self._module_aside = None
                put_on(mode)
            return
        if mode.modules:
            mode.module_left(module, result)
            mode.modules.pop()
        if not mode.modules:
            self.leave_root(module, result)

    def leave_root(self, module: nn.Module, result: Any) -> None:
        """Note that a top-level module has returned; its own hooks were chosen before the window was opened."""
        mode = self._mode
        if mode is not None and module is self._root and len(mode.modules) <= 1:
            mode.module_left(module, result)
            mode.modules.clear()
            self._root, mode.stage, mode.resting = None, "loss", not self._in_time(mode)


def why_not(module: nn.Module | None) -> str | None:
    """Return why the ops of this module must not be examined; None if they may."""
    if torch._C._len_torch_dispatch_stack():
        return "another dispatch mode is active"
    if torch._C._functorch.maybe_current_level() is not None or torch._C._get_tracing_state() is not None:
        return "it runs inside a transform or is being traced"
    if differentiates_forward():
        return "it runs inside forward-mode differentiation"
    if is_capturing():
        return "a CUDA graph is being captured"
    return unfit(module) if module is not None else None


def _replicates(module: nn.Module) -> bool:
    """Return whether ``nn.DataParallel`` may run replicas in threads; on the CPU or one GPU it calls its module."""
    if not issubclass(type(module), nn.DataParallel):
        return False
    devices = dict.get(static.module_dict(module), "device_ids")
    return type(module) is not nn.DataParallel or type(devices) is not list or len(devices) > 1


def unfit(module: nn.Module) -> str | None:
    """Return why the ops of a module must not be examined because of the module itself; None if they may."""
    for part in static.modules(module):
        names = {c.__name__ for c in type(part).__mro__}
        if issubclass(type(part), torch.jit.ScriptModule) or is_compiled_graph(part):
            return f"{type(part).__name__} is compiled"
        if names & {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine", "PipelineStage"} or _replicates(part):
            return f"{type(part).__name__} schedules its own passes"
    return None
