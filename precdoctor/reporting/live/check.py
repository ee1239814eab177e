"""Diagnoses a growing run now and then, in a process of low priority that can be ended at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import precdoctor

#: Least time between two diagnoses, in seconds; and in times of what the last one took, so that they cost at most a
#: tenth of one core however long the log gets.
PAUSE_SECONDS, PAUSE_TIMES = 15.0, 10.0
#: How much less urgent than the training.
_NICENESS = 10
#: As ``-m precdoctor``, without the current directory on the path: a ``json.py`` there is not ours.
_START = f"""import sys
sys.path[:1] = []
sys.path.append({str(Path(precdoctor.__file__).parent.parent)!r})
from precdoctor.cli import main
sys.exit(main())"""


class Check:
    """Runs ``precdoctor diagnose`` on the run, one at a time.

    Attributes:
        findings: of the last one that came to an end; None before. As the JSON report has them.
        step: the last step it saw.
        problem: why the last one gave no answer.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.findings: list[Mapping[str, Any]] | None = None
        self.step: int | None = None
        self.problem: str | None = None
        self._path = path
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[IO[bytes], IO[bytes]] | None = None
        self._began = 0.0
        self._next = clock()
        self._seen = -1

    @property
    def busy(self) -> bool:
        """Whether one is under way."""
        return self._process is not None

    def due(self, state: int, *, last: bool) -> bool:
        """Whether to begin one: there is something new, none is under way, and the last is long enough ago.

        Args:
            state: a number that changes when the run grows.
            last: the run is over, so there is nothing to wait for.
        """
        return not self.busy and state != self._seen and (last or self._clock() >= self._next)

    def begin(self, state: int) -> None:
        """Start one; :meth:`poll` fetches its answer."""
        self._seen, self._began = state, self._clock()
        out, err = self._files = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 - see _close
        environment = {**os.environ, "PRECDOCTOR_DIAGNOSE_ALSO": ""}  # the settings' rules hold, its files are not ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, "diagnose", str(self._path), "--output-format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the view
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def poll(self) -> bool:
        """Whether a new answer is there."""
        if self._process is None or self._process.poll() is None:
            return False
        assert self._files is not None
        out, err = self._files
        out.seek(0)
        err.seek(0)
        self._take(out.read(), err.read().decode(errors="replace").strip().splitlines())
        self._close()
        now = self._clock()
        self._next = now + max(PAUSE_SECONDS, PAUSE_TIMES * (now - self._began))
        return True

    def _take(self, answer: bytes, said: Sequence[str]) -> None:
        try:
            diagnosis = json.loads(answer)
            findings, step = diagnosis["findings"], diagnosis["run"].get("last_step")
        except (ValueError, TypeError, KeyError, AttributeError):
            self.problem = said[-1].removeprefix("precdoctor: ") if said else "the diagnosis has no answer"
            return
        self.problem = None
        self.findings = [f for f in findings if isinstance(f, dict)]
        self.step = step

    def stop(self) -> None:
        """End one that is under way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close()

    def _close(self) -> None:
        self._process = None
        for file in self._files or ():
            file.close()
        self._files = None
