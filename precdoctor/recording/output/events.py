"""Events rows: numbering, JSON data, and those that follow from a step's numbers (scaler changes, non-finite steps)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from precdoctor.recording.output.step_rows import Row
from precdoctor.recording.slots.step_batch import StepBatch
from precdoctor.runlog.atomic import plain
from precdoctor.runlog.names import shortened
from precdoctor.runlog.writer import MAX_STRING_BYTES

#: A run that stays broken has enough of them.
_MAX_NONFINITE_EVENTS = 100
_TENSORS_NAMED = 8


class EventLog:
    """Makes events rows of one rank."""

    def __init__(self, rank: int, *, redact: bool) -> None:
        self._rank = rank
        self._redact = redact
        self._count = 0
        self._last_scale: float | None = None
        self._inferred: float | None = None
        self._nonfinite = 0

    def rows(self, events: Iterable[dict[str, Any]]) -> list[Row]:
        """Number events and turn their data into JSON."""
        out = []
        for event in events:
            row = {"time_ns": time.time_ns(), "id": f"{self._rank}-{self._count}", **event, "rank": self._rank}
            row["data"] = json.dumps(plain(event.get("data", {})), default=str)
            if len(row["data"]) > MAX_STRING_BYTES:
                row["data"] = json.dumps({"cut": len(row["data"])})  # ASCII; a part of it would be no JSON
            if self._redact:
                row["code"] = None
            out.append({k: shortened(v) if k != "data" and type(v) is str else v for k, v in row.items()})
            self._count += 1
        return out

    def of_step(
        self, batch: StepBatch, bad: Sequence[tuple[str, str, str, str]], step: Row, inferred_scale: float | None
    ) -> list[Row]:
        """Events that a finished step's numbers imply.

        Args:
            batch: the step.
            bad: root, module, kind and name of the tensors with a NaN or an Inf that count as an incident.
            step: its steps row.
            inferred_scale: the loss scale, if it is not a scaler's.
        """
        events: list[dict[str, Any]] = []
        number = batch.facts.step
        scale = step["loss_scale"]
        if inferred_scale is not None:
            if inferred_scale != self._inferred:
                self._inferred = inferred_scale
                events.append(_event("scaler", number, {"change": "inferred", "from": None, "to": inferred_scale}))
        elif scale is not None:
            if self._last_scale is not None and scale != self._last_scale:
                change = "backoff" if scale < self._last_scale else "growth"
                events.append(_event("scaler", number, {"change": change, "from": self._last_scale, "to": scale}))
            self._last_scale = scale
        if step["clipped_before_unscale"]:
            data = {"clip_norm": step["clip_norm"], "before_unscale": True}
            events.append(_event("clip", number, data))
        if step["non_finite"] and self._nonfinite < _MAX_NONFINITE_EVENTS:
            self._nonfinite += 1
            events.append(_nonfinite_event(batch, bad, step))
        return self.rows(events)


def _nonfinite_event(batch: StepBatch, bad: Sequence[tuple[str, str, str, str]], step: Row) -> dict[str, Any]:
    named = [f"{root}/{module}:{kind}:{name}" for root, module, kind, name in bad[:_TENSORS_NAMED]]
    kinds = {kind for _, _, kind, _ in bad}
    if step["loss"] is not None and not math.isfinite(step["loss"]):
        kinds.add("loss")
    # Between sampled steps there are no rows: what is not the loss is the gradients' sentinel.
    data = {"kinds": sorted(kinds) or ["weight_grad"], "tensors": named, "count": len(bad)}
    file, line = batch.facts.backward_file, batch.facts.backward_line
    return {**_event("nonfinite", batch.facts.step, data), "file": file, "line": line}


def _event(kind: str, step: int | None, data: dict[str, Any]) -> dict[str, Any]:
    return {"event": kind, "step": step, "data": data}
