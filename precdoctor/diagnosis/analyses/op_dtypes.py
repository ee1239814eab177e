"""The ops that deep scans list, by module, and the dtypes in which each op computed: the ``coverage`` facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from precdoctor.diagnosis.analyses.op_facts import real
from precdoctor.diagnosis.analyses.scans import short_name
from precdoctor.diagnosis.survey.rows import grouped, integer, text
from precdoctor.diagnosis.survey.view import Process, RunView, remembered

_COUNTS = ("calls", "numel", "nan", "pos_inf", "neg_inf")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


class Coverage(NamedTuple):
    """The ops that a deep scan listed for one module, in the order in which they ran."""

    process: Process
    step: int
    root: str
    module: str
    ops: Sequence[Mapping[str, Any]]


@remembered
def coverage(view: RunView) -> list[Coverage]:
    """Return the listed ops of all scans, by process and time; a scan lists a module only if its ops changed."""
    found = []
    for event in view.events_of("scan"):
        ops = event["data"].get("ops")
        if event["data"].get("kind") == "coverage" and isinstance(ops, list):
            root, module, step = text(event.get("root")), text(event.get("module")), integer(event.get("step")) or 0
            known = [op for op in ops if isinstance(op, Mapping)]
            found.append(Coverage(Process.of(event), step, root, module, known))
    return found


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
    """Return the dtypes of the ops of every module, most elements first; from the last scan that listed them."""
    last: dict[tuple[int, str, str], Coverage] = {}
    for listed in coverage(view):
        key = (listed.process.rank, listed.root, listed.module)
        if key not in last or listed.step >= last[key].step:
            last[key] = listed
    seen: dict[tuple[str, ...], OpDtypes] = {}
    for listed in last.values():
        for e in _merged_entries(listed):  # ranks run the same ops: the counts of one are reported
            seen.setdefault((e.root, e.module, e.op, e.phase, e.inputs, e.outputs), e)
    return sorted(seen.values(), key=lambda e: (-e.elements, e.root, e.module, e.op, e.phase))


def _merged_entries(listed: Coverage) -> Iterator[OpDtypes]:
    found = grouped((tuple(text(e.get(n)) for n in ("op", "phase", "inputs", "outputs")), e) for e in listed.ops)
    for (op, phase, inputs, outputs), entries in found.items():
        calls, elements, *bad = (sum(integer(e.get(n)) or 0 for e in entries) for n in _COUNTS)
        amax = max((a for e in entries if (a := real(e.get("amax"))) is not None), default=None)
        yield OpDtypes(listed.root, listed.module, op, phase, inputs, outputs, calls, elements, sum(bad), amax)


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
