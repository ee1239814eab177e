"""The recorder of one process: its state, its slots, and the current step. Hooks call it; it never calls user code.

States: ``idle`` (hooks installed) -> ``armed`` (a model was called: statistics are measured; directory and drain thread
exist once :mod:`.recorder.rank_claim` finds that the process trains) -> ``off`` (closed, three internal errors, too
little memory, or a process to leave out, such as a DataLoader worker). A forked child starts again at ``idle``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from precdoctor import _attach_file
from precdoctor.recording import kernels
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.model.module_names import Names, Place
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output.process_facts import Facts
from precdoctor.recording.process import attach, memory_shortage
from precdoctor.recording.process.fatal_exception import fatal_exception
from precdoctor.recording.process.threads import Threads
from precdoctor.recording.recorder.graph_capture import Capture
from precdoctor.recording.recorder.rank_claim import Claim, may_record
from precdoctor.recording.recorder.sampling import Sampler
from precdoctor.recording.slots.batched_launch import BatchedLaunch
from precdoctor.recording.slots.deferred import CUDA, is_capturing
from precdoctor.recording.slots.group_sums import measured_groups
from precdoctor.recording.slots.slot_table import MOST_NAMES, OTHERS, Entry, SlotTable
from precdoctor.recording.slots.step_batch import EventBatch, StepBatch, StepFacts

if TYPE_CHECKING:
    from precdoctor.recording.output.drain import Drain
    from precdoctor.recording.output.evidence import Evidence
    from precdoctor.recording.recorder.step_context import StepTrace

_MAX_INTERNAL_ERRORS = 3
MAX_CALLS = 16  # per module and micro-step; later calls share the last number: recurrent cells make thousands


class Recorder:
    """One per process; see the module docstring for its states."""

    def __init__(self, run: Path, options: RecordOptions) -> None:
        self.run, self.options, self.state = run, options, "idle"
        self.local = threading.local()
        #: Sentences to log as soon as there is a log.
        self.warnings: list[str] = []
        #: Called in a forked child: hooks drop what they remember of the parent's run.
        self.when_forked: list[Callable[[], None]] = []
        #: Called at the first model call, backward pass or step, in ranks left out also; and before the log is closed.
        self.when_armed: list[Callable[[], None]] = []
        self.when_closing: list[Callable[[], None]] = []
        self.when_turned_off: list[Callable[[], None]] = []  # each removes its hooks that are still installed in torch
        #: Called before a step's rows are handed to the drain, and before the run is closed.
        self.when_step_ends: list[Callable[[], None]] = []
        #: Called when the sampler has decided whether the coming step is sampled.
        self.when_step_begins: list[Callable[[], None]] = []
        #: Rows of events from before recording began; a forked child starts with its parent's.
        self._early: list[dict[str, Any]] = []
        self.trace: StepTrace | None = None  # traces every op of some steps
        #: Called before the log is closed: ends a step that no optimizer has announced.
        self.end_open_step: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._paused_drain: Drain | None = None
        self._ended = False
        self._reset()

    def _reset(self) -> None:
        """Set the state of a process that has recorded nothing yet."""
        self.threads = Threads(lambda: self.claim.has_trained, lambda: self.on_the_clock, self.warn)
        self.claim = Claim(self)
        self.names = Names()
        self.slots = SlotTable(inference=self.options.inference, crowded=self._too_many_names)
        self.facts: Facts | None = None
        self.drain: Drain | None = None
        self.evidence: deque[Evidence] = deque()  # the drain's, once there is one
        self.errors = self.micro_step = 0
        #: Whether a hook body is running and charged with its time (:mod:`~precdoctor.recording.recorder.hook_guard`);
        #: whether the log is being closed, so that Python may refuse to start a thread.
        self.live = self.in_backward = self.on_the_clock = self._closing = False
        self.current = StepFacts(self.options.first_step)
        self.sampler = Sampler(self.options)
        self._calls: dict[tuple[str, str, str], int] = {}
        self._step_began = time.perf_counter_ns()
        self.capture = Capture(self.warn)

    # --- states ------------------------------------------------------------------------------------------------------

    def arm(self) -> bool:
        """Go from idle to armed at the first model call, backward pass or step. Return False if not to be recorded."""
        with self._lock:
            if self.state == "idle":
                try:
                    self._arm()
                except Exception as error:  # noqa: BLE001 - the training continues without a log
                    self.internal_error(error)
                    self._turn_off("an internal error as it began")
            return self.state == "armed"

    def _arm(self) -> None:
        """Begin to record, unless this process is to be left out."""
        worker = attach.in_data_loader_worker()
        if worker or not may_record(self):
            self.state = "off"
            if not worker:
                attach.call_all(self.when_armed)  # --apply changes the training of unrecorded ranks also
            return
        self.facts = Facts(self._write_facts, self.names)
        self.state = "armed"
        self._begin_step(self.step)
        in_transform = torch._C._functorch.maybe_current_level() is not None
        _attach_file.note(str(self.run), "model", "inside torch.func" if in_transform else None)
        attach.at_exit(self.close)
        for message in self.warnings:
            self.event("warning", data={"message": message})
        for row in self._early:
            self.event(**row)
        attach.call_all(self.when_armed)

    def _write_facts(self, facts: Mapping[str, Any]) -> None:
        if self.drain is not None:
            self.drain.write_facts(facts)

    def close(self, *, reason: str = "exit", message: str | None = None) -> None:
        """Write the remaining rows, also of an unfinished step, and the end marker; block until they are written."""
        with self._lock:
            if self.state == "armed":
                self._closing = True
                try:
                    attach.call_all(self.when_closing)
                    if self.trace is not None:
                        self.trace.end(died=True)
                    self.end_open_step()
                    self.claim.at_end(stopped=reason == "stopped")
                    self._call_step_ends()
                    if self.claim.step_has_begun(stopped=reason == "stopped"):
                        self._hand_over(complete=False)
                    if self.facts is not None:
                        self.facts.write_if_changed()
                except Exception as error:  # noqa: BLE001 - at exit no caller can handle it
                    self._log_error(error)
                self.state, self.live = "off", False
            if (drain := self.drain) is None:  # the process never became a rank
                return
            end: dict[str, Any] = {} if message is None else {"message": message}
            if reason == "exit" and (fatal := fatal_exception(redact=self.options.redact_names)) is not None:
                end["exception"] = fatal
            drain.close({"reason": reason, **end, "steps": self.step - self.options.first_step, "errors": self.errors})

    def before_fork(self) -> None:
        """Pause the drain thread: a lock that it holds during the fork would stay locked in the child."""
        self._paused_drain = self.drain if self.drain is not None and self.drain.pause() else None

    def after_fork_in_parent(self) -> None:
        if self._paused_drain is not None:
            self._paused_drain.resume()

    def after_fork(self) -> None:
        """Start again in a forked child: files, threads and buffers belong to the parent."""
        kernels.forget_all()
        self._lock = threading.RLock()
        self.local = threading.local()
        self._forget()

    def begin_anew(self, run: Path, options: RecordOptions) -> None:
        """Return to idle for another run of the same process. The previous run must have been closed by :meth:`end`."""
        self.run, self.options, self._ended, self._early = run, options, False, []
        self._forget()

    def end(self) -> None:
        """Close the log and stay off, in forked children also, until :meth:`begin_anew`."""
        self.close(reason="end of block")
        self.state, self._ended = "off", True

    def _forget(self) -> None:
        self.state = "off" if self._ended else "idle"
        self._paused_drain = None
        self._reset()
        attach.call_all(self.when_forked)

    def internal_error(self, error: Exception) -> None:
        """Log and count a defect of ours; the third turns recording off. Raises ``error`` with ``--strict``.

        Also raises it if a signal handler of the user's did. An error in an object's own code only costs its rows.
        """
        attach.let_through(error)
        if self.options.strict:
            raise error
        if attach.raised_by_an_object(error):
            self.event("drop", data={"reason": f"{type(error).__name__} in an object's own code", "rows": 1})
            return
        message = self._log_error(error)
        if self.errors == 1:
            attach.say(f"internal error, training is not affected: {message}")
        if self.errors >= _MAX_INTERNAL_ERRORS and self.state == "armed":
            self._turn_off(f"{self.errors} internal errors, the last one {message}")

    def _log_error(self, error: Exception) -> str:
        """Count an internal error and log it; return its message."""
        self.errors += 1
        message = f"{type(error).__name__}: {error}"
        self.event("error", data={"message": message, "where": attach.innermost_own_frame(error)})
        return message

    def _turn_off(self, message: str) -> None:
        """Stop recording for the rest of the run. Queued rows still reach the log; nobody waits for them."""
        self.event("warning", data={"message": f"recording is off after {message}"})
        self.state, self.live = "off", False
        self.slots.take()
        attach.call_all(self.when_turned_off)
        if self.drain is None:
            _attach_file.note(str(self.run), "error", message)
        else:
            end = {"reason": "disabled", "message": message, "errors": self.errors}
            self.drain.close(end, wait=False)

    # --- tensors -----------------------------------------------------------------------------------------------------

    def measure(
        self,
        place: Place,
        kind: str,
        name: str,
        x: Tensor,
        dense: Tensor | None = None,
        *,
        call: int = 0,
        phase: str = "train",
        evaluating: bool = False,
        restart: bool = False,
        launch: Callable[[Tensor, int], None] = kernels.stat,
        together: BatchedLaunch | None = None,
    ) -> Entry | None:
        """Add the elements of ``dense``, by default ``x``'s own, to the slot of ``x``; return None if it gets no row.

        ``restart`` clears the slot first; ``together`` may defer the read.
        """
        kinds = self.options.kinds
        dense = None if kinds and kind not in kinds else tensor_leaves.plain(x) if dense is None else dense
        if dense is None:
            return None
        site = self.slots.site(place, kind, name, x, call=call, phase=phase, evaluating=evaluating)
        if launch is kernels.stat and type(dense) in tensor_leaves.EXACT and kernels.reads_memory(dense):
            entry = self.slots.entry(site, dense.device)
            kernels.read(dense, entry.slot, restart=restart)
        else:
            with kernels.apart_from_user_modes():
                entry = self.slots.entry(site, dense.device)
                if together is None or not together.takes(dense, entry.slot, launch, restart=restart):
                    if restart:
                        kernels.restart(dense.device, entry.slot)
                    launch(dense, entry.slot)
        entry.shape, entry.micro_step = tuple(x.shape), self.micro_step
        entry.first_micro_step = self.micro_step if entry.first_micro_step is None else entry.first_micro_step
        entry.groups += measured_groups(kind, dense) if self.claim.measures_groups else ()
        return entry

    def wants(self, place: Place) -> bool:
        include, exclude = self.options.include, self.options.exclude
        return not (include or exclude) or attach.glob_allows(include, exclude, place.module)

    def next_call(self, place: Place, mode: str) -> int:
        """Count a call; return how many came before in this module, micro-step and mode, at most ``MAX_CALLS - 1``."""
        key = (place.root, place.module, mode)
        self._calls[key] = min((count := self._calls.get(key, 0)) + 1, MAX_CALLS - 1)
        return count

    def _too_many_names(self, place: Place, kind: str) -> None:
        message = f"more than {MOST_NAMES} names of a module's tensors ({kind}); further ones share one row, `{OTHERS}`"
        self.event("warning", root=place.root, module=place.module, data={"message": message})

    # --- steps -------------------------------------------------------------------------------------------------------

    def end_micro_step(self) -> None:
        self.micro_step += 1
        self.current.micro_steps = self.micro_step
        if self.live:
            self.current.micro_starts.append({device: bank.launches for device, bank in kernels.banks().items()})
        self._calls.clear()

    def end_step(self) -> None:
        """End an optimizer-step attempt: hand its rows to the drain and begin the next step."""
        if CUDA.get("_initialized", True) and self.capture.runs:
            return  # its slots go out with the next step outside of the graph
        if self.drain is None:
            self.claim.make()
        self._call_step_ends()
        self._hand_over(complete=True)
        try:
            if (drain := self.drain) is not None:
                facts = self.current
                cost = facts.recorder_ns + (drain.sampled_ns if facts.sampled else 0)
                step, name = facts.step_ns - facts.scan_ns, facts.optimizer or facts.root
                self.sampler.ended(name, sampled=facts.sampled, step_ns=step, cost_ns=cost, wait_ns=facts.wait_ns)
                if facts.sampled and (change := self.sampler.reconsider(behind=drain.behind)) is not None:
                    self.event("sampling", data=change)
        finally:  # if a signal handler of the script raises here, the next step must still get its own number
            self._begin_step(self.current.step + 1)
        if self.trace is not None and not self.claim.forwards_are_steps:  # else the call in progress begins it
            self.trace.begin_if_due()
        if self.facts is not None:
            self.facts.write_if_changed()

    def _call_step_ends(self) -> None:
        try:
            for end in self.when_step_ends:
                end()
        except Exception as error:  # noqa: BLE001 - the step must be logged even so
            self.internal_error(error)

    @property
    def step(self) -> int:
        return self.current.step

    @property
    def traced(self) -> bool:
        """Whether every op of the current step is traced."""
        return self.trace is not None and self.trace.running

    def _begin_step(self, step: int) -> None:
        self.current = StepFacts(step)
        self.micro_step = 0
        self._calls.clear()
        room = self.drain is None or self.drain.takes_tensors
        self.live = self.state == "armed" and room and self.sampler.wants(step)
        if self.live:
            kernels.want_blocks(wanted=self.claim.wants_blocks(step))
        if self.live and (why := memory_shortage.running_out()) is not None:
            attach.say(f"{why}; recording has stopped, training goes on")
            self._turn_off(f"running short of room: {why}")
        self.current.sampled = self.live
        for begin in self.when_step_begins:
            begin()
        self._step_began = time.perf_counter_ns()

    def _hand_over(self, *, complete: bool) -> None:
        """Put the step's facts and a snapshot of its slots into the drain's queue."""
        facts = self.current
        facts.complete = facts.complete or complete
        facts.wall_time = time.time()
        facts.step_ns = time.perf_counter_ns() - self._step_began
        taken = self.slots.take() if self.slots.touched else ()
        entries = [e for e in taken if facts.root or e.counts_as_training(self.names)] if taken else []
        snapshots = {}
        if facts.sampled and not is_capturing():
            with kernels.apart_from_user_modes():
                snapshots = {device: bank.snapshot(len(self.slots)) for device, bank in kernels.banks().items()}
            for sentence in kernels.cuda.untold_failures():
                self.warn(sentence)
        if (drain := self.drain) is None:
            return
        drain.put(StepBatch(facts, entries, snapshots))
        if drain.defect is not None and self.options.strict:
            raise drain.defect
        if drain.failed:  # the drain has printed the reason
            self.state = "off"

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Charge the time inside neither to the step nor to the recorder: the user asked for this work."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            took = time.perf_counter_ns() - began
            self._step_began += took
            self.current.recorder_ns -= took

    @property
    def halt(self) -> str | None:
        """Why the run must stop; None until ``--halt-on`` asks for it."""
        return self.drain.halt if self.drain is not None else None

    def warn(self, message: str) -> None:
        self.event("warning", data={"message": message})
        attach.say(message)

    def event(self, kind: str, **columns: Any) -> None:
        """Log an event of the current step; queue it if there is no log yet. An incident makes the process a rank."""
        if self.state == "idle":
            self._early.append({"kind": kind, **columns})
            return
        if kind == "incident":
            self.claim.make(ending=self._closing)
        row = {"event": kind, "step": self.step, "micro_step": self.micro_step, "time_ns": time.time_ns(), **columns}
        if self.drain is not None:
            self.drain.put(EventBatch([row]))
        elif self.state == "armed":
            self.claim.hold_event(row)
