"""Summarises a run for ``show``, in one pass over each table; memory grows with the number of tensors, not of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from precdoctor.diagnosis.engine import describe, describe_recorder
from precdoctor.diagnosis.ranking.ending import facts_of_end
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.reporting.sparkline import worst
from precdoctor.runlog import Run
from precdoctor.runlog.layout import bytes_in

_KEYS = ("root", "module", "kind", "name", "dtype", "format")
_SUMS = (
    *("rows", "numel", "subnormal", "zero", "nan", "pos_inf", "neg_inf"),
    *("saturated", "flushed", "clipping_casts", "flushing_casts"),
)
_SERIES = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "non_finite")


@dataclass(frozen=True)
class TensorSummary:
    """One tensor over all steps, ranks and calls of the run."""

    root: str
    module: str
    kind: str
    name: str
    dtype: str
    rows: int
    numel: int
    amax: float | None
    #: Binades between the largest value and the maximum of ``format``, or of the dtype if there is no cast; None for an
    #: unknown dtype or without a finite non-zero value.
    headroom_binades: float | None
    subnormal_fraction: float
    zero_fraction: float
    non_finite: int
    #: Narrow format to which the tensor was cast; None if no cast was seen. Then the share of its elements that the
    #: cast clipped, and the share of its non-zero elements that it flushed; None if not counted.
    format: str | None = None
    saturated_fraction: float | None = None
    flushed_fraction: float | None = None


@dataclass(frozen=True)
class Summary:
    """The content of a run in figures.

    Attributes:
        run: as in a diagnosis; ``steps`` is 0 if no training step was recorded.
        recorder: as in a diagnosis.
        about: start time, host, Python and recorder options, from run.json.
        processes: rank, attempt, whether the log was closed, and why recording was cut short.
        rows: number of rows by table.
        size: bytes of all files of the processes.
        kinds: number of rows by kind of tensor.
        dtypes: number of rows by dtype.
        events: number of events by name.
        tightest: the tensors with least headroom, ascending.
        subnormal: the tensors with the largest share of subnormal elements, descending; those without any left out.
        casts: tensors cast to a narrow format, ordered by clipped share, then by flushed share, descending.
        timeline: by name of a series, one value per entry of ``steps``: the worst over optimizers and ranks.
        steps: step numbers, ascending.
        models_with_modules: number of roots with recorded submodules; a loss module alone has none.
        models: names of the roots with parameters or an output gradient; transforms of the data have neither.
    """

    run: Mapping[str, Any]
    recorder: Mapping[str, Any]
    about: Mapping[str, Any]
    processes: list[dict[str, Any]]
    rows: dict[str, int]
    size: int
    kinds: dict[str, int]
    dtypes: dict[str, int]
    events: dict[str, int]
    tightest: list[TensorSummary]
    subnormal: list[TensorSummary]
    casts: list[TensorSummary]
    timeline: dict[str, list[float | None]]
    steps: list[int] = field(default_factory=list)
    models_with_modules: int = 0
    models: list[str] = field(default_factory=list)


def summarise(run: Run, top: int = 10) -> Summary:
    """Summarise a run, with at most ``top`` tensors in ``tightest``, ``subnormal`` and ``casts``."""
    view = RunView(run)
    nothing = view.steps.empty
    tensors = _tensors(view)
    steps, timeline, step_rows = _timeline(view)
    events = Counter(map(str, view.events["event"]) if len(view.events) else ())
    kinds, dtypes = Counter[str](), Counter[str]()
    for tensor in tensors:
        kinds[tensor.kind] += tensor.rows
        dtypes[tensor.dtype] += tensor.rows
    casts = [t for t in tensors if t.format is not None]  # not in ``tightest``: their scale uses all headroom by design
    with_headroom = [t for t in tensors if t.headroom_binades is not None and t.format is None]
    return Summary(
        run=_run_without_steps(view) if nothing else describe(view),
        recorder=describe_recorder(view),
        about={key: run.info.get(key) for key in ("started", "host", "python", "options")},
        processes=[
            {"rank": r.rank, "attempt": r.attempt, "complete": r.complete, "cut_short": r.cut_short} for r in run.ranks
        ],
        rows={"tensors": sum(t.rows for t in tensors), "steps": step_rows, "events": events.total()},
        size=bytes_in(rank.directory for rank in run.ranks),
        kinds=dict(kinds.most_common()),
        dtypes=dict(dtypes.most_common()),
        events=dict(events.most_common()),
        tightest=sorted(with_headroom, key=lambda t: (t.headroom_binades or 0.0, t.module, t.kind))[:top],
        subnormal=sorted(
            (t for t in tensors if t.subnormal_fraction > 0), key=lambda t: (-t.subnormal_fraction, t.module, t.kind)
        )[:top],
        casts=sorted(
            casts, key=lambda t: (-(t.saturated_fraction or 0.0), -(t.flushed_fraction or 0.0), t.module, t.name)
        )[:top],
        timeline=timeline,
        steps=steps,
        models_with_modules=len({t.root for t in tensors if t.module}),
        models=_models(view, {t.root for t in tensors if t.kind == "grad_output"}),
    )


def _models(view: RunView, with_gradient: Collection[str]) -> list[str]:
    """All roots if no output gradient was recorded."""
    roots = view.any_facts.get("roots") or ()
    shown = [r for r in roots if not with_gradient or r.get("parameters") or text(r.get("name")) in with_gradient]
    return [text(r.get("name")) for r in shown]


def _run_without_steps(view: RunView) -> dict[str, Any]:
    info = view.run.info
    return {"path": view.run.origin, "command": info.get("command"), "steps": 0, **facts_of_end(view)}


def _tensors(view: RunView) -> list[TensorSummary]:
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for group in view.survey.totals.to_pylist():
        key = tuple(group[k] or "" for k in _KEYS)
        into = merged.setdefault(key, {"amax": None} | dict.fromkeys(_SUMS, 0))
        for name in _SUMS:
            into[name] += group[name]
        if group["amax"] is not None:
            into["amax"] = max(group["amax"], into["amax"] or 0.0)
    return [_tensor_summary(key, values) for key, values in merged.items()]


def _tensor_summary(key: tuple[str, ...], values: Mapping[str, Any]) -> TensorSummary:
    root, module, kind, name, dtype, cast_to = key
    amax, fmt, numel = values["amax"], known_format(cast_to or dtype), values["numel"]
    return TensorSummary(
        root=root,
        module=module,
        kind=kind,
        name=name,
        dtype=dtype,
        rows=values["rows"],
        numel=numel,
        amax=amax,
        headroom_binades=fmt.headroom(amax) if fmt is not None and amax else None,
        subnormal_fraction=values["subnormal"] / numel if numel else 0.0,
        zero_fraction=values["zero"] / numel if numel else 0.0,
        non_finite=values["nan"] + values["pos_inf"] + values["neg_inf"],
        format=cast_to or None,
        saturated_fraction=values["saturated"] / max(numel, 1) if values["clipping_casts"] else None,
        flushed_fraction=values["flushed"] / max(numel - values["zero"], 1) if values["flushing_casts"] else None,
    )


def _timeline(view: RunView) -> tuple[list[int], dict[str, list[float | None]], int]:
    """``(steps, series, number of rows of the table)``. NaN stays NaN; null becomes None."""
    by_step: dict[int, dict[str, float | None]] = {}
    batches = [batch for found in view.step_batches.values() for batch in found]
    rows = sum(batch.num_rows for batch in batches)
    if len(view.processes) < len(view.everyone):
        rows = view.run.listed_rows("steps")
    for batch in batches:
        for record in batch.select(["step", *_SERIES]).to_pylist():
            cells = by_step.setdefault(record["step"], dict.fromkeys(_SERIES))
            for name in _SERIES:
                cells[name] = worst(float(v) for v in (cells[name], record[name]) if v is not None)
    steps = sorted(by_step)
    return steps, {name: [by_step[step][name] for step in steps] for name in _SERIES}, rows
