"""Between the terminal and the command the parent must not be felt: status, streams, files, signals."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import precdoctor
from tests.support.processes import PATIENCE, PYTHON, environment, finish, record, record_command, script, start

#: Writes down the signals it gets until it is told to go on through a file, and shows what it finds.
LISTENER = """
import os, pathlib, signal, sys, time

got = []
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
print("tty", [os.isatty(n) for n in range(3)], flush=True)
print("blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)
print("ready", os.getpid(), flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
time.sleep(0.5)  # a second delivery of the same signal would come now
print("got", got, flush=True)
sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path):
    script(tmp_path, "listener.py", LISTENER)
    return tmp_path


def wait_for(process: subprocess.Popen, word: bytes) -> bytes:
    seen = b""
    while word not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


@pytest.mark.parametrize("status", [0, 1, 66, 255])
def test_the_exit_status_is_the_commands(tmp_path, status):
    run = record(tmp_path, "--", "python", "-c", f"raise SystemExit({status})")
    assert run.status == status
    assert precdoctor.open_run(run.run).info["exit_status"] == status


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGABRT"])
def test_a_command_ended_by_a_signal_gives_128_and_its_number(tmp_path, name):
    number = getattr(signal, name)
    run = record(tmp_path, "--", "python", "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert run.status == 128 + number
    assert precdoctor.open_run(run.run).info["exit_status"] == 128 + number
    assert f"(the command itself ended with status {128 + number})" in run.said[0]


def test_stdin_and_stdout_pass_byte_for_byte(tmp_path):
    given = os.urandom(1 << 20)
    run = record(tmp_path, "--", "cat", stdin=given)
    assert run.out == given


def test_files_the_shell_opened_stay_open(tmp_path):
    """`record -- python train.py 3>log --data <(zcat ...)`."""
    read, write = os.pipe()
    command = record_command(tmp_path / "run", "--", "python", "-c", f"import os; os.write({write}, b'through')")
    run = finish(start(tmp_path, command, pass_fds=[write]), tmp_path / "run")
    os.close(write)
    assert run.status == 0, run.err
    assert os.read(read, 100) == b"through"
    os.close(read)


def test_a_closed_pipe_ends_the_command_as_it_would_without_us(tmp_path):
    """SIGPIPE is at its default in the child, though Python ignores it."""
    command = record_command(tmp_path / "run", "--", "sh", "-c", "kill -PIPE $$; echo survived")
    run = finish(start(tmp_path, command), tmp_path / "run")
    assert (run.status, run.out) == (128 + signal.SIGPIPE, b"")


SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT")


def other(name: str) -> str:
    return "SIGUSR2" if name == "SIGUSR1" else "SIGUSR1"


def listening(folder: Path, *names: str) -> subprocess.Popen:
    """A recorded listener in a process group of its own."""
    script(folder, "listener.py", LISTENER)
    return start(folder, record_command(folder / "run", "listener.py", *names), start_new_session=True)


def results(running: dict[Path, subprocess.Popen]) -> dict[str, tuple[bytes, int]]:
    """What each listener printed, and its status, once it is told to go on."""
    for folder in running:
        (folder / "go").touch()
    ended = {folder.name: finish(process, folder / "run") for folder, process in running.items()}
    return {name: (run.out, run.status) for name, run in ended.items()}


def test_a_signal_sent_to_the_parent_reaches_the_command_once(tmp_path):
    running = {tmp_path / name: listening(tmp_path / name, name) for name in SIGNALS}
    for folder, process in running.items():
        assert b"blocked []" in wait_for(process, b"ready")
        process.send_signal(getattr(signal, folder.name))
    assert results(running) == {name: (f"got ['{name}']\n".encode(), 7) for name in SIGNALS}


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(True, id="parent first, as timeout does"),
        pytest.param(False, id="the group", marks=pytest.mark.slow),
    ],
)
def test_a_signal_sent_to_the_process_group_reaches_the_command_once(tmp_path, first):
    running = {tmp_path / name: listening(tmp_path / name, name, other(name)) for name in SIGNALS}
    for folder, process in running.items():
        wait_for(process, b"ready")
        if first:
            process.send_signal(getattr(signal, folder.name))
        os.killpg(process.pid, getattr(signal, folder.name))
    time.sleep(0.3)
    for folder, process in running.items():
        process.send_signal(getattr(signal, other(folder.name)))  # for the parent alone
    assert results(running) == {name: (f"got ['{name}', '{other(name)}']\n".encode(), 7) for name in SIGNALS}


@pytest.mark.slow
def test_signals_for_everybody_do_not_hide_each_other(folder):
    names = ["SIGUSR1", "SIGUSR2", "SIGHUP"]
    process = start(folder, record_command(folder / "run", "listener.py", *names), start_new_session=True)
    wait_for(process, b"ready")
    for name in names:
        os.killpg(process.pid, getattr(signal, name))
    (folder / "go").touch()
    run = finish(process, folder / "run")
    assert sorted(ast.literal_eval(run.out.decode().removeprefix("got "))) == sorted(names)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_nobody_stays_behind_a_parent_that_is_killed(folder):
    process = start(folder, record_command(folder / "run", "listener.py"), start_new_session=True)
    command = int(wait_for(process, b"ready").split()[-1])
    process.kill()
    os.kill(command, signal.SIGKILL)
    run = finish(process, folder / "run")  # whoever else held its files would keep this waiting
    assert run.status == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE
    while alive_in(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive_in(process.pid) == []


def alive_in(group: int) -> list[str]:
    """The processes of a group, less those that are dead and wait for somebody to ask how they ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = file.parent.name, file.read_text().rpartition(")")[2].split()
            if rest[0] != "Z" and int(rest[2]) == group:
                found.append(pid)
    return found


def test_sigterm_ends_command_and_parent_with_143(folder):
    process = start(folder, record_command(folder / "run", "listener.py"))
    wait_for(process, b"ready")
    process.terminate()
    run = finish(process, folder / "run")
    assert run.status == 128 + signal.SIGTERM
    assert len(run.said) == 1


# --- a terminal -------------------------------------------------------------------------------------------------------


def at_a_terminal(folder, *arguments: str) -> subprocess.Popen:
    """`record` in a terminal of its own: what is written to the process is typed there."""
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    return start(folder, [PYTHON, "-c", spawn, *record_command(folder / "run", *arguments)], environment(TERM="dumb"))


def test_the_terminal_is_the_commands_and_ctrl_c_reaches_it_once(folder):
    process = at_a_terminal(folder, "listener.py", "SIGINT")
    seen = wait_for(process, b"ready")
    assert b"tty [True, True, True]" in seen
    process.stdin.write(b"\x03")
    process.stdin.flush()
    time.sleep(0.2)
    (folder / "go").touch()
    run = finish(process, folder / "run")
    assert b"got ['SIGINT']" in run.out
    assert run.status == 7
    assert b"nothing was recorded" in run.out  # stderr is the terminal, too


def test_ctrl_c_ends_a_command_that_does_not_catch_it_with_130(folder):
    process = at_a_terminal(folder, "listener.py")
    wait_for(process, b"ready")
    process.stdin.write(b"\x03")
    process.stdin.flush()
    run = finish(process, folder / "run")
    assert run.status == 130
    assert b"KeyboardInterrupt" in run.out  # the command's own
    assert run.out.count(b"precdoctor: ") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS cannot tell who sent an interrupt")
def test_without_sigwaitinfo_handlers_do(folder, monkeypatch):
    """What macOS gets, run here."""
    begin = "import signal; del signal.sigwaitinfo\n"
    command = record_command(folder / "run", "listener.py", "SIGTERM", "SIGUSR1")
    command[2] = begin + command[2]
    process = start(folder, command)
    wait_for(process, b"ready")
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGINT)  # left to the terminal
    (folder / "go").touch()
    run = finish(process, folder / "run")
    assert (run.status, run.out) == (7, b"got ['SIGUSR1']\n")
