"""Follows a run: reads its new rows, and determines whether its processes are alive."""

from __future__ import annotations

import enum
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.ending import end_of_run, ending
from precdoctor.errors import CorruptRunError, RunNotFoundError, RunUnreadableError
from precdoctor.reporting.live.picture import EVENT_COLUMNS, STEP_COLUMNS, TENSOR_COLUMNS, Picture
from precdoctor.reporting.text import clean, spans
from precdoctor.runlog import Run, open_run
from precdoctor.runlog.attachment import why_nothing_attached
from precdoctor.runlog.follow import Follower
from precdoctor.runlog.lock import is_alive, is_locked
from precdoctor.runlog.reader import RankLog

#: A run is silent after this long without a new row: in seconds, and in durations of a typical step.
_SILENT_SECONDS, _SILENT_STEPS = 30.0, 10.0


class Phase(enum.Enum):
    """The state of a run."""

    STARTING = "starting"
    RUNNING = "running"
    SILENT = "silent"
    ENDED = "ended"
    DIED = "died"
    GONE = "gone"


#: Phases after which no new rows come.
OVER = frozenset({Phase.ENDED, Phase.DIED, Phase.GONE})


class Watcher:
    """Follows a growing run: each :meth:`poll` updates the attributes.

    Args:
        path: the run directory, which must have a run.json.
        clock: seconds from any origin; must be monotonic.

    Attributes:
        picture: the aggregated rows.
        phase, words: the state of the run, and a clause on it, possibly empty.
        problem: what could not be read at the last poll; None if nothing.
        ranks: number of ranks.
        device: name of the device; "" if unknown.
        grown: number of polls that found new rows.

    Raises:
        RunNotFoundError, RunUnreadableError: as :func:`precdoctor.runlog.open_run`.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.info: dict[str, Any] = open_run(path).info
        self.path = path
        self.picture = Picture()
        self.phase, self.words = Phase.STARTING, ""
        self.problem: str | None = None
        self.ranks = 0
        self.device = ""
        self.grown = 0
        self._clock = clock
        self._follower = Follower(path)
        self._rows = 0
        self._last_growth = clock()
        self._old_skipped = False
        self._unlocked: frozenset[str] = frozenset()
        self._launcher_gone = False
        self._damage: str | None = None

    def poll(self) -> None:
        """Read new rows and update the state. Rows and files that cannot be read only set ``problem``, because a
        network file system may fail for a moment.

        Raises:
            CorruptRunError: the same damage was found at two polls in a row, so it is permanent.
        """
        self.problem = None
        damage, self._damage = self._damage, None
        try:
            run = open_run(self.path)
            if not self._old_skipped and run.ranks:
                self._follower.skip_old("tensors", keep=2)  # the live view needs only the newest tensors
                self._old_skipped = True
            before = self._rows
            try:
                self._read()
            except RunUnreadableError as error:
                self.problem = str(error)
            if self._rows != before:
                self.grown += 1
                self._last_growth = self._clock()
            self.phase, self.words = self._phase_of(open_run(self.path))
        except RunNotFoundError:
            self.phase, self.words = Phase.GONE, "the run directory is gone"
        except CorruptRunError as error:
            if str(error) == damage:
                raise
            self.problem = self._damage = str(error)
        except RunUnreadableError as error:
            self.problem = str(error)
        except OSError as error:  # a directory was removed during the poll
            self.problem = f"cannot read {self.path}: {error.strerror or error}"

    def _read(self) -> None:
        picture = self.picture
        for table, columns, take in (
            ("steps", STEP_COLUMNS, picture.take_steps),
            ("tensors", TENSOR_COLUMNS, picture.take_tensors),
            ("events", EVENT_COLUMNS, picture.take_events),
        ):
            for batch in self._follower.new(table, columns):
                self._rows += batch.num_rows
                take(batch)

    def _phase_of(self, run: Run) -> tuple[Phase, str]:
        ranks = run.ranks
        self.ranks = len({r.rank for r in ranks})
        self.device = next((str(d) for d in map(_device, map(self._facts, ranks)) if d), self.device)
        if not ranks:
            return self._phase_without_ranks(run)
        attempts = {r.rank: r for r in ranks}  # the last attempt of each rank
        ongoing = [r for r in attempts.values() if r.end is None]
        unlocked = frozenset(r.directory.name for r in ongoing if not is_locked(r.directory))
        # Lost only if unlocked at two polls in a row: a starting process makes its directory before it locks it.
        lost = [r.rank for r in ongoing if r.directory.name in unlocked & self._unlocked]
        self._unlocked = unlocked
        if not ongoing:
            reasons = {str(r.end.get("reason")) for r in attempts.values() if r.end}
            how_it_ended = clean(ending(end_of_run(run)) or "")
            return Phase.ENDED, "stopped by precdoctor" if "stopped" in reasons else how_it_ended or "closed its log"
        quiet = self._clock() - self._last_growth
        if lost and self._is_local():
            who = "the process" if self.ranks == 1 else f"rank {spans(lost)}"
            what = f"{who} ended without closing the log (killed, or out of memory)"
            return (Phase.RUNNING if len(lost) < len(ongoing) else Phase.DIED), what
        if quiet > max(_SILENT_SECONDS, _SILENT_STEPS * (self.picture.step_seconds or 0.0)):
            return Phase.SILENT, f"no new row for {quiet:.0f} s: a long step, an evaluation, or the end"
        return (Phase.STARTING if self.picture.last_step is None else Phase.RUNNING), ""

    def _phase_without_ranks(self, run: Run) -> tuple[Phase, str]:
        notes = run.attach_lines()
        if "exit_status" in run.info:
            return Phase.ENDED, f"nothing was recorded: {why_nothing_attached(notes)}"
        offered = {note.get("pid") for note in notes}
        words = f"{plural(len(offered), 'process')} so far, none has called a model yet"
        was_gone, self._launcher_gone = self._launcher_gone, self._is_launcher_gone(run)
        if not (was_gone and self._launcher_gone):  # as for ranks: it may have ended since run.json was read
            return Phase.STARTING, words
        if any(type(pid) is int and is_alive(pid) for pid in offered):
            return Phase.STARTING, f"`precdoctor record` was killed; {words}"
        return Phase.DIED, "`precdoctor record` was killed before anything was recorded"

    def _is_launcher_gone(self, run: Run) -> bool:
        """Return whether the run's `precdoctor record` has ended; False if the run has none, or on another host."""
        launcher = run.info.get("pid")
        if type(launcher) is not int or not self._is_local():
            return False
        return not is_alive(launcher) and not is_locked(run.path.resolve())

    def _facts(self, rank: RankLog) -> dict[str, Any]:
        """Content of rank.json; empty, with ``problem`` set, if it cannot be read."""
        try:
            return rank.facts
        except RunUnreadableError as error:
            self.problem = str(error)
            return {}

    def _is_local(self) -> bool:
        """Return whether the run was launched on this host, so that a free lock proves the writer dead."""
        host = self.info.get("host")
        return isinstance(host, dict) and host.get("name") == platform.node()


def _device(facts: dict[str, Any]) -> object:
    device = facts.get("device")
    if not isinstance(device, dict):
        return device
    return device.get("type") if device.get("type") == "cpu" else device.get("name") or device.get("type")
