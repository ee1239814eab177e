"""Base class of the dispatch modes that a window opens: keeps the place of each op and the phase in which it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from precdoctor.recording import kernels
from precdoctor.recording.deepscan.scanned_op import Where
from precdoctor.recording.model.optimizer_contents import steps_in_progress
from precdoctor.recording.ops.dispatched_ops import Retiring
from precdoctor.recording.ops.source_lines import op_lines
from precdoctor.recording.process import attach
from precdoctor.recording.slots.deferred import is_capturing


class WindowMode(Retiring):
    """Examines ops while it is entered; an error in here ends the examination and never affects the op.

    Attributes:
        modules: root and FQN of the modules whose forward runs, outermost first.
        stage: which code runs outside of modules and backward passes: script, loss or optimizer.
        steps_in_backward: whether optimizers step inside the backward pass, as soon as a gradient is there.
        resting: whether ops are not examined for now.
        most_micro_steps: maximum number of micro-steps per step that are examined; None: all of them.
        beside_compiled: whether the mode may be open while compiled code runs.
        clock: in ns: CPU time of the thread; with a GPU, host time, because waiting for results costs time there.
        spent_ns: time that looking has taken, without the ops themselves.
        failure: the error that has ended the looking.
    """

    watches = True
    most_micro_steps: int | None = None
    beside_compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[tuple[str, str]] = []
        self.stage, self.resting = "forward", False
        self.micro_step = 0
        self.steps_in_backward = False
        self.clock = time.perf_counter_ns if torch.cuda.is_initialized() else time.thread_time_ns
        self.spent_ns = 0
        self.failure: Exception | None = None
        #: Places of forward ops, by the sequence number of their autograd node.
        self._places: dict[int, Where] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: let compiled code run compiled and unseen while the mode is open."""
        return True

    def module_entered(self, module: nn.Module, args: Any) -> None:
        """Called as a module's forward begins; the module is the last of :attr:`modules`."""

    def module_left(self, module: nn.Module, result: Any) -> None:
        """Called as a module's forward has ended; the module is still the last of :attr:`modules`."""

    def backward_entered(self) -> None:
        """Called as ``backward`` begins."""

    def backward_left(self) -> None:
        """Called as ``backward`` has ended."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Called as an optimizer is about to step."""

    def guarded(self, look: Callable[[], Any]) -> Any:
        """Return what ``look`` returns; None if it fails, failed before, or a CUDA graph is captured."""
        began = self.clock()
        try:
            if self.failure is None and not is_capturing():
                with kernels.apart_from_user_modes():
                    return look()
        except Exception as error:  # noqa: BLE001 - an error of ours must not fail the user's op
            attach.let_through(error)
            self.failure = error
        finally:
            self.spent_ns += self.clock() - began
        return None

    @property
    def full(self) -> bool:
        """Whether it examines no further op, however long the step may run."""
        return False

    @property
    def cannot_look(self) -> bool:
        """Whether ops must run unseen at this moment."""
        return (
            self.over
            or self.resting
            or self.failure is not None
            or torch._C._functorch.maybe_current_level() is not None
            or torch._C._get_tracing_state() is not None
        )

    def phase(self) -> str:
        """Return forward, recompute, backward, or optimizer (its step inside the backward pass); else :attr:`stage`."""
        node: Any = torch._C._current_autograd_node()
        if node is None and torch._C._current_graph_task_id() == -1:
            return "forward" if self.modules else self.stage
        if self.steps_in_backward and steps_in_progress():
            return "optimizer"
        return "recompute" if self.modules else "backward"

    def where(self, phase: str, sequence: int) -> Where:
        """Return the place of the op that has just run; in the backward pass that of its forward op, if known.

        Args:
            sequence: the number that the next autograd node was to get before the op ran.
        """
        root, module = self.modules[-1] if self.modules else ("", "")
        line, caller = op_lines()
        if phase != "backward":
            where = Where(root, module, line, caller)
            self._places.setdefault(sequence - 1, where)
            return where
        node: Any = torch._C._current_autograd_node()
        made = self._places.get(node._sequence_nr()) if node is not None else None
        if made is not None and line is None:
            return made
        return Where("", "", line, caller) if made is None else Where(made.root, made.module, line, caller)
