"""How the recorded command ended: exit status, signal, exception, or stopped by precdoctor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precdoctor.diagnosis.survey.view import RunView
    from precdoctor.runlog.reader import Run

#: Signals whose numbers are the same on every system, because a log may be read on another one.
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    8: "SIGFPE",
    9: "SIGKILL, from outside or for want of memory",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}


#: Messages of torch's index errors, and what they mean for the batch.
_OUT_OF_RANGE = (
    (re.compile(r"Target -?\d+ is out of bounds"), "A label is outside 0 to C-1, where C is the number of classes"),
    (re.compile(r"index out of range in self"), "An index is outside the rows it selects from, as of an embedding"),
)
#: Most characters of an exception's message that are printed.
_LONGEST = 160


def facts_of_end(view: RunView) -> dict[str, Any]:
    """Return :func:`end_of_run`, and ``stopped`` (the reason) if precdoctor ended the run."""
    facts = end_of_run(view.run)
    return facts if view.stopped is None else {**facts, "stopped": view.stopped}


def end_of_run(run: Run) -> dict[str, Any]:
    """Return ``exit_status`` and, if an exception ended the command, ``exception``; empty if running or unknown."""
    status = run.info.get("exit_status")
    if not isinstance(status, int) or isinstance(status, bool):
        return {}
    facts: dict[str, Any] = {"exit_status": status}
    raised = [found for rank in run.ranks if (found := (rank.end or {}).get("exception"))] if status else []
    if raised:  # errors of torch.distributed come last: a rank that lost its peers does not know why
        facts["exception"] = min(raised, key=lambda found: str(found["type"]).lstrip("_").startswith("Dist"))
    return facts


def failed(run: Mapping[str, Any]) -> bool:
    """Return whether the command ended with a status other than 0 (exception, signal, ``sys.exit(1)``).

    False if precdoctor stopped it.
    """
    return not run.get("stopped") and isinstance(run.get("exit_status"), int) and run["exit_status"] != 0


def ending(run: Mapping[str, Any], who: str = "the command") -> str | None:
    """Return ``The command ended with status 137 (SIGKILL ...)``, without a full stop; None for a normal end.

    Args:
        run: facts of a run, including those of :func:`facts_of_end`.
        who: subject of the sentence.
    """
    stopped, status = run.get("stopped"), run.get("exit_status")
    who = who[:1].upper() + who[1:]
    if stopped:
        return f"{who} was stopped by precdoctor: {stopped}"
    if not failed(run):
        return None
    assert isinstance(status, int)
    signal = _SIGNALS.get(status - 128)
    raised = run.get("exception")
    cause = f" ({signal})" if signal else f", {_exception_words(raised)}" if isinstance(raised, Mapping) else ""
    return f"{who} ended with status {status}{cause}"


def _exception_words(exception: Mapping[str, Any]) -> str:
    """Return ``IndexError at train.py:65: Target 96 is out of bounds``, and the meaning of well-known messages."""
    place = f" at {exception['file']}:{exception['line']}" if exception.get("file") else ""
    lines = str(exception.get("message") or "").strip().splitlines()
    message = lines[0].strip().rstrip(".") if lines else ""
    message = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 1]}…"
    meaning = next((f". {means}" for pattern, means in _OUT_OF_RANGE if pattern.fullmatch(message)), "")
    return f"{exception['type']}{place}" + (f": {message}{meaning}" if message else "")
