"""The parent of a recorded run: starts the command, passes signals on, and closes the log when the command has ended.

It never imports torch. Terminal, stdin, stdout and every other inherited file belong to the child. A signal to the
whole process group, as a terminal sends it, reaches the child directly; a signal to this process alone is passed on.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precdoctor._attach_file import ATTACH_FILE
from precdoctor.errors import CorruptRunError, RunUnreadableError, UsageError
from precdoctor.recording.options import OPTIONS_VARIABLE, RUN_VARIABLE, RecordOptions
from precdoctor.recording.process.attach import STOPPED_BY_US, say
from precdoctor.recording.process.group_signal_probe import Bystander, bystander
from precdoctor.recording.process.supervise import Online, Supervisor
from precdoctor.runlog.attachment import why_nothing_attached
from precdoctor.runlog.documents import END
from precdoctor.runlog.files import END_FILE
from precdoctor.runlog.layout import add_run_facts, create_run, left_open, rank_directories, read_json_if_there
from precdoctor.runlog.shell import quoted_path

_BOOT_PATH = Path(__file__).resolve().parents[1] / "boot_path"
_FROM_TERMINAL = frozenset((signal.SIGINT, signal.SIGQUIT)) if os.name == "posix" else frozenset()
_WATCHED = _FROM_TERMINAL | (
    {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2} if os.name == "posix" else set()
)
#: Signals that Python ignores; a program started by a shell has their default actions.
_DEFAULT_IN_CHILD = (signal.SIGPIPE, signal.SIGXFSZ) if os.name == "posix" else ()
#: File action that makes a child write its stdout to our stderr.
_ASIDE = ((os.POSIX_SPAWN_DUP2, 2, 1),) if os.name == "posix" else ()
_SI_USER_CODES = frozenset((0, -1, -6))  # SI_USER, SI_QUEUE, SI_TKILL: sent by a process, not by the terminal


def command_line(arguments: Sequence[str], module: str | None) -> list[str]:
    """Return the command to run: ``-m pkg.train``, a bare ``train.py`` (both with this Python), or anything as given.

    Raises:
        UsageError: there is no command, or its program or script does not exist.
    """
    if module is not None:
        return [sys.executable, "-m", module, *arguments]
    if not arguments:
        raise UsageError("nothing to record; type what you would run, as in: precdoctor record -- python train.py")
    first = arguments[0]
    if first.endswith(".py"):
        _require_script(first)
        return [sys.executable, *arguments]
    if shutil.which(first) is None:
        raise UsageError(_why_no_program(first))
    if re.fullmatch(r"(python|pypy)[\d.]*", Path(first).name) and len(arguments) > 1 and arguments[1].endswith(".py"):
        _require_script(arguments[1])
    return list(arguments)


def _require_script(script: str) -> None:
    if not Path(script).exists():
        advice = "leave out the quotes" if " " in script else "check the path"
        raise UsageError(f"no script {script!r} in {Path.cwd()}; {advice}")


def _why_no_program(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        return f"{name!r} is a directory; name a program or a script, as in: precdoctor record -- python train.py"
    if path.is_file() and os.sep in name:
        return f"{name!r} is not executable; make it so with chmod +x, or put its interpreter before it"
    return f"no program named {name!r} was found; check the spelling or give its path"


def default_run_directory(command: Sequence[str], now: dt.datetime | None = None) -> Path:
    """Return ``precdoctor-runs/<script>-<utc>-<pid>``; ``now`` defaults to the current time."""
    now = now or dt.datetime.now(dt.timezone.utc)
    names = [a for a in command[1:] if a.endswith(".py")]
    following = [command[i + 1] for i, a in enumerate(command[:-1]) if a == "-m"]
    stem = Path(names[0]).stem if names else (following[0] if following else Path(command[0]).name)
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", stem).strip("-.") or "run"
    return Path("precdoctor-runs") / f"{stem}-{now:%Y%m%dT%H%M%SZ}-{os.getpid()}"


def launch(
    command: Sequence[str],
    run: Path | None,
    options: RecordOptions,
    *,
    force: bool = False,
    shared: bool = False,
    applied: Mapping[str, Any] | None = None,
    online: Online | None = None,
    quiet: bool = False,
    aside: bool = False,
) -> int:
    """Record a command.

    Args:
        command: program and arguments, see :func:`command_line`.
        run: the run directory to make; by default a new one under ``precdoctor-runs``.
        options: recorder options.
        force: replace an existing run directory.
        shared: let other users read the run directory, as far as the umask allows.
        applied: origin and predicted effect of ``options.apply``, for run.json.
        online: rules to run while the command runs.
        quiet: do not print what was recorded, because the caller does.
        aside: send the command's stdout to stderr, because the caller writes a report to stdout.

    Returns:
        The child's exit status; 128 + n if signal n ended it; 66 if the recorder stopped the run.

    Raises:
        UsageError: not on Linux or macOS, the directory cannot be written, or the command cannot be started.
        RunExistsError: the directory exists and ``force`` was not given.
    """
    if os.name != "posix":
        raise UsageError("precdoctor record runs on Linux and macOS; on Windows use WSL")
    now = dt.datetime.now(dt.timezone.utc)
    directory = (run or default_run_directory(command, now)).absolute()
    extra_facts = {"pid": os.getpid(), **({} if applied is None else {"applied": applied})}
    create_run(directory, {**run_facts(command, options, now), **extra_facts}, force=force, shared=shared)
    environment = {**os.environ, RUN_VARIABLE: str(directory), OPTIONS_VARIABLE: options.to_json()}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_BOOT_PATH), os.environ.get("PYTHONPATH"))))
    supervisor = Supervisor(online, directory) if online is not None else None
    with _held(directory):
        try:
            spawn = functools.partial(
                os.posix_spawnp,
                command[0],
                list(command),
                environment,
                file_actions=_ASIDE if aside else (),
                setsigdef=_DEFAULT_IN_CHILD,
            )
            status = _run_child(spawn, supervisor.start if supervisor is not None else lambda: None)
        except OSError as error:
            _remove_unused(directory)
            raise UsageError(f"cannot start {command[0]!r}: {error.strerror or error}") from error
        if supervisor is not None:
            supervisor.finish()
        return _close(directory, status, quiet=quiet)


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Hold the lock of the run directory: ``watch`` reports that this process is gone once the lock is free."""
    from precdoctor.runlog.lock import DirectoryLock  # not on Windows

    lock = None
    with contextlib.suppress(OSError):
        lock = DirectoryLock(directory)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _remove_unused(directory: Path) -> None:
    with contextlib.suppress(OSError):  # an empty run does no harm
        for entry in directory.iterdir():
            entry.unlink()
        directory.rmdir()


def run_facts(command: Sequence[str], options: RecordOptions, now: dt.datetime) -> dict[str, object]:
    """Return the content of run.json at the beginning of a run."""
    return {
        "command": [command[0], "..."] if options.redact_names else list(command),
        "cwd": None if options.redact_names else str(Path.cwd()),
        "started": now.isoformat(),
        "host": {
            "platform": platform.system() if options.redact_names else platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "name": None if options.redact_names else platform.node(),
        },
        "python": platform.python_version(),
        "bit_neutral": options.bit_neutral,
        "options": json.loads(options.to_json()),
    }


# --- the child -------------------------------------------------------------------------------------------------------


def _run_child(spawn: Callable[..., int], started: Callable[[], None]) -> int:
    """Start the command, wait for it and pass signals on. Return its exit status as a shell reports it.

    The watched signals are blocked here and fetched one by one, which shows who sent each. The child gets the original
    signal mask and all inherited files; ``subprocess`` would close all but three of them.

    Args:
        spawn: starts the command and returns the child's process number; takes further arguments of ``posix_spawnp``.
        started: called once the child runs, with the watched signals blocked.

    Raises:
        OSError: the command cannot be started.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return _run_child_with_handlers(spawn, started)
    watched = {*_WATCHED, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # our parent may have set SIG_IGN: then no status is kept
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    probe = bystander(_WATCHED)
    try:
        child = spawn(setsigmask=previous)
        started()
        while (status := _exit_status(child)) is None:
            info = signal.sigwaitinfo(watched)
            if info.si_signo != signal.SIGCHLD and _for_us_alone(info, probe):
                _send(child, info.si_signo)
        while signal.sigtimedwait(watched, 0) is not None:
            pass  # sent to the child, which is gone; unblocked they would end us with the log still open
    finally:
        if probe is not None:
            probe.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return status


def _for_us_alone(info: signal.struct_siginfo, probe: Bystander | None) -> bool:
    """Return whether a signal went to this process only, so that the child has not got it."""
    if probe is not None and probe.reached_group(info.si_signo):
        return False
    return info.si_signo not in _FROM_TERMINAL or info.si_code in _SI_USER_CODES


def _exit_status(child: int) -> int | None:
    """Return the child's exit status as a shell reports it; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return _shell_status(status) if pid else None


def _shell_status(status: int) -> int:
    """Return a wait status as a shell reports it: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _send(child: int, number: int) -> None:
    """Send a signal to the child. Its process number cannot be reused before we have waited for it."""
    with contextlib.suppress(OSError):  # it may run as another user by now
        os.kill(child, number)


def _run_child_with_handlers(spawn: Callable[..., int], started: Callable[[], None]) -> int:
    """Like :func:`_run_child`, without ``sigwaitinfo`` (macOS): interrupts are left to the terminal."""
    children: list[int] = []

    def forward(number: int, _frame: object) -> None:
        for child in children:
            _send(child, number)

    def leave_to_the_terminal(_number: int, _frame: object) -> None:
        pass

    previous = {}
    for number in _WATCHED:
        if signal.getsignal(number) != signal.SIG_IGN:  # with SIG_IGN set here, the child would inherit it
            handler = leave_to_the_terminal if number in _FROM_TERMINAL else forward
            previous[number] = signal.signal(number, handler)
    try:
        child = spawn()
        children.append(child)
        started()
        _, status = os.waitpid(child, 0)
        children.clear()
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)
    return _shell_status(status)


# --- closing the log -------------------------------------------------------------------------------------------------


def _close(directory: Path, status: int, *, quiet: bool) -> int:
    """Seal what the child left open; print what was recorded and what to type next. Return the status to exit with."""
    shown = quoted_path(_shown(directory))
    with contextlib.suppress(OSError, CorruptRunError):  # reports then lack how the run ended
        ended = dt.datetime.now(dt.timezone.utc).isoformat()
        add_run_facts(directory, {"ended": ended, "exit_status": status})
    try:
        ranks = rank_directories(directory)
        if any(map(left_open, ranks)):
            from precdoctor.runlog.sealing import seal  # imports pyarrow, which takes longer than all the rest

            seal(directory)
    except OSError as error:
        if not directory.is_dir():
            say(f"the run directory {shown} is gone, and with it what was recorded{_ended_with(status)}")
            return status
        say(f"the log in {shown} could not be closed ({error.strerror or error}); what was flushed is still readable")
        return status
    if ranks and quiet:
        return status
    if not ranks:
        say(f"nothing was recorded: {why_nothing_armed(directory)}{_ended_with(status)}")
        return status
    ends = [_end(rank.path) for rank in ranks]
    stepped = any(True for rank in ranks for _ in rank.path.glob("steps-*"))
    if not stepped and all(end.get("reason") == "exit" for end in ends):
        say(f"no training step was recorded in {shown}: no optimizer stepped{_ended_with(status)}")
        return status
    stop_message = next((end["message"] for end in ends if end.get("message")), None)
    remark = f" (until it stopped early: {stop_message})" if stop_message else ""
    say(f"recorded {len(ranks)} {'process' if len(ranks) == 1 else 'processes'} in {shown}{remark}; next, type:")
    say(f"precdoctor diagnose {shown}", prefix="  ")
    return STOPPED_BY_US if any(end.get("reason") == "stopped" for end in ends) else status


def _shown(directory: Path) -> str:
    """Return the run directory as the user can type it: relative if it is below the working directory."""
    try:
        shown = os.path.relpath(directory)
    except OSError:
        return str(directory)
    return str(directory.resolve()) if shown.startswith("..") else shown


def _ended_with(status: int) -> str:
    return f" (the command itself ended with status {status})" if status else ""


def _end(rank: Path) -> dict[str, Any]:
    try:
        return read_json_if_there(rank / END_FILE, END) or {}
    except (OSError, RunUnreadableError):
        return {}


def why_nothing_armed(directory: Path) -> str:
    """Return the likely reason that no process recorded anything, from the stages each one reached."""
    return why_nothing_attached(list(_notes(directory)))


def _notes(directory: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the complete lines of the attach file."""
    try:
        lines = (directory / ATTACH_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if isinstance(note, dict):
            yield note
