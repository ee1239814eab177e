"""Prints the head of a report: the run's directory, its command and size, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.ending import ending
from precdoctor.reporting.text import clean, number


def print_head(run: Mapping[str, Any], console: Console, question: str = "") -> None:
    """Print the run's directory, its facts, and ``question``."""
    console.print(Text(clean(run.get("path", "")), "pd.strong"), soft_wrap=True)
    console.print(Text(run_facts(run)))
    if question:
        console.print(Text.assemble("\n", (question, "pd.strong")))


def run_name(path: Path) -> str:
    """The name of a run directory; its parent's if it is called ``run``."""
    path = path.resolve()
    return clean(path.parent.name if path.name == "run" else path.name, 120)


def print_ending(run: Mapping[str, Any], console: Console) -> None:
    """Print how the command ended, if it failed."""
    if end := ending(run):
        console.print(Text(f"{clean(end)}.", "pd.near"))


def command_words(run: Mapping[str, Any], limit: int) -> str:
    """The command without the directory of its interpreter: ``python train.py``; empty if unknown."""
    command = run.get("command")
    if not isinstance(command, (list, tuple)) or not command:
        return ""
    return clean(" ".join([str(command[0]).rsplit("/", 1)[-1], *map(str, command[1:])]), limit)


def run_facts(run: Mapping[str, Any]) -> str:
    """Command, steps, ranks, device and state of a run: ``python train.py; steps 0–37, 1 rank; not closed cleanly``."""
    command = command_words(run, 160)
    facts = [command] if command else []
    counts = []
    steps, sampled = run.get("steps"), run.get("sampled_steps")
    if isinstance(steps, int):
        first, last = run.get("first_step"), run.get("last_step")
        counts.append(f"steps {first}–{last}" if isinstance(first, int) and first != last else plural(steps, "step"))
        if isinstance(sampled, int) and sampled != steps:
            counts.append(f"{number(sampled)} with full statistics")
    if isinstance(before := run.get("steps_before"), Mapping):
        made = (f"{plural(n, 'step')} of {clean(name)}" for name, n in before.items())
        counts.append(f"resumed after {' and '.join(made)}")
    ranks, processes = run.get("ranks"), run.get("attempts")
    if isinstance(ranks, int):
        counts.append(plural(ranks, "rank"))
        if isinstance(processes, int) and processes > ranks:  # restarted, or several processes with the same rank
            counts.append(f"{number(processes)} processes")
    device = run.get("device")
    if isinstance(device, Mapping):
        kind, name = device.get("type"), device.get("name")
        device = kind if kind == "cpu" or not name else f"{kind} ({name})"
    if device:
        counts.append(clean(device, 60))
    facts += [", ".join(counts)] if counts else []
    if isinstance(run.get("applied"), int):
        facts.append(f"changed by --apply ({plural(run['applied'], 'prescription')})")
    if run.get("complete") is False:
        why = "" if isinstance(run.get("exit_status"), int) else " (killed, out of disk space, or still running)"
        facts.append(f"not closed cleanly{why}")
    if run.get("cut_short"):
        facts.append(f"recorded no further: {clean(run['cut_short'], 160)}")
    return "; ".join(facts)
