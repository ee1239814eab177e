"""Diagnoses a growing run at intervals, in a process of low priority that can be killed at any moment."""

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

#: Least pause after a diagnosis: in seconds, and as a multiple of its duration, so that diagnoses cost at most a tenth
#: of one core however long the log gets.
PAUSE_SECONDS, PAUSE_TIMES = 15.0, 10.0
#: Nice value of the process, so that it does not slow the training.
_NICENESS = 10
#: As ``-m precdoctor``, but without the current directory on the path: a ``json.py`` there would shadow Python's.
_START = f"""import sys
sys.path[:1] = []
sys.path.append({str(Path(precdoctor.__file__).parent.parent)!r})
from precdoctor.cli import main
sys.exit(main())"""


class Check:
    """Runs ``precdoctor diagnose`` on a run, one diagnosis at a time.

    Attributes:
        findings: findings of the last completed diagnosis, from its JSON report; None before the first.
        step: the last step of the run in that diagnosis.
        problem: why the last diagnosis failed; None if it did not.
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
        """Whether a diagnosis is running."""
        return self._process is not None

    def due(self, state: int, *, last: bool) -> bool:
        """Return whether to start a diagnosis: the run has grown, none is running, and the pause is over.

        Args:
            state: a number that changes when the run grows.
            last: the run is over, so the pause is skipped.
        """
        return not self.busy and state != self._seen and (last or self._clock() >= self._next)

    def begin(self, state: int) -> None:
        """Start a diagnosis; :meth:`poll` collects its result."""
        self._seen, self._began = state, self._clock()
        out, err = self._files = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 - see _close
        environment = {**os.environ, "PRECDOCTOR_DIAGNOSE_ALSO": ""}  # rules as in the settings, but no report files
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, "diagnose", str(self._path), "--output-format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,  # Ctrl-C must reach only the view
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def poll(self) -> bool:
        """Collect the result if the diagnosis has ended; return whether it had."""
        if self._process is None or self._process.poll() is None:
            return False
        assert self._files is not None
        out, err = self._files
        out.seek(0)
        err.seek(0)
        self._parse_answer(out.read(), err.read().decode(errors="replace").strip().splitlines())
        self._close()
        now = self._clock()
        self._next = now + max(PAUSE_SECONDS, PAUSE_TIMES * (now - self._began))
        return True

    def _parse_answer(self, answer: bytes, errors: Sequence[str]) -> None:
        try:
            diagnosis = json.loads(answer)
            findings, step = diagnosis["findings"], diagnosis["run"].get("last_step")
        except (ValueError, TypeError, KeyError, AttributeError):
            self.problem = errors[-1].removeprefix("precdoctor: ") if errors else "the diagnosis has no answer"
            return
        self.problem = None
        self.findings = [f for f in findings if isinstance(f, dict)]
        self.step = step

    def stop(self) -> None:
        """Kill the running diagnosis, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close()

    def _close(self) -> None:
        self._process = None
        for file in self._files or ():
            file.close()
        self._files = None
