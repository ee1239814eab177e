"""Watches the growing log while the command runs: reads it regularly, reports findings, requests a halt.

Runs in the parent, so that the training process pays nothing. :class:`Online` states how to read the log and which
findings are a reason to halt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precdoctor.recording.process.attach import say
from precdoctor.runlog.halting import request_halt

#: Least seconds between two reads, and least ratio of that time to a read's CPU time, which keeps reading cheap.
_SECONDS = 1.0
_PATIENCE = 10.0
#: Most seconds that the command of ``--on-finding`` may take.
_COMMAND_SECONDS = 60.0


@dataclass(frozen=True)
class Online:
    """How to watch a run.

    Attributes:
        look: returns the new findings of a run; its second argument is True once the run is over.
        halts: returns whether a finding is a reason to stop the run.
        title: returns a finding in a few words.
        to_json: returns a finding as one line of JSON.
        command: shell command to run for each finding, with that line on its stdin; None: no command.
    """

    look: Callable[[Path, bool], Sequence[Any]]
    halts: Callable[[Any], bool]
    title: Callable[[Any], str]
    to_json: Callable[[Any, Path], str]
    command: str | None


class Supervisor:
    """The thread that watches a run, from the start of the command to its end."""

    def __init__(self, online: Online, run: Path) -> None:
        self._online = online
        self._run = run
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = False
        self._asked = False

    def start(self) -> None:
        """Start the thread. It inherits the caller's blocked signals, so none is delivered to it."""
        self._thread = threading.Thread(target=self._work, name="precdoctor-online", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last read, after the command has ended."""
        self._over.set()
        if self._thread is not None:
            with contextlib.suppress(KeyboardInterrupt):  # an impatient user goes without it
                self._thread.join()

    def _work(self) -> None:
        """Read the log at intervals until the command has ended, then once more."""
        wait, first = _SECONDS, True
        while not self._over.wait(wait):
            began = time.thread_time()
            self._look(last=False)
            # The first read's time is mostly imports.
            wait, first = _SECONDS if first else max(_SECONDS, _PATIENCE * (time.thread_time() - began)), False
        if self._run.is_dir():
            self._look(last=True)

    def _look(self, *, last: bool) -> None:
        """Report new findings; stop watching for good after an error."""
        if self._failed:
            return
        try:
            for finding in self._online.look(self._run, last):
                self._handle(finding, last=last)
        except Exception as error:  # noqa: BLE001 - the training must not suffer from a defect here
            self._failed = True
            say(f"the online rules have stopped ({type(error).__name__}: {error}); the training goes on")

    def _handle(self, finding: Any, *, last: bool) -> None:
        """Run the command for a finding; request a halt for the first that ``halts`` chooses, or print it."""
        if self._online.command is not None:
            self._run_command(self._online.command, self._online.to_json(finding, self._run))
        if self._asked or not self._online.halts(finding):
            return
        if last:
            self._asked = True
            say(f"the command had ended before --halt-on could stop it: {self._online.title(finding)}")
        else:
            message = f"--halt-on, {self._online.title(finding)}"
            try:
                request_halt(self._run, message)
                self._asked = True
            except OSError as error:
                say(f"the run cannot be asked to stop ({error.strerror or error}): {message}")

    def _run_command(self, command: str, text: str) -> None:
        """Run a command with ``text`` on its stdin and its stdout on our stderr, as stdout is the recorded command's.

        Never raises because of what the command does.
        """
        with tempfile.TemporaryFile() as stdin:
            stdin.write(text.encode())
            stdin.seek(0)
            redirections = [(os.POSIX_SPAWN_DUP2, stdin.fileno(), 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
            # Not subprocess: its child would inherit the signals blocked in this thread.
            process = os.posix_spawnp(
                "/bin/sh", ["sh", "-c", command], os.environ, file_actions=redirections, setsigmask=()
            )
        status = self._status_of(process)
        if status is None:
            say(f"the --on-finding command was ended after {_COMMAND_SECONDS:.0f} s: {command}")
        elif status != 0:
            say(f"the --on-finding command ended with status {status}: {command}")

    @staticmethod
    def _status_of(process: int) -> int | None:
        """Return the exit status of a process; None if it ran too long and was killed."""
        deadline, ended = time.monotonic() + _COMMAND_SECONDS, False
        while True:
            pid, status = os.waitpid(process, os.WNOHANG)
            if pid:
                return None if ended else os.waitstatus_to_exitcode(status)
            if not ended and time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                ended = True
            time.sleep(0.02)
