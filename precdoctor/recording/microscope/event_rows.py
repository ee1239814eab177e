"""Turns the outcome of an examination into rows of the events table (docs/run-log.md)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from precdoctor.recording.microscope.tracer import External, OpRecord
from precdoctor.recording.ops.assigned_lines import risky_lines
from precdoctor.recording.ops.source_lines import Line, line_columns
from precdoctor.recording.ops.tensor_facts import describe

if TYPE_CHECKING:
    from precdoctor.recording.microscope.examination import Examination
    from precdoctor.recording.steps.persistent_state import Poisoned


def incident_event(done: Examination, number: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the ``incident`` row."""
    call = done.found.call if done.found is not None else None
    more: dict[str, Any] = {
        "outcome": done.outcome,
        "phase": done.phase,
        "why": done.why,
        "reproduced": done.reproduced,
        "batch": done.batch,
        "changed_arguments": done.changed_arguments,
        "changed_attributes": list(done.changed_attributes),
    }
    if done.found is not None:
        more["micro_step"] = done.found.micro_step
        more["trace_complete"] = done.found.tracer.complete
        bad = done.found.bad
        more["bad"] = [{"name": name, "badness": kinds} for name, kinds, _ in bad[:16]]
    if done.found is not None and done.slice.path:
        more["origins"] = list(done.slice.origins)
        more["path"] = list(done.slice.path)
        more["externals"] = [{"kind": e.kind, "name": e.name, "op": op} for e, op in done.slice.externals]
        if call is not None and any(e.kind == "batch" for e, _ in done.slice.externals):
            more["made_at"] = _made_at(call.line, (), own=False)
    row: dict[str, Any] = {"id": number, "root": call.root if call is not None else "", "data": {**data, **more}}
    return {**row, **line_columns(call.line if call is not None else None)}


def op_events(done: Examination, number: str) -> list[dict[str, Any]]:
    """Return an ``op`` row for each op to be reported, in execution order."""
    if done.found is None:
        return []
    records = done.found.tracer.records
    indices = set(done.slice.wanted)
    indices |= {f for i in indices if (f := records[i].forward) is not None}
    return [_op_event(records[i], done, number) for i in sorted(indices)]


def _op_event(record: OpRecord, done: Examination, number: str) -> dict[str, Any]:
    assert done.found is not None
    call = done.found.call
    data = {
        "index": record.index,
        "phase": record.phase,
        "node": record.node,
        "forward": record.forward,
        "suspect": record.suspect,
        "bad_in": list(record.bad_in),
        "bad_out": record.bad_out,
        "sources": [_source(s) for s in record.sources],
        **record.facts,
    }
    line = record.line or (call.line if call is not None else None)
    if line is not None and _reads_a_constant(record):
        lines = [r.line for r in done.found.tracer.records if r.line is not None]
        data["made_at"] = _made_at(line, {own.number for own in lines if own.file == line.file}, own=True)
    row = {
        "id": f"{number}.{record.index}",
        "parent_id": number,
        "root": call.root if call is not None else record.root or "",
        "module": record.module,
    }
    return {**row, "op": record.op, **line_columns(line), "data": data}


def _made_at(line: Line | None, computed: Collection[int], *, own: bool) -> list[dict[str, Any]]:
    """Return :func:`.risky_lines` for a line of the user's code; none for a line of a library."""
    if line is None or line.in_library:
        return []
    return [{"line": made.number, "code": made.code} for made in risky_lines(line, computed, own=own)]


def _reads_a_constant(record: OpRecord) -> bool:
    """Return whether a bad operand is a nameless tensor, which was made without a gradient."""
    return any(
        bad and isinstance(source, External) and (source.kind, source.name) == ("constant", "")
        for bad, source in zip(record.bad_in, record.sources, strict=False)
    )


def _source(source: tuple[int, ...] | External) -> Any:
    return {"kind": source.kind, "name": source.name} if isinstance(source, External) else list(source[-4:])


def origin(done: Examination) -> str:
    """Return the op that made the first non-finite value, or why it is unknown, as the end of a sentence."""
    first = done.first_harmful
    if first is None:
        return f" ({done.why})" if done.why else ""
    line = first.line or (done.found.call.line if done.found is not None and done.found.call is not None else None)
    where = f" at {line.shown}:{line.number}" if line is not None else ""
    return f", first made by {first.op}{where}"


def poisoned(found: Poisoned) -> dict[str, Any]:
    """Return what an incident reports of a non-finite tensor that outlives the step."""
    where = {"root": found.root, "module": found.module, "name": found.name}
    return {**where, "last_finite_step": found.last_finite, **describe(found.tensor)}
