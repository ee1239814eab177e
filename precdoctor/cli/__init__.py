"""The command line. Only :func:`main` prints errors and turns them into exit statuses."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from precdoctor.errors import INTERRUPTED, PrecdoctorError, UsageError, did_you_mean

#: Exit status of a process killed by SIGPIPE, as shells report it; distinct from every verdict.
BROKEN_PIPE = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Errors about a path that a user named, and what to do about them.
_OF_PATHS = {
    errno.EACCES: "check the permissions of it and of the directories above it",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "check the symbolic links in it",
    errno.EROFS: "choose a path in a file system that may be written to",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; see docs/exit-codes.md."""
    _occupy_closed_streams()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except PrecdoctorError as error:
        return _say(error, error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except MemoryError:
        return _say("there is not enough memory for this", PrecdoctorError.exit_code)
    except Exception as error:  # noqa: BLE001 - a defect of precdoctor: shown with its traceback, never as a verdict
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _discard_output()
            return _say(f"the output cannot be written: {error.strerror}", PrecdoctorError.exit_code)
        if isinstance(error, OSError) and error.filename is not None and (hint := _OF_PATHS.get(error.errno or 0)):
            return _say(f"{error.filename}: {error.strerror}; {hint}", PrecdoctorError.exit_code)
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] != "precdoctor":
            return _say(f"a package that precdoctor needs cannot be imported: {error}", PrecdoctorError.exit_code)
        import traceback

        traceback.print_exc()
        return _say("this is a defect of precdoctor: please report it with the lines above", PrecdoctorError.exit_code)


def _discard_output() -> None:
    """Redirect stdout to /dev/null, because the interpreter flushes it at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _occupy_closed_streams() -> None:
    """Open /dev/null for standard streams that were closed (``>&-``), so that no file we open becomes stdout.

    A recorded command still finds them closed, because these descriptors are not inherited.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is ``number``
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def _run(args: list[str]) -> int:
    if sys.platform == "win32":
        raise UsageError("precdoctor runs on Linux and macOS; on Windows use it inside WSL")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that stdout cannot encode must not raise
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory has been removed; cd to one that is there") from None
    import typer

    from precdoctor.cli.app import app, command

    if "_PRECDOCTOR_COMPLETE" in os.environ:  # the shell asks for completions
        app()
    # ClickException: from 0.20 on typer has its own copy of click, so the class is found through BadParameter.
    click_exception: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        with command.make_context("precdoctor", args) as context:
            return command.invoke(context) or 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except click_exception as error:
        raise UsageError(_sentence(error)) from None


def _sentence(error: Exception) -> str:
    """The message of a click error: with a suggestion for a misspelled option or command, and where to find help."""
    message: str = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "precdoctor"
    if context is not None and (flag := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        flags = _flags(context.command)
        if flag in _flags(context.find_root().command):
            return f"{flag} comes before the command: precdoctor {flag} {context.command.name}"
        message = f"no such option: {flag}{did_you_mean(flag, flags)}"
    elif context is not None and (unknown := re.match(r"No such command '(.*?)'", message)):
        if unknown[1].endswith(".py"):
            return f"no such command: {unknown[1]}; to record it, type: precdoctor record -- python {unknown[1]}"
        message = f"no such command: {unknown[1]}{did_you_mean(unknown[1], context.command.list_commands(context))}"
    return f"{message}{'' if message.endswith('?') else ';'} see {path} --help"


def _flags(command: Any) -> list[str]:
    return [name for parameter in command.params for name in parameter.opts if name.startswith("--")]


def _say(message: object, status: int) -> int:
    from precdoctor.cli.common import say

    say(f"precdoctor: {message}")
    return status
