"""When a scan looks, and at what: all that runs between two step ends on the training thread, on steps that are due.

The mode is opened where the step before has ended (for the first scan: at the first call of a top-level module) and
closed for good where the step ends, so that the loss, the optimizer, averages of weights and the script's own
arithmetic are in it.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from precdoctor.recording import kernels
from precdoctor.recording.deepscan.scan_mode import ScanMode
from precdoctor.recording.deepscan.schedule import Schedule
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.dispatch_modes import in_backward, open_modes, put_on, retire, retired, sweep, take_off
from precdoctor.recording.output.evidence import Evidence
from precdoctor.recording.process import attach, memory_limits
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.step_batch import is_capturing

#: Micro-steps of one step that are scanned: with gradient accumulation they are all alike.
_MAX_MICRO_STEPS = 2
#: Optimizers whose states are known by name.
_MAX_OPTIMIZERS = 16


class _Stepped:
    """Optimizers that have stepped in the window."""

    def __init__(self) -> None:
        self._found: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step in an open window."""
        if len(self._found) < _MAX_OPTIMIZERS:
            self._found[id(optimizer)] = weakref.ref(optimizer)

    def take(self) -> list[torch.optim.Optimizer]:
        """Those that are left, once."""
        found, self._found = self._found, {}
        return [optimizer for ref in found.values() if (optimizer := ref()) is not None]


class DeepScan:
    """The scans of one process."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._enter_module, self._leave_module = guarded(context)(self._entered), guarded(context)(self._left)
        self._mode: ScanMode | None = None
        self._handles: list[Any] = []
        self._optimizers = _Stepped()
        self._forget()

    def install(self) -> None:
        """Be called as steps begin; after all other hooks, because a scan does not begin beside another mode."""
        context = self._context
        context.when_forked.append(self._forget)
        context.when_turned_off.append(self._close)
        begins = guarded(context)(self.begin_step)
        steps = guarded(context)(self._optimizers.note)
        # for good: the window closes inside of the step's own hooks
        register_optimizer_step_pre_hook(lambda optimizer, *_: steps(optimizer) if self.is_open else None)
        context.when_step_begins.append(lambda: None if self.schedule.off or self._last is None else begins())

    def _forget(self) -> None:
        self._close()  # a forked child inherits what is open
        self.schedule = Schedule(self._context.options)
        self._began = time.perf_counter_ns()
        self._mode = None
        #: The last step that it began to scan.
        self._asked: int | None = None
        #: The top-level module whose forward runs; and the one that a window was opened for last.
        self._root: nn.Module | None = None
        #: The module in front of the forward pass, or behind the backward pass, for whose call the mode is off.
        self._aside: nn.Module | None = None
        self._last: weakref.ref[nn.Module] | None = None
        #: Whether it is open, and on which thread's stack.
        self.is_open, self._thread = False, 0
        self._refused: set[str] = set()
        self._known: frozenset[Any] = frozenset()
        self._number = 0
        self._cost_ns = 0

    # --- windows -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins where the one before has ended: what runs before its forward pass belongs to it."""
        module = self._last() if self._last is not None else None
        if module is None or self.schedule.off or in_backward() or self._thread != threading.get_ident():
            return
        if open_modes:
            sweep()
        if not self.is_open and self._due() and self._allows(module):
            self._enter("script")

    def enter_root(self, module: nn.Module) -> None:
        """A top-level module is called in training; its hooks have been chosen, its forward has not begun."""
        if open_modes:
            sweep()
        if self.schedule.off or (in_backward() and (self.is_open or retired())):
            return
        if self.is_open and (self._thread != threading.get_ident() or _compiles()):
            self._close()
        if not self.is_open and self._due() and self._allows(module):
            self._last = weakref.ref(module)
            self._enter("script")
        elif self.is_open and (why := unfit(module)) is not None:
            self._close()
            self._refuse(module, why)
        if self.is_open and self._mode is not None:
            self._root, mode = module, self._mode
            mode.modules.clear()  # an exception that reaches no hook leaves some
            mode.micro_step, mode.resting = self._context.micro_step, not self._in_time()
            self._entered(module, ())

    def enter_backward(self) -> None:
        """``backward`` begins."""
        if self._mode is not None and self.is_open:
            self._mode.modules.clear()
            self._mode.resting = not self._in_time()

    def leave(self) -> None:
        """``backward`` has ended."""
        if self._mode is not None and self.is_open:
            self._mode.modules.clear()
            self._mode.stage, self._mode.resting = "optimizer", False

    def _due(self) -> bool:
        context, step = self._context, self._context.current.step
        if context.trace is not None or self._mode is not None:
            return False
        if evidence := context.evidence:
            self._arm(evidence)
        elif self._asked == step:
            return False
        self._asked, elapsed = step, time.perf_counter_ns() - self._began
        if self.schedule.wants(step, spent_ns=self._cost_ns, elapsed_ns=elapsed):
            options = context.options
            self._mode = ScanMode(memory_limits.for_copies(options), values=not options.redact_names)
        return self._mode is not None

    def _in_time(self) -> bool:
        return self._context.micro_step < _MAX_MICRO_STEPS

    def _allows(self, module: nn.Module) -> bool:
        why = why_not(module)
        if why is not None:
            self._refuse(module, why)
        return why is None

    def _refuse(self, module: nn.Module, why: str) -> None:
        self._mode = None
        if why not in self._refused:
            self._refused.add(why)
            self._context.event("scan", root=self._name(module), data={"kind": "step", "outcome": "refused",
                                                                       "why": why})  # fmt: skip

    def _name(self, module: nn.Module) -> str:
        place = self._context.names.find(unwrap(module))
        return place.root if place is not None else ""

    def _enter(self, stage: str) -> None:
        assert self._mode is not None
        self._mode.stage, self._mode.micro_step = stage, self._context.micro_step
        place = nn.modules.module
        self._handles = [
            place.register_module_forward_pre_hook(self._enter_module),
            place.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self.is_open, self._thread = True, threading.get_ident()
        put_on(self._mode)

    def _close(self) -> None:
        """For good: whatever keeps the mode on a stack now, it does nothing there but run ops."""
        self.is_open, self._root, self._aside = False, None, None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._mode is not None:
            self._mode.modules.clear()
            retire(self._mode)

    def _entered(self, module: nn.Module, _args: Any) -> None:
        mode = self._mode
        if mode is None or torch.compiler.is_compiling() or self._thread != threading.get_ident():
            return
        if self._root is None and not in_backward():
            if self._aside is None:  # evaluation, or augmentation: some functions take other paths under any mode
                self._aside = module
                take_off(mode)
            return
        if module is self._root and len(mode.modules) == 1:
            return  # it has been entered already
        above = mode.modules[-1] if mode.modules else ("", "")
        place = self._context.names.find(module)
        inside = (place.root, place.module) if place is not None else (
            above[0], f"{above[1]}.{type(module).__name__}".lstrip("."))  # fmt: skip
        mode.modules.append(inside)

    def _left(self, module: nn.Module, _args: Any, _result: Any) -> None:
        mode = self._mode
        if mode is None or torch.compiler.is_compiling() or self._thread != threading.get_ident():
            return
        if self._aside is not None:
            if module is self._aside:
                self._aside = None
                put_on(mode)
            return
        if mode.modules:
            mode.modules.pop()
        if module is self._root and not mode.modules:
            self._root, mode.stage, mode.resting = None, "loss", not self._in_time()

    # --- the step ----------------------------------------------------------------------------------------------------

    def suspect(self) -> None:
        """Two steps in a row were discarded: the next one is worth a look."""
        self.schedule.arm(Evidence("discarded", self._context.step))

    def _arm(self, evidence: deque[Evidence]) -> None:
        """Look at what the rows that the other thread has written give reason for."""
        while evidence:
            self.schedule.arm(evidence.popleft())

    def end_step(self) -> None:
        """The step is over: log what was found in it."""
        if self.is_open:
            self._close()
        mode, self._mode = self._mode, None
        if mode is None or not (mode.ops or mode.failure):
            return
        context = self._context
        self._cost_ns += mode.spent_ns
        context.current.scan_ns += mode.spent_ns
        number = f"{attach.global_rank()}-s{self._number}"
        self._number += 1
        if mode.failure is not None:
            why = f"{type(mode.failure).__name__}: {mode.failure}"[:500]
            context.event("warning", data={"message": f"the deep scan of step {context.step} was dropped: {why}"})
            context.event("scan", id=number, data={"kind": "step", "outcome": "dropped", "why": why,
                                                         **self.schedule.why})  # fmt: skip
            return
        data = {
            "kind": "step",
            "outcome": "done",
            "ops": mode.ops,
            "complete": mode.complete,
            "micro_steps": min(context.micro_step, _MAX_MICRO_STEPS),
            "followed": mode.trails.begun,
            "lost": mode.trails.lost,
            "spent_ns": mode.spent_ns,
            **self.schedule.why,
        }
        context.event("scan", id=number, data=data)
        with kernels.apart_from_user_modes():
            rows = mode.facts(Targets(context.names, self._optimizers.take()))
        self.schedule.found(context.step, {_place(row) for row in rows})
        if mode.coverage.signature != self._known:  # logged once as long as it stays the same
            self._known = mode.coverage.signature
            rows += mode.coverage.events()
        for index, row in enumerate(rows):
            context.event("scan", id=f"{number}.{index}", parent_id=number, **row)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["data"]["kind"], row["root"], row["module"], row["op"], row.get("file"), row.get("line"))


def why_not(module: nn.Module) -> str | None:
    """Why ops of this module must not be scanned; None when they may be."""
    if _compiles():
        return "torch.compile is in use: a compiled graph would not run as it does without us"
    if torch._C._len_torch_dispatch_stack():
        return "another dispatch mode is active"
    if torch._C._functorch.maybe_current_level() is not None or torch._C._get_tracing_state() is not None:
        return "it runs inside a transform or is being traced"
    if is_capturing():
        return "a CUDA graph is being captured"
    return unfit(module)


def unfit(module: nn.Module) -> str | None:
    """The same, as far as it is about the module."""
    for part in static.modules(module):
        names = {c.__name__ for c in type(part).__mro__}
        if issubclass(type(part), (torch.jit.ScriptModule, torch.fx.GraphModule)):
            return f"{type(part).__name__} is compiled"
        if names & {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine", "PipelineStage", "DataParallel"}:
            return f"{type(part).__name__} schedules its own passes"
    return None


def _compiles() -> bool:
    """Whether anything was given to ``torch.compile`` in this process; optimizers alone also load its package."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return any(callable(backend) for backend in getattr(frames, "cached_backends", {}).values())
