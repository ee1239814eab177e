"""Runs processes with a time limit each: whatever one of them does, the others run and their results stay."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.jsonlines import append

#: Less time than this is not worth a start.
SHORTEST_SECONDS = 4.0
#: A process that is asked to end has this long to write down what it has.
_GRACE_SECONDS = 5.0
LINES_KEPT, LINES_KEPT_OF_TESTS = 15, 100


@dataclass(frozen=True)
class Task:
    """A process: a command, and how long it may take.

    ``{seconds}`` in the command becomes the time that it has.
    """

    name: str
    command: Sequence[str]
    seconds: float
    #: Lines of its output that are kept however it ends: those of the first pattern that :func:`re.search` finds.
    keep: Sequence[str] = ()


class Runner:
    """Runs tasks until a deadline, and appends how each one ended to the results.

    Attributes:
        outcomes: what was appended, in order: ``section, task, result, seconds, tail``. ``result`` is ``ok``,
            ``failed``, ``skipped`` (by itself, or for want of time) or ``timeout``.
    """

    def __init__(self, results: Path, log: Path, deadline: float, environment: Mapping[str, str]) -> None:
        self._results, self._log, self._deadline = results, log, deadline
        self._environment = environment
        self._processes: set[subprocess.Popen[bytes]] = set()
        self.outcomes: list[dict[str, Any]] = []

    def left(self) -> float:
        """Seconds until everything has to be over."""
        return self._deadline - time.monotonic()

    def section(self, name: str, tasks: Sequence[Task], seconds: float, workers: int = 1) -> None:
        """Run the tasks of a section, within ``seconds`` in all; ``workers`` at a time."""
        began = time.monotonic()
        until = min(began + seconds, self._deadline)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            runs = [pool.submit(self._run, name, task, until) for task in tasks]
            try:
                for done in concurrent.futures.as_completed(runs):
                    self._keep(*done.result())
            except BaseException:  # an interrupt: nothing else may start, nothing may stay behind
                pool.shutdown(wait=False, cancel_futures=True)
                self.end_all()
                raise
        append(self._results, {"section": name, "wall": round(time.monotonic() - began, 1)})

    def end_all(self) -> None:
        """End every process that still runs."""
        for process in list(self._processes):
            _signal(process, signal.SIGKILL)

    def _run(self, section: str, task: Task, until: float) -> tuple[dict[str, Any], str]:
        seconds = min(task.seconds, until - time.monotonic())
        outcome = {"section": section, "task": task.name, "result": "skipped", "seconds": 0.0, "tail": ["no time left"]}
        if seconds < SHORTEST_SECONDS:
            return outcome, ""
        command = [part.replace("{seconds}", f"{seconds:.1f}") for part in task.command]
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            status = self._wait(command, output, seconds)
            output.seek(0)
            text = output.read().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        result = {0: "ok", SKIPPED: "skipped", None: "timeout"}.get(status, "failed")
        tail = [] if result == "ok" else lines[-1:] if result == "skipped" else lines[-LINES_KEPT:]
        kept = ([line for line in lines if re.search(pattern, line)] for pattern in task.keep)
        tail = next(filter(None, kept), tail)[-LINES_KEPT_OF_TESTS:]
        return {**outcome, "result": result, "seconds": round(time.monotonic() - began, 1), "tail": tail}, text

    def _wait(self, command: Sequence[str], output: Any, seconds: float) -> int | None:
        """Exit status of a process; null where its time was over first."""
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            output.write(f"{command[0]}: {error}\n".encode())
            return 127
        self._processes.add(process)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # to it alone: pytest then ends its workers and prints what failed
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            return None
        finally:
            _signal(process, signal.SIGKILL)  # and what it has started
            process.wait()
            self._processes.discard(process)

    def _keep(self, outcome: dict[str, Any], text: str) -> None:
        self.outcomes.append(outcome)
        append(self._results, outcome)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"===== {outcome['section']}: {outcome['task']}: {outcome['result']}\n{text}\n")
        print(f"  {outcome['result']:8}{outcome['seconds']:6.1f} s  {outcome['task']}", flush=True)
        for line in outcome["tail"]:
            print(f"      {line[:200]}", flush=True)


#: Exit status of a process that has nothing to do here, and says why in its last line.
SKIPPED = 77


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-m", f"benchmarks.gpu.{name}", *arguments, "--seconds", "{seconds}"]
