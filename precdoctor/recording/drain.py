"""The drain thread: takes finished steps off a bounded queue, turns them into rows, appends them to the log.

It never blocks training: when the queue is full the oldest step's tensor rows are dropped and counted (steps rows and
events are kept), and when the directory cannot be written it says so once and only counts from then on.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precdoctor.recording import attach
from precdoctor.recording.batch import EventBatch, StepBatch
from precdoctor.recording.events import EventLog
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.rows import attach_scale, loss_scale, step_row, tensor_rows
from precdoctor.runlog.layout import create_rank_directory
from precdoctor.runlog.writer import DiskBudgetReached, RankWriter

#: Steps in flight; each holds its slots' host copies (about 13 kB a tensor).
_MAX_QUEUE = 8
#: How long a clean exit waits for the queue to empty.
_CLOSE_SECONDS = 60.0
_IDLE_SECONDS = 0.5


class Drain:
    """Owns the rank directory and the thread that writes it.

    Raises:
        OSError: the rank directory cannot be made.
    """

    def __init__(self, run: Path, rank: int, options: RecordOptions) -> None:
        self.directory = create_rank_directory(run, rank)
        self._rank = rank
        self._options = options
        self._queue: collections.deque[StepBatch | EventBatch] = collections.deque()
        self._facts: Mapping[str, Any] | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._failed = False
        self._log = EventLog(rank, redact=options.redact_names)
        self._dropped: collections.Counter[str] = collections.Counter()
        self._writer: RankWriter | None = None
        self._thread = threading.Thread(target=self._work, name="precdoctor-drain", daemon=True)
        self._thread.start()

    # --- the training side -------------------------------------------------------------------------------------------

    def put(self, item: StepBatch | EventBatch) -> None:
        """Queue a step or events; never waits."""
        with self._wake:
            waiting = [i for i in self._queue if isinstance(i, StepBatch) and i.entries]
            if isinstance(item, StepBatch) and len(waiting) >= _MAX_QUEUE:
                oldest = waiting[0]
                self._dropped["queue_full"] += len(oldest.entries)
                oldest.entries, oldest.snapshots = [], {}
            self._queue.append(item)
            self._wake.notify()

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Have rank.json rewritten with these facts."""
        with self._wake:
            self._facts = facts
            self._wake.notify()

    def close(self, end: Mapping[str, Any]) -> None:
        """Write out everything queued and the end marker; gives up waiting after a minute."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._end = end
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    # --- the drain thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._writer = RankWriter(self.directory, max_bytes=self._options.max_disk)
            while self._turn():
                pass
            if self._writer is not None:
                self._flush_drops()
                self._writer.close({**self._end, "dropped": dict(self._dropped)})
        except DiskBudgetReached as error:
            self._fail("disk_budget", f"--max-disk reached ({error})")
        except OSError as error:
            self._fail("disk", f"the log cannot be written ({error})")
        except Exception as error:  # noqa: BLE001 -- a defect of ours must not end the thread without a word
            self._fail("error", f"internal error in the drain thread ({type(error).__name__}: {error})")

    def _turn(self) -> bool:
        """Handle one item; false when closing and nothing is left."""
        with self._wake:
            while not self._queue and self._facts is None and not self._closing:
                self._wake.wait(_IDLE_SECONDS)
            facts, self._facts = self._facts, None
            item = self._queue.popleft() if self._queue else None
        writer = self._writer
        assert writer is not None
        if facts is not None:
            writer.write_facts(facts)
        if isinstance(item, StepBatch):
            self._write_step(writer, item)
        elif item is not None:
            self._append(writer, "events", self._log.rows(item.events))
        return item is not None or not self._closing

    def _write_step(self, writer: RankWriter, batch: StepBatch) -> None:
        for snapshot in batch.snapshots.values():
            snapshot.wait()
        rows = tensor_rows(batch, self._rank)
        scale, inferred = loss_scale(batch, rows)
        attach_scale(rows, scale)
        step = step_row(batch, rows, self._rank, scale)
        self._append(writer, "tensors", rows)
        self._append(writer, "steps", [step])
        self._append(writer, "events", self._log.of_step(batch, rows, step, scale if inferred else None))
        self._flush_drops()

    def _append(self, writer: RankWriter, table: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(k for row in rows for k in row)}
            writer.append(table, columns, len(rows))

    def _flush_drops(self) -> None:
        with self._wake:
            dropped = dict(self._dropped)
        new = {reason: n for reason, n in dropped.items() if n > self._log.reported_drops.get(reason, 0)}
        if new and self._writer is not None:
            self._append(self._writer, "events", self._log.drops(new))

    def _fail(self, reason: str, message: str) -> None:
        """Say it once; from now on only count what is lost."""
        if not self._failed:
            self._failed = True
            attach.say(f"{message}; recording has stopped, training goes on")
        writer = self._writer
        if writer is not None:
            try:
                writer.close({"reason": reason, "message": message, "dropped": dict(self._dropped)})
            except OSError:
                pass  # that is what we are failing for; the reader sees a missing end marker
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait(_IDLE_SECONDS)
                self._queue.clear()
                self._facts = None
                if self._closing:
                    return
