"""The drain thread: takes finished steps from a bounded queue, turns them into rows, appends them to the log.

It never blocks training. If the writer cannot keep up, the tensors rows of the oldest waiting step are dropped and
counted (steps rows and events are kept). If the directory cannot be written, it prints so once, and recording is over.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from precdoctor.recording import kernels
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output.evidence import Evidence, Watcher
from precdoctor.recording.output.process_facts import with_device_numbers
from precdoctor.recording.output.step_rows import ClipOrders, EventLog, LossScales, step_row
from precdoctor.recording.output.tensor_table import Sites, StepTensors
from precdoctor.recording.process import attach
from precdoctor.recording.slots.step_batch import EventBatch, OpBatch, StepBatch, StepFacts
from precdoctor.runlog.halting import halt_requested
from precdoctor.runlog.layout import create_rank_directory
from precdoctor.runlog.writer import DiskBudgetReached, RankWriter

#: Maximum rows of memory in flight (about 13 kB of host memory each), and steps that may wait whatever their size.
_MAX_ROWS = 10_000
_MAX_STEPS = 8
#: Maximum items in flight: steps rows and events are small, but a file system may hang for days.
_MAX_ITEMS = 20_000
#: Maximum lists of ops in flight: each may hold 65 MB.
_MAX_LISTS = 4
#: How long a clean exit waits for the queue to empty.
_CLOSE_SECONDS = 60.0
#: How long steps rows may wait to be written, and how many: a crash loses these.
_IDLE_SECONDS = 0.5
_MAX_STEP_ROWS = 64
_MAX_DEFECTS = 3
#: Pieces of evidence for deep scans kept until the sampler reads them: the newest.
_MAX_EVIDENCE = 16
#: How long a fork waits for the thread to finish its current item.
_FORK_SECONDS = 5.0


_ROWS = operator.attrgetter("rows")

Item = StepBatch | EventBatch | OpBatch


class Drain:
    """Owns the rank directory and the thread that writes it; if not ``threaded``, :meth:`close` does all the writing.

    Attributes:
        directory: of this process.
        takes_tensors: false once the disk budget has no room for tensors rows.
        failed: whether writing has stopped for good.
        defect: the first internal error on the thread.
        halt: the reason to stop the run, once a halt was requested.
        evidence: recorded numbers that give reason for a deep scan, oldest first.
        sampled_ns: CPU time the thread spent on the last step that had tensors rows.

    Raises:
        OSError: the rank directory cannot be created.
    """

    def __init__(self, run: Path, rank: int, options: RecordOptions, *, threaded: bool = True) -> None:
        self.directory = create_rank_directory(run, rank)
        self.takes_tensors = True
        self.failed = False
        self.defect: Exception | None = None
        self.halt: str | None = None
        self.sampled_ns = 0
        self.evidence: collections.deque[Evidence] = collections.deque(maxlen=_MAX_EVIDENCE)
        self._watcher = Watcher() if options.deep_scan != 0 else None
        self._rank = rank
        self._options = options
        self._queue: collections.deque[Item] = collections.deque()
        #: The batches of the queue that hold tensors rows, and how many rows of memory these hold.
        self._sampled: collections.deque[StepBatch] = collections.deque()
        self._rows_waiting = 0
        self._facts: Mapping[str, Any] | None = None
        self._end: Mapping[str, Any] | None = None
        #: Both are implemented in C: a signal handler of the user that raises inside one cannot leave it broken.
        self._lock = threading.RLock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Held by the thread except while it waits.
        self._busy = threading.Lock()
        self._fork_patience = _FORK_SECONDS
        self._defects = 0
        self._lost_items = 0
        self._has_reported = False
        self._log = EventLog(rank, redact=options.redact_names)
        self._handling = False
        self._closed = False
        #: Steps rows to be written with the next ones.
        self._step_rows: list[dict[str, Any]] = []
        self._last_written: StepFacts | None = None
        self._scales = LossScales()
        self._clip_orders = ClipOrders()
        self._sites = Sites()
        self._dropped: collections.Counter[str] = collections.Counter()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name="precdoctor-drain", daemon=True)
            self._thread.start()

    # --- the training side -------------------------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """Queue an item; never waits for the writer."""
        if isinstance(item, StepBatch) and (listed := item.facts.ops) is not None:
            item.facts.ops = None
            self.put(listed)
        with self._lock:
            if self.failed:
                return
            if isinstance(item, OpBatch) and sum(type(x) is OpBatch for x in self._queue) >= _MAX_LISTS:
                self._lost_items += item.rows
                return
            if len(self._queue) >= _MAX_ITEMS:
                self._lost_items += _rows_of(self._take())
            if isinstance(item, StepBatch) and item.entries:
                item.rows_held = sum(map(_ROWS, item.snapshots.values()))
                while len(self._sampled) >= _MAX_STEPS and self._rows_waiting + item.rows_held > _MAX_ROWS:
                    self._rows_waiting -= self._sampled[0].rows_held
                    self._sampled.popleft().give_up_tensors()
            # Before the counts: if a signal handler raises in between, an uncounted item does no harm.
            self._queue.append(item)
            if isinstance(item, StepBatch) and item.entries:
                self._rows_waiting += item.rows_held
                self._sampled.append(item)
            if not isinstance(item, StepBatch) or item.entries:  # other steps wait for the next wake-up
                self._wake.put(None)

    @property
    def behind(self) -> bool:
        """Whether the queue is more than half full: training should then sample less, before rows are dropped."""
        return len(self._sampled) >= _MAX_STEPS // 2 and 2 * self._rows_waiting > _MAX_ROWS

    @property
    def idle(self) -> bool:
        """Whether everything handed over so far has been written."""
        return not self._queue and not self._handling

    def _take(self) -> Item:
        item = self._queue.popleft()
        if self._sampled and self._sampled[0] is item:
            self._rows_waiting -= self._sampled.popleft().rows_held
        return item

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Have the thread rewrite rank.json."""
        with self._lock:
            self._facts = facts
            self._wake.put(None)

    def close(self, end: Mapping[str, Any], *, wait: bool = True) -> None:
        """Have the thread write everything queued, and ``end`` as end.json; only the first call's counts.

        ``wait``: block until it is done, for a minute at most.
        """
        with self._lock:
            self._end = self._end or dict(end)
            self._wake.put(None)
        if self._thread is None:
            if not self._closed:
                self._closed = True
                self._work()
        elif wait and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                self._say(f"the log was not written out within {_CLOSE_SECONDS:.0f} s, its last rows are lost")

    def pause(self) -> bool:
        """Before a fork: wait until the thread holds no lock that would stay locked in the child forever.

        Import locks above all: libraries import more on first use, and a data loader's worker that then imports the
        same module would hang. Waits some seconds at most, and only once for a file system that hangs.

        Returns:
            Whether :meth:`resume` must be called after the fork.
        """
        paused = self._busy.acquire(timeout=self._fork_patience)
        self._fork_patience = _FORK_SECONDS if paused else 0.0
        return paused

    def resume(self) -> None:
        """Let the thread continue after a fork, in the parent."""
        self._busy.release()

    # --- the drain thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Run the thread: open the writer, handle items until the end, close it."""
        writer = None
        try:
            with self._busy:
                writer = RankWriter(self.directory, max_bytes=self._options.max_disk)
            while self._handle_next(writer):
                pass
            with self._busy:
                if self._lost_items:  # rows of items that were dropped without their step
                    self._append(writer, "events", self._drops(None, "queue_full", self._lost_items))
                writer.close({**(self._end or {}), "dropped": dict(self._dropped)})
        except DiskBudgetReached:
            self._fail(writer, "disk_budget", f"the log has reached --max-disk ({self._options.max_disk} bytes)")
        except OSError as error:
            self._fail(writer, "disk", f"the log cannot be written ({error.strerror or error})")
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end the thread without a word
            self.defect = self.defect or error
            self._fail(writer, "error", f"internal error while writing the log ({_sentence(error)})")

    def _handle_next(self, writer: RankWriter) -> bool:
        """Handle one item. Return False if the drain is closing and no item is left."""
        while not self._queue and self._facts is None and self._end is None:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=_IDLE_SECONDS)
        with self._lock:
            facts, self._facts = self._facts, None
            item = self._take() if self._queue else None
            self._handling = item is not None
            # Read together with the queue: while facts are written below, more items and the end may arrive.
            closing = self._end is not None
        with self._busy:
            kernels.stay_out_of_captures()
            if self._options.may_halt and self.halt is None:
                self.halt = halt_requested(self.directory.parent)
            if facts is not None:
                writer.write_facts(with_device_numbers(facts))
            if item is not None:
                self._write(writer, item)
            if not self._queue:
                self._write_step_rows(writer)
            self._handling = False
        return item is not None or not closing

    def _write(self, writer: RankWriter, item: Item) -> None:
        """Write one item; a few internal errors are reported and survived."""
        try:
            if isinstance(item, StepBatch):
                self._write_step(writer, item)
            elif isinstance(item, OpBatch):
                self._write_ops(writer, item)
            else:
                self._append(writer, "events", self._log.rows(item.events))
        except (DiskBudgetReached, OSError):
            raise
        except Exception as error:
            self._defects += 1
            self.defect = self.defect or error
            if self._defects >= _MAX_DEFECTS:
                raise
            self._note_defect(writer, item, error)

    def _write_step(self, writer: RankWriter, batch: StepBatch) -> None:
        """Write the rows and events of one step, once the device has delivered them."""
        # A step can arrive twice if a signal handler raised between its hand-over and the next step.
        if batch.facts is self._last_written:
            batch.release()
            return
        began, self._last_written = time.thread_time_ns(), batch.facts
        for snapshot in batch.snapshots.values():
            snapshot.wait()
        tensors = StepTensors(batch, self._rank, self._sites)
        scale, inferred = self._scales.of(batch, tensors.unscale_ratios())
        if inferred and scale is not None:
            self._clip_orders.settle(batch.facts, tensors, scale)
        step = step_row(batch, tensors, self._rank, scale)
        events = self._log.of_step(batch, tensors.bad_triggers(), step, scale if inferred else None)
        self._watch(tensors, step, scale)
        if batch.dropped:
            events += self._drops(batch.facts.step, "queue_full", batch.dropped)
        try:
            if tensors.rows:
                writer.append("tensors", tensors.columns(scale), tensors.rows)
        except DiskBudgetReached:  # the writer reserves the last of the budget for the small tables
            self.takes_tensors = False
            limit = f"--max-disk ({self._options.max_disk} bytes)"
            self._say(f"the log has reached {limit}; tensors are no longer recorded, training goes on")
            events += self._drops(batch.facts.step, "disk_budget", tensors.rows)
        batch.release()
        if tensors.rows:
            self.sampled_ns = time.thread_time_ns() - began
            step["recorder_ns"] += self.sampled_ns
        self._step_rows.append(step)
        if tensors.rows or events or len(self._step_rows) >= _MAX_STEP_ROWS:
            self._write_step_rows(writer)
        self._append(writer, "events", events)

    def _write_ops(self, writer: RankWriter, item: OpBatch) -> None:
        columns = {**item.columns, "step": [item.step] * item.rows, "rank": [self._rank] * item.rows}
        try:
            writer.append("ops", columns, item.rows)
        except DiskBudgetReached:
            limit = f"--max-disk ({self._options.max_disk} bytes)"
            self._say(f"the log has reached {limit}; ops are no longer listed, training goes on")
            self._append(writer, "events", self._drops(item.step, "disk_budget", item.rows))

    def _watch(self, tensors: StepTensors, step: dict[str, Any], scale: float | None) -> None:
        """Collect evidence for a deep scan. A non-finite step gives none: it is an incident and is replayed instead."""
        if self._watcher is None or step["non_finite"]:
            return
        found = self._watcher.of_step(step)
        if tensors.rows:
            rows = self._watcher.of_rows(step["step"], tensors.readings(), scale)
            found += [replace(e, tensor=tensors.label(e.slot)) for e in rows]
        self.evidence.extend(found)

    def _write_step_rows(self, writer: RankWriter) -> None:
        """Write the waiting steps rows together: one append per unsampled step would cost as much as a sampled step."""
        rows, self._step_rows = self._step_rows, []
        self._append(writer, "steps", rows)

    def _append(self, writer: RankWriter, table: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to a table, without columns that are None in all of them."""
        if rows:
            known = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
            writer.append(table, {name: [row.get(name) for row in rows] for name in known}, len(rows))

    def _drops(self, step: int | None, reason: str, rows: int) -> list[dict[str, Any]]:
        """Count lost rows and return the event that reports them."""
        self._dropped[reason] += rows
        return self._log.rows([{"event": "drop", "step": step, "data": {"reason": reason, "rows": rows}}])

    # --- when something is wrong --------------------------------------------------------------------------------------

    def _note_defect(self, writer: RankWriter, item: Item, error: Exception) -> None:
        """Report and log that the item is lost."""
        self._say(f"internal error while writing the log ({_sentence(error)})")
        step = item.facts.step if isinstance(item, StepBatch) else None
        step = item.step if isinstance(item, OpBatch) else step
        data = {"message": _sentence(error), "where": attach.innermost_own_frame(error)}
        rows = self._log.rows([{"event": "error", "step": step, "data": data}]) + self._drops(
            step, "error", _rows_of(item)
        )
        self._append(writer, "events", rows)

    def _fail(self, writer: RankWriter | None, reason: str, message: str) -> None:
        """End recording: print the reason, close the writer if possible, drop the queue."""
        with self._lock:
            self.failed = True
            self._queue.clear()
            self._sampled.clear()
            self._facts = None
        self._say(f"{message}; recording has stopped, training goes on")
        if writer is not None:
            with contextlib.suppress(OSError):  # it may fail again: then the end marker is missing
                writer.close({"reason": reason, "message": message, "dropped": dict(self._dropped)})

    def _say(self, message: str) -> None:
        """Print the first message only; the log has the rest."""
        if not self._has_reported:
            self._has_reported = True
            attach.say(message)


def _rows_of(item: Item) -> int:
    """Return the number of log rows that are lost with an item."""
    if isinstance(item, OpBatch):
        return item.rows
    return len(item.events) if isinstance(item, EventBatch) else 1 + item.dropped + len(item.entries)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
