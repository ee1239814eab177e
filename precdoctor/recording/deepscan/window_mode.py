"""What every dispatch mode that a window opens has in common: where an op stands, and in which phase it runs."""

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
from precdoctor.recording.ops.source_lines import innermost_user_line
from precdoctor.recording.process import attach
from precdoctor.recording.slots.deferred import is_capturing


class WindowMode(Retiring):
    """Looks at ops while it is entered; whatever goes wrong in here ends the looking, never the op.

    Attributes:
        modules: root and FQN of the modules whose forward runs, outermost first.
        stage: of the code outside of modules and backward passes: script, loss or optimizer.
        steps_in_backward: optimizers step while a backward pass brings their gradients.
        resting: ops run as they are, unseen.
        most_micro_steps: of one step that are looked at; None: all of them.
        beside_compiled: it may be open while compiled code runs.
        clock: in ns, of CPU time; where there is a GPU, of the host's: waiting for results is what they cost there.
        spent_ns: what this has taken, without the ops themselves.
        failure: what ended the looking.
    """

    watches = True
    most_micro_steps: int | None = None
    beside_compiled = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch has it
        self.modules: list[tuple[str, str]] = []
        self.stage, self.resting = "forward", False
        self.micro_step = 0
        self.steps_in_backward = False
        self.clock = time.perf_counter_ns if torch.cuda.is_initialized() else time.thread_time_ns
        self.spent_ns = 0
        self.failure: Exception | None = None
        #: By the sequence number of its autograd node: where a forward op stood.
        self._made: dict[int, Where] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled, unseen."""
        return True

    def module_entered(self, module: nn.Module, args: Any) -> None:
        """A module's forward begins; it is the last of :attr:`modules`."""

    def module_left(self, module: nn.Module, result: Any) -> None:
        """A module's forward has ended; it is still the last of :attr:`modules`."""

    def backward_entered(self) -> None:
        """``backward`` begins."""

    def backward_left(self) -> None:
        """``backward`` has ended."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def guarded(self, look: Callable[[], Any]) -> Any:
        """What ``look`` returns; None where it fails, or nothing may be read."""
        began = self.clock()
        try:
            if self.failure is None and not is_capturing():
                with kernels.apart_from_user_modes():
                    return look()
        except Exception as error:  # noqa: BLE001 - the op is the user's, the look at it is ours
            attach.let_through(error)
            self.failure = error
        finally:
            self.spent_ns += self.clock() - began
        return None

    @property
    def full(self) -> bool:
        """Whether it looks at nothing more, however long the step goes on."""
        return False

    @property
    def cannot_look(self) -> bool:
        """Whether ops are to run unseen at this moment."""
        return (
            self.over
            or self.resting
            or self.failure is not None
            or torch._C._functorch.maybe_current_level() is not None
            or torch._C._get_tracing_state() is not None
        )

    def phase(self) -> str:
        """Forward, recompute, backward or, in a backward pass, optimizer; elsewhere the stage."""
        node: Any = torch._C._current_autograd_node()
        if node is None and torch._C._current_graph_task_id() == -1:
            return "forward" if self.modules else self.stage
        if self.steps_in_backward and steps_in_progress():
            return "optimizer"
        return "recompute" if self.modules else "backward"

    def where(self, phase: str, sequence: int) -> Where:
        """The place of the op that has just run.

        Args:
            phase: as :meth:`phase` has it.
            sequence: the number the next autograd node was to get before the op ran.
        """
        root, module = self.modules[-1] if self.modules else ("", "")
        line = innermost_user_line(past_own=True)
        if phase != "backward":
            where = Where(root, module, line)
            self._made.setdefault(sequence - 1, where)
            return where
        node: Any = torch._C._current_autograd_node()
        made = self._made.get(node._sequence_nr()) if node is not None else None
        return Where("", "", line) if made is None else Where(made.root, made.module, line or made.line)
