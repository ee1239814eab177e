"""The parent of a recorded run: starts the command, stays out of its way, and closes the log when it is gone.

It never imports torch. The terminal, stdin and stdout are the child's; signals a terminal sends reach the child by
themselves (they go to the whole foreground group), those sent to this process alone are passed on.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from precdoctor._boot import ATTACH_FILE
from precdoctor.errors import UsageError
from precdoctor.recording.options import OPTIONS_VARIABLE, RUN_VARIABLE, RecordOptions

#: Exit status of ``record`` when precdoctor itself stopped the run (DESIGN section 5).
STOPPED_BY_US = 66

_BOOT_PATH = Path(__file__).resolve().parent / "boot_path"
_FROM_TERMINAL = frozenset((signal.SIGINT, signal.SIGQUIT)) if os.name == "posix" else frozenset()
_WATCHED = _FROM_TERMINAL | (
    {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2} if os.name == "posix" else set()
)
_SI_USER_CODES = frozenset((0, -1, -6))  # SI_USER, SI_QUEUE, SI_TKILL: sent by a process, not by the terminal


def command_line(arguments: Sequence[str], module: str | None) -> list[str]:
    """The command to run: ``-m pkg.train``, a bare ``train.py`` (both with this Python), or anything else as it stands.

    Raises:
        UsageError: there is nothing to run, or the program or script is not there.
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
        raise UsageError(f"no program named {first!r} was found; check the spelling or give its path")
    if re.fullmatch(r"(python|pypy)[\d.]*", Path(first).name) and len(arguments) > 1 and arguments[1].endswith(".py"):
        _require_script(arguments[1])
    return list(arguments)


def _require_script(script: str) -> None:
    if not Path(script).is_file():
        raise UsageError(f"no script {script!r} in {Path.cwd()}; check the path")


def default_run_directory(command: Sequence[str], now: datetime.datetime) -> Path:
    """``precdoctor-runs/<script>-<utc>-<pid>``."""
    names = [a for a in command[1:] if a.endswith(".py")]
    following = [command[i + 1] for i, a in enumerate(command[:-1]) if a == "-m"]
    stem = Path(names[0]).stem if names else (following[0] if following else Path(command[0]).name)
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", stem).strip("-.") or "run"
    return Path("precdoctor-runs") / f"{stem}-{now:%Y%m%dT%H%M%SZ}-{os.getpid()}"


def launch(command: Sequence[str], run: Path | None, options: RecordOptions, *, force: bool = False) -> int:
    """Record a command.

    Args:
        command: program and arguments, see :func:`command_line`.
        run: the run directory to make; by default a new one under ``precdoctor-runs``.
        options: what to record.
        force: replace an existing run directory.

    Returns:
        The child's exit status; 128 + n when signal n ended it; 66 when the recorder stopped the run.

    Raises:
        UsageError: not on Linux or macOS, or the directory cannot be written.
        RunExistsError: the directory is taken and ``force`` was not given.
    """
    from precdoctor.runlog.layout import create_run

    if os.name != "posix":
        raise UsageError("precdoctor record runs on Linux and macOS; on Windows use WSL")
    now = datetime.datetime.now(datetime.timezone.utc)
    directory = (run or default_run_directory(command, now)).absolute()
    create_run(directory, _run_facts(command, options, now), force=force)
    environment = {**os.environ, RUN_VARIABLE: str(directory), OPTIONS_VARIABLE: options.to_json()}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_BOOT_PATH), os.environ.get("PYTHONPATH"))))
    try:
        status = _run_child(command, environment)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]!r}: {error.strerror}") from error
    return _close(directory, status)


def _run_facts(command: Sequence[str], options: RecordOptions, now: datetime.datetime) -> dict[str, object]:
    return {
        "command": [command[0], "..."] if options.redact_names else list(command),
        "cwd": None if options.redact_names else str(Path.cwd()),
        "started": now.isoformat(),
        "host": {
            "platform": platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "name": None if options.redact_names else platform.node(),
        },
        "python": platform.python_version(),
        "options": json.loads(options.to_json()),
    }


# --- the child -------------------------------------------------------------------------------------------------------


def _run_child(command: Sequence[str], environment: dict[str, str]) -> int:
    """Start the command, wait for it, pass signals on; its exit status as a shell would report it."""
    if not hasattr(signal, "sigwaitinfo"):
        return _run_child_with_handlers(command, environment)
    watched = {*_WATCHED, signal.SIGCHLD}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        child = subprocess.Popen(  # noqa: S603 -- running the user's command is the purpose
            command, env=environment, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        )
        while child.poll() is None:
            info = signal.sigwaitinfo(watched)
            if info.si_signo == signal.SIGCHLD:
                continue
            if info.si_signo not in _FROM_TERMINAL or info.si_code in _SI_USER_CODES:
                child.send_signal(info.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return _shell_status(child.returncode)


def _run_child_with_handlers(command: Sequence[str], environment: dict[str, str]) -> int:
    """For systems without ``sigwaitinfo`` (macOS), which cannot tell who sent an interrupt: it is left to the terminal."""
    child = subprocess.Popen(command, env=environment)  # noqa: S603 -- running the user's command is the purpose
    previous = {}
    for number in _WATCHED:
        handler = signal.SIG_IGN if number in _FROM_TERMINAL else lambda n, _frame: child.send_signal(n)
        previous[number] = signal.signal(number, handler)
    try:
        return _shell_status(child.wait())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _shell_status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


# --- afterwards ------------------------------------------------------------------------------------------------------


def _close(directory: Path, status: int) -> int:
    """Seal what the child left open, say what was recorded and what to type next; the status to exit with."""
    from precdoctor.recording.attach import say
    from precdoctor.runlog.layout import rank_directories
    from precdoctor.runlog.sealing import seal

    ranks = rank_directories(directory)
    if not ranks:
        say(f"nothing was recorded: {why_nothing_armed(directory, status)}")
        return status
    try:
        seal(directory)
    except OSError as error:
        say(f"the log could not be closed ({error.strerror}); what was flushed is still readable")
    shown = os.path.relpath(directory)
    shown = str(directory) if shown.startswith("..") else shown
    say(f"recorded {len(ranks)} {'process' if len(ranks) == 1 else 'processes'} in {shown}; next, type:")
    print(f"  precdoctor diagnose {shown}", file=sys.stderr)  # noqa: T201 -- the parent's closing lines
    stopped = any(_end_reason(rank.path) == "stopped" for rank in ranks)
    return STOPPED_BY_US if stopped else status


def _end_reason(rank: Path) -> str | None:
    from precdoctor.runlog.schema import END_FILE

    try:
        end = json.loads((rank / END_FILE).read_text())
    except (OSError, ValueError):
        return None
    reason = end.get("reason") if isinstance(end, dict) else None
    return reason if isinstance(reason, str) else None


def why_nothing_armed(directory: Path, status: int) -> str:
    """The likely reason that no process of the command recorded anything, from how far each one got."""
    try:
        lines = [json.loads(line) for line in (directory / ATTACH_FILE).read_text().splitlines()]
    except (OSError, ValueError):
        lines = []
    events = {line.get("event") for line in lines}
    errors = [line.get("message") for line in lines if line.get("event") == "error"]
    failed = f" (the command itself ended with status {status})" if status else ""
    if errors:
        return f"the recorder could not start: {errors[0]}{failed}"
    if "torch" in events:
        return f"torch was imported, but no module was ever called and no optimizer stepped{failed}"
    if "boot" in events:
        return f"the command never imported torch{failed}"
    return (
        "no Python process of the command loaded precdoctor: its interpreter has no precdoctor installed "
        f"(pip install precdoctor there), or a launcher dropped the environment variable {RUN_VARIABLE}{failed}"
    )
