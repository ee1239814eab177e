"""The dtypes in which each op computed, by module: the ``coverage`` facts of deep scans."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.analyses.op_facts import real
from precdoctor.diagnosis.analyses.scans import scan_events, short_name
from precdoctor.diagnosis.survey.rows import grouped, integer, text
from precdoctor.diagnosis.survey.view import RunView

_COUNTS = ("calls", "numel", "nan", "pos_inf", "neg_inf")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class OpDtypes:
    """One op in one module, phase and combination of dtypes; calls on all source lines together.

    ``inputs`` and ``outputs`` are the distinct dtypes of its floating-point operands and results, separated by commas.
    ``calls`` and ``elements`` (of first results) count one scanned step; ``amax`` is over finite elements.
    """

    root: str
    module: str
    op: str
    phase: str
    inputs: str
    outputs: str
    calls: int
    elements: int
    non_finite: int
    amax: float | None


@dataclass(frozen=True)
class Pattern:
    """One op in one phase and combination of dtypes, over all modules; ``modules`` are patterns: ``blocks.*.attn``."""

    op: str
    phase: str
    inputs: str
    outputs: str
    modules: Sequence[str]
    calls: int
    elements: int
    amax: float | None


def op_dtypes(view: RunView) -> list[OpDtypes]:
    """Return the coverage of every module, most elements first; from the last scan with a coverage fact of it.

    A scan writes one only if the coverage changed.
    """
    last: dict[tuple[Any, ...], tuple[int, list[OpDtypes]]] = {}
    for event in scan_events(view):
        if event["data"].get("kind") != "coverage":
            continue
        step, root, module = integer(event.get("step")) or 0, text(event.get("root")), text(event.get("module"))
        key = (integer(event.get("rank")), root, module)
        if key not in last or step >= last[key][0]:
            last[key] = (step, list(_merged_entries(root, module, event["data"].get("ops"))))
    seen: dict[tuple[str, ...], OpDtypes] = {}
    for _, entries in last.values():
        for e in entries:  # ranks run the same ops: the counts of one are reported
            seen.setdefault((e.root, e.module, e.op, e.phase, e.inputs, e.outputs), e)
    return sorted(seen.values(), key=lambda e: (-e.elements, e.root, e.module, e.op, e.phase))


def _merged_entries(root: str, module: str, ops: Any) -> Iterator[OpDtypes]:
    known = (entry for entry in (ops if isinstance(ops, list) else ()) if isinstance(entry, Mapping))
    found = grouped((tuple(text(e.get(name)) for name in ("op", "phase", "inputs", "outputs")), e) for e in known)
    for (op, phase, inputs, outputs), entries in found.items():
        total = {n: sum(integer(e.get(n)) or 0 for e in entries) for n in _COUNTS}
        amax = max((a for e in entries if (a := real(e.get("amax"))) is not None), default=None)
        bad = total["nan"] + total["pos_inf"] + total["neg_inf"]
        yield OpDtypes(root, module, op, phase, inputs, outputs, total["calls"], total["numel"], bad, amax)


def patterns(entries: Sequence[OpDtypes]) -> list[Pattern]:
    """Merge entries into the table for a reader: one row per op, phase and dtypes.

    Sorted by op and phase, then by elements, most first.
    """
    found = grouped(((short_name(e.op), e.phase, e.inputs, e.outputs), e) for e in entries)
    rows = []
    for (op, phase, inputs, outputs), same in found.items():
        modules = list(dict.fromkeys(_INDEX.sub("*", e.module) or e.root or "-" for e in same))
        amax = max((e.amax for e in same if e.amax is not None), default=None)
        calls, elements = sum(e.calls for e in same), sum(e.elements for e in same)
        rows.append(Pattern(op, phase, inputs, outputs, modules, calls, elements, amax))
    return sorted(rows, key=lambda r: (r.op, r.phase, -r.elements))
