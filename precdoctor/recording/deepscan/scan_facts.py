"""Collects the outcome of a scan: the worst fact of each kind and place, and which op computed in which dtype.

Facts only; diagnosis decides whether a fact is a defect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.deepscan.scanned_op import Call, Counts
from precdoctor.recording.ops.op_facts import closer_look
from precdoctor.recording.ops.source_lines import line_columns
from precdoctor.recording.ops.tensor_facts import describe

#: Maximum number of facts per scan, and of entries in :class:`Coverage`.
_MAX_FACTS, _MAX_ENTRIES = 64, 8192

Event = dict[str, Any]


class Findings:
    """Facts that become an event of their own, one per kind and place."""

    def __init__(self, *, values: bool) -> None:
        self._values = values
        self._facts: dict[tuple[Any, ...], tuple[float, Event]] = {}

    def add(self, kind: str, call: Call, weight: float, **data: Any) -> None:
        """Note a fact about an op; for each kind and place only the one with the largest ``weight`` is kept."""
        self.add_event(kind, self.event_of(call), weight, **data)

    def add_event(self, kind: str, event: Event, weight: float, **data: Any) -> None:
        """Note a fact as :meth:`add` does, about an op described earlier by :meth:`event_of`."""
        key = (kind, event["root"], event["module"], event["op"], event.get("file"), event.get("line"))
        known = self._facts.get(key)
        if known is None and len(self._facts) >= _MAX_FACTS:
            return
        times = 1 + (known[1]["data"]["times"] if known is not None else 0)
        if known is None or weight > known[0]:
            known = (weight, {**event, "data": {"kind": kind, **event["data"], **data}})
            self._facts[key] = known
        known[1]["data"]["times"] = times

    def event_of(self, call: Call, *, closely: bool = False) -> Event:
        """Return the columns of an event about an op; ``closely`` adds its operands' ranges and its settings."""
        data: dict[str, Any] = {"phase": call.phase, "micro_step": call.micro_step}
        if closely:
            look = closer_look(call.func, call.args, call.kwargs, dict(call.swapped), call.results, values=self._values)
            data |= {name: look[name] for name in ("operands", "settings", "results")}
        else:
            data["results"] = [describe(x) for x in call.results[:1]]
        where = call.where
        data |= where.calling
        return {"root": where.root, "module": where.module, "op": call.op, **line_columns(where.line), "data": data}

    def events(self) -> list[Event]:
        """Return the facts in the order in which their kinds and places were first found."""
        return [event for _, event in self._facts.values()]


def worst(wrong: Tensor, size: Tensor, seen: Tensor, exact: Tensor) -> dict[str, float]:
    """Return ``seen`` and ``exact`` at the wrong element with the largest ``size``; all four tensors have one shape."""
    at = int(torch.where(wrong, size, -1.0).flatten().argmax())
    return {"seen": float(seen.flatten()[at]), "exact": float(exact.flatten()[at])}


def op_reference(call: Call) -> Event:
    """Return the name and place of an op, for facts about another op."""
    return {"op": call.op, "module": call.where.module, **line_columns(call.where.line)}


class Coverage:
    """Counts which op ran in which dtypes in which module, with counts and extremes of the ops' results."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], list[Any]] = {}

    def note(self, call: Call, inputs: str, outputs: str, counts: Counts | None) -> None:
        """Count one op by the dtypes of its floating-point operands and results; ``counts`` are of its first result."""
        line = call.where.line
        key = (call.where.root, call.where.module, call.phase, call.op, inputs, outputs, line)
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= _MAX_ENTRIES:
                return
            entry = self._entries[key] = [0, 0, 0, 0, 0, 0, None, None]
        entry[0] += 1
        if counts is None:
            return
        for i, n in enumerate((counts.numel, counts.nan, counts.pos_inf, counts.neg_inf, counts.zero), 1):
            entry[i] += n
        entry[6] = max((v for v in (entry[6], counts.amax) if v is not None), default=None)
        entry[7] = min((v for v in (entry[7], counts.amin_nonzero) if v is not None), default=None)

    @property
    def signature(self) -> frozenset[tuple[Any, ...]]:
        """Equal for scans in which the same ops ran at the same places in the same dtypes."""
        return frozenset(self._entries)

    def events(self) -> list[Event]:
        """Return one event per module: its ops with dtypes, number of calls, counts and extremes of their results."""
        modules: dict[tuple[str, str], list[dict[str, Any]]] = {}
        names = ("calls", "numel", "nan", "pos_inf", "neg_inf", "zero", "amax", "amin_nonzero")
        for (root, module, phase, op, inputs, outputs, line), entry in self._entries.items():
            row = {"op": op, "phase": phase, "inputs": inputs, "outputs": outputs}
            if line is not None:
                row |= {"file": line.shown, "line": line.number}
            row |= {name: value for name, value in zip(names, entry, strict=True) if value}
            modules.setdefault((root, module), []).append(row)
        return [
            {"root": root, "module": module, "data": {"kind": "coverage", "ops": ops}}
            for (root, module), ops in modules.items()
        ]
