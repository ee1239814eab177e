"""The last sections of the report: recorded dtypes, facts and cost of the recording, and what is not recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from precdoctor.diagnosis.claims.words import memory, percent, plural
from precdoctor.diagnosis.engine import describe_recorder
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.reporting.html import svg
from precdoctor.reporting.html.layers import KIND_RANK, KIND_TITLES, kind_title
from precdoctor.reporting.html.survey import Survey
from precdoctor.reporting.text import clean, lost_rows, not_neutral, number
from precdoctor.runlog.layout import bytes_in


def coverage(survey: Survey) -> list[dict[str, Any]]:
    """By kind and dtype: numbers of tensors, rows and elements, and the share of the kind's elements, with its bar."""
    counts_of: dict[tuple[str, str], list[int]] = {}
    per_kind: dict[str, int] = {}
    for at, tensor in enumerate(survey.tensors):
        total = survey.total(at)
        cell = counts_of.setdefault((tensor.kind, tensor.dtype), [0, 0, 0])
        for i, value in enumerate((1, total.rows, total.numel)):
            cell[i] += value
        per_kind[tensor.kind] = per_kind.get(tensor.kind, 0) + total.numel
    out = []
    for (kind, dtype), (tensors, rows, elements) in sorted(
        counts_of.items(), key=lambda item: (KIND_RANK.get(item[0][0], len(KIND_RANK)), -item[1][2])
    ):
        share = elements / per_kind[kind] if per_kind[kind] else 0.0
        counts = {"tensors": number(tensors), "rows": number(rows), "elements": number(elements)}
        shares = {"share": percent(share), "bar": svg.bar(share, "sharebar")}
        out.append({"kind": kind_title(kind), "dtype": clean(dtype, 40), **counts, **shares})
    return out


def facts(view: RunView, survey: Survey) -> list[tuple[str, str]]:
    """``(label, value)`` of the facts of the recording; empty values are left out."""
    return [(label, clean(value, 400)) for label, value in _facts(view, survey) if value]


def _facts(view: RunView, survey: Survey) -> Iterator[tuple[str, str]]:
    info, known = view.run.info, view.any_facts
    yield "started", str(info.get("started") or "")
    versions = known.get("versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    device = known.get("device")
    if isinstance(device, Mapping):
        yield "device", " ".join(str(v) for v in device.values() if v)
    yield "autocast", ", ".join(map(str, known.get("autocast") or ())) or "not seen"
    for optimizer in view.optimizers:
        yield "optimizer", f"{optimizer.get('name')}, intended updates: {optimizer.get('intended_update', 'unknown')}"
    ranks = plural(len({p.rank for p in view.everyone}), "rank")
    yield "processes", ranks + (f", {plural(len(view.everyone), 'attempt')}" if len(view.everyone) > 1 else "")
    yield "tensors", f"{plural(len(survey.tensors), 'tensor')}, {plural(survey.rows, 'row')}"
    yield "log", memory(bytes_in(rank.directory for rank in view.run.ranks))
    recorder = describe_recorder(view)
    overhead = recorder["overhead_fraction"]
    yield "overhead", "not measured" if overhead is None else f"{percent(overhead)} of the run's time"
    if changed := not_neutral(recorder):
        yield "neutral", f"no: {changed}"
    yield "lost rows", lost_rows(recorder) or "none"
    early = f"before the training ended: {clean(view.cut_short, 160)}" if view.cut_short else "cleanly"
    open_still = "not: killed, out of disk space, or still running; at most the last second is missing"
    yield "closed", early if view.complete else open_still


def not_recorded(view: RunView, survey: Survey) -> list[str]:
    """Sentences on what the log lacks: unsampled steps, excluded modules, kinds without rows, lost rows."""
    return [clean(sentence, 400) for sentence in _gaps(view, survey)]


def _gaps(view: RunView, survey: Survey) -> Iterator[str]:
    steps, sampled = int(view.steps["step"].nunique()), len(view.sampled_steps)
    if sampled < steps:
        yield (
            f"Full statistics were taken on {number(sampled)} of {number(steps)} steps; of the others only loss, "
            "gradients' largest elements and the scaler are known."
        )
    if survey.drawn_steps < sampled:
        yield (
            f"Of these {number(sampled)} steps {number(survey.drawn_steps)} are drawn and examined tensor by tensor. "
            "Totals, largest magnitudes and non-finite values are of all."
        )
    options: Any = view.run.info.get("options")
    options = options if isinstance(options, Mapping) else {}
    for name in ("include", "exclude"):
        if options.get(name):
            globs = " ".join(map(str, options[name]))
            yield f"Modules were chosen with --{name} {globs}; the others are not in the log."
    if options.get("redact_names"):
        yield "Source lines, command and offending values were left out (--redact-names)."
    have = {t.kind for t in survey.tensors}
    if missing := [
        KIND_TITLES[k] for k in ("output", "grad_output", "weight", "weight_grad", "update") if k not in have
    ]:
        yield f"No row of: {', '.join(missing)}."
    if left_out := sum(survey.total(t).left_out for t in range(len(survey.tensors))):
        rows = plural(left_out, "row")
        yield f"Where all steps are shown as one, {rows} of a scale that is no power of two are left out."
    if view.missing:
        yield f"{view.missing[0].upper()}{view.missing[1:]}."
    yield from (f"{problem[0].upper()}{problem[1:]}." for problem in view.problems[:5] if problem)
    if not view.complete:
        yield "The log was never closed: the run was killed, or goes on."
