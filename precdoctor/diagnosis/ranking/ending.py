"""How the recorded command ended, as far as the run knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precdoctor.diagnosis.survey.view import RunView

#: Signals whose numbers are the same on every system; a log may be read on another one.
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


def facts_of_end(view: RunView) -> dict[str, Any]:
    """``exit_status``, and ``stopped`` (why) of a run that precdoctor ended; empty while it goes on, or if unknown."""
    status = view.run.info.get("exit_status")
    facts: dict[str, Any] = {"exit_status": status} if isinstance(status, int) and not isinstance(status, bool) else {}
    return facts if view.stopped is None else {**facts, "stopped": view.stopped}


def ending(run: Mapping[str, Any], who: str = "the command") -> str | None:
    """``The command ended with status 137 (SIGKILL ...)``, without a full stop; None for an end like any other.

    Args:
        run: facts of a run that hold :func:`facts_of_end`.
        who: ended.
    """
    stopped, status = run.get("stopped"), run.get("exit_status")
    who = who[:1].upper() + who[1:]
    if stopped:
        return f"{who} was stopped by precdoctor: {stopped}"
    if not isinstance(status, int) or status == 0:
        return None
    signal = _SIGNALS.get(status - 128)
    return f"{who} ended with status {status}" + (f" ({signal})" if signal else "")
