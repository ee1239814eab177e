"""Explains from attach.jsonl why no process of a command recorded anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Explanation by event; the event that comes latest in a process first. ``transform`` is ``model`` with a message.
_FURTHEST = {
    "armed": "a process began to record, but its directory is gone",
    "left out": "no process has a rank that --ranks names",
    "backward": "a backward pass ran, but the process was killed before its first optimizer step",
    "transform": "a model was called inside torch.func, where tensors and gradients cannot be followed, and neither "
    "`backward` nor an optimizer of torch's ran outside of it",
    "model": "a model was called, but no backward pass and no optimizer step was seen; "
    "`precdoctor record --inference` records runs that only call models",
    "torch": "torch was imported, but no module was ever called and no optimizer stepped",
    "boot": "the command never imported torch",
}
_NOTHING = (
    "no Python process of the command loaded precdoctor: its interpreter has no precdoctor installed "
    "(install it there), or a launcher dropped the environment variable PRECDOCTOR_RUN"
)


def why_nothing_attached(notes: Sequence[Mapping[str, Any]]) -> str:
    """The likely reason that no process of a command recorded anything.

    ``notes`` are the objects in attach.jsonl; ``precdoctor._attach_file.note`` lists their events.
    """
    events = {note.get("event") for note in notes}
    if any(note.get("event") == "model" and note.get("message") for note in notes):
        events.add("transform")
    for note in notes:
        if note.get("event") == "error":
            return f"the recorder could not start in {note.get('executable')}: {note.get('message')}"
    return next((why for event, why in _FURTHEST.items() if event in events), _NOTHING)
