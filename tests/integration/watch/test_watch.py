"""`precdoctor watch` on a terminal of its own: it appears, follows, tells of a death, quits, and leaves nothing behind.

The log is written by this process or a child; the terminal is a pseudo-terminal. Nothing waits for a time to pass: a
reader waits for text to appear, and gives up only when the program is certain to hang.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from precdoctor.runlog import RankWriter, create_rank_directory, create_run
from tests.support.runs import columns_of, write_run

ROOT = Path(__file__).resolve().parents[3]
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"
GIVE_UP = 120.0


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments, rows=24, columns=80, cwd=None):
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.said = ""
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
        for name in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "precdoctor", "watch", *map(str, arguments)],
            stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=cwd, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, *wanted):
        """Everything said since the last call, up to a moment at which all of it holds ``wanted``."""
        said, until = "", time.monotonic() + GIVE_UP
        while not all(w in plain(said) or w in said for w in wanted):
            assert time.monotonic() < until, f"no {wanted} in {plain(said)[-3000:]}"
            if select.select([self.master], [], [], 1.0)[0]:
                try:
                    said += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # closed by the other side
                    assert all(w in plain(said) or w in said for w in wanted), plain(said)[-3000:]
        self.said += said
        return plain(said)

    def type(self, keys):
        os.write(self.master, keys.encode())

    def end(self):
        """The exit status; the terminal must be as it was."""
        status = self.process.wait(GIVE_UP)
        with contextlib.suppress(OSError):
            while select.select([self.master], [], [], 0)[0]:
                self.said += os.read(self.master, 65536).decode(errors="replace")
        assert termios.tcgetattr(self.slave) == self.before
        assert self.said.count(ENTER) == self.said.count(LEAVE) == 1
        assert self.said.rindex(LEAVE) > self.said.rindex("quits") and SHOW_CURSOR in self.said
        return status

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    made = []

    def make(*arguments, **options):
        made.append(Terminal(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def write(writer, step, **row):
    tensors = [{"step": step, "module": "blocks.0.proj", "dtype": "float16", "numel": 8, "amax": 500.0, **row}]
    writer.append("tensors", columns_of("tensors", tensors), 1)
    loss = float("nan") if row.get("nan") else 1.0 / (1 + step)
    steps = [{"step": step, "loss": loss, "loss_scale": 2.0**12, "non_finite": int("nan" in row)}]
    writer.append("steps", columns_of("steps", steps), 1)


@pytest.fixture
def growing(tmp_path):
    import platform

    path = tmp_path / "growing"
    create_run(path, {"command": ["python", "train.py"], "host": {"name": platform.node()}})
    return path


def test_it_appears_follows_and_quits(terminal, growing):
    screen = terminal(growing, "--interval", "0.1")
    assert "train.py" in screen.read_until("starting", "q quits", "not judged yet")
    writer = RankWriter(create_rank_directory(growing, 0))
    write(writer, 0)
    assert "2^12" in screen.read_until("running", "step 0", "blocks.0.proj output", "2^7 ")
    screen.read_until("as of step 0")
    screen.resize(40, 120)
    write(writer, 1, nan=3)
    screen.read_until("step 1", "NaN/Inf", "1 non-finite step")
    writer.close({"reason": "exit"})
    found = screen.read_until("ended", "as of step 1", "PD101")
    assert "ERROR" in found
    screen.type("q")
    screen.read_until("next, type:", "precdoctor diagnose")
    assert screen.end() == 0


@pytest.mark.parametrize(
    ("ending", "status"),
    [("\x03", 130), ("Q", 0), (signal.SIGTERM, 128 + signal.SIGTERM)],
    ids=["ctrl-c", "Q", "SIGTERM"],
)
def test_whatever_ends_it_the_terminal_is_as_it_was(terminal, growing, ending, status):
    screen = terminal(growing)
    screen.read_until("q quits")
    screen.type(ending) if isinstance(ending, str) else screen.process.send_signal(ending)
    assert screen.end() == status
    assert "Traceback" not in screen.said


DYING = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from precdoctor.runlog import RankWriter, create_rank_directory
from tests.support.runs import columns_of
writer = RankWriter(create_rank_directory(Path(sys.argv[1]), 0))
writer.append("steps", columns_of("steps", [{"step": 7, "loss": 0.5}]), 1)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_run_that_is_killed_is_told_and_what_there_was_stays(terminal, growing):
    child = subprocess.Popen(
        [sys.executable, "-c", DYING, str(growing), str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"written\n"
    screen = terminal(growing, "--interval", "0.1")
    screen.read_until("running", "step 7")
    child.kill()
    child.communicate()
    screen.read_until("died", "ended without closing the log", "step 7")
    screen.type("q")
    assert screen.end() == 0


def test_a_pipe_gets_a_line_per_interval_and_the_findings(growing):
    writer = RankWriter(create_rank_directory(growing, 0))
    write(writer, 0)
    watching = subprocess.Popen(
        [sys.executable, "-m", "precdoctor", "watch", str(growing), "--interval", "0.1"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        first = watching.stdout.readline()
        assert first.startswith("running: step 0, loss 1, loss scale 2^12, blocks.0.proj output 2^7 below its maximum")
        write(writer, 1, nan=3)
        lines = [watching.stdout.readline()]
        while not lines[-1].startswith("running: step 1, loss nan"):
            assert lines[-1].startswith("running: step 0") or lines[-1].startswith("ERROR"), lines
            lines.append(watching.stdout.readline())
        writer.close({"reason": "exit"})
        rest, said = watching.communicate(timeout=GIVE_UP)
    finally:
        watching.kill()
    said_in_all = [*lines, *rest.splitlines()]
    assert sum(line.startswith("ERROR PD101  ") for line in said_in_all) == 1
    assert sum(line.startswith("ended: step 1") for line in said_in_all) == 1
    assert watching.returncode == 0 and said == "" and ENTER not in rest


def test_a_watch_beside_a_record_that_is_killed_at_once_ends(tmp_path):
    command = [sys.executable, "-m", "precdoctor", "record", "-o", "run", "--", "sleep", "600"]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "start_new_session": True}
    recording = subprocess.Popen(command, **options)
    try:
        while not (tmp_path / "run/run.json").exists():
            assert recording.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(recording.pid, signal.SIGKILL)
        recording.wait()
    watch = [sys.executable, "-m", "precdoctor", "watch", "run", "--interval", "0.1"]
    done = subprocess.run(watch, **options, capture_output=True, text=True, timeout=GIVE_UP)
    assert done.stdout.endswith("died: `precdoctor record` was killed before anything was recorded\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_finished_healthy_run_into_a_pipe_ends_at_once(tmp_path):
    path = write_run(tmp_path / "run", steps=[{"step": s, "loss": 1.0} for s in range(3)])
    command = [sys.executable, "-m", "precdoctor", "watch", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=GIVE_UP)
    assert done.stdout == "ended: step 2, loss 1, closed its log\nno findings\n" and done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing"], "there is no run directory missing"),
        (["RUN", "--interval", "0"], "--interval takes seconds from 0.1 to 86400, such as 5; got '0'"),
        (["RUN", "--interval", "soon"], "got 'soon'"),
    ],
)
def test_a_mistake_is_one_sentence(growing, capsys, arguments, said):
    from precdoctor.cli import main

    assert main(["watch", *(str(growing) if a == "RUN" else a for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
