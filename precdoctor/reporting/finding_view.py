"""Renders one finding for a terminal: headline, message, place, evidence, and prescriptions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Source
from precdoctor.diagnosis.claims.words import percent
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.rangebar import RangeBar
from precdoctor.reporting.sparkline import sparkline
from precdoctor.reporting.tables import Name, facts, left, right, table
from precdoctor.reporting.text import clean, clean_block, factor, number
from precdoctor.runlog.atomic import jsonable

#: Width of the labels, in cells.
_LABEL = 9
#: Indentation of a snippet, in cells.
_INDENT = 4
#: Consequences that are listed before "and N more".
_ALSO = 4
#: Readable names of the kinds of tensors whose column value is not readable.
KINDS = {
    "grad_output": "gradient of the output",
    "weight_grad": "weight gradient",
    "weight_grad_step": "weight gradient for the optimizer",
    "opt_state": "optimizer state",
    "master_weight": "master weight",
    "fp8_operand": "FP8 operand",
    "subbyte_operand": "FP4 or FP6 operand",
    "block_scale": "block scale",
    "logits": "softmax input",
    "kv_key": "cached keys",
    "kv_value": "cached values",
}
#: Kinds of tensors that code outside modules hands to a module; alone they do not name a place.
_AROUND = ("batch", "input", "output")


def finding_view(finding: Finding, console: Console) -> RenderableType:
    """The full view of a finding, with prescriptions and snippets."""
    parts: list[RenderableType] = [
        headline(finding),
        Padding(Text(clean_block(finding.message)), (0, 0, 1, 2)),
        _grid(_facts(finding, console)),
    ]
    for prescription in finding.prescriptions:
        parts += ["", _grid([("do", _prescription(prescription))])]
        if prescription.snippet.strip():  # not inside the grid, and never wrapped, so that it can be copied
            code = fitted(clean_block(prescription.snippet.strip("\n")), console.width - _INDENT)
            indented = textwrap.indent(code, " " * _INDENT)
            parts += ["", Text(indented, "pd.code", no_wrap=True, overflow="ignore")]
    if resume := finding.resume_words:
        parts += ["", _grid([("resume", Text(clean(resume)))])]
    return Group(*parts)


def note_view(finding: Finding) -> RenderableType:
    """The short view of a note: headline and first prescription."""
    first = next(iter(finding.prescriptions), None)
    return Group(headline(finding), *([_grid([("do", _prescription(first))])] if first is not None else []))


def headline(finding: Finding) -> Text:
    """``ERROR PD101  blocks.3.attn makes the first Inf``."""
    severity = finding.severity.value
    return Text.assemble(
        (severity.upper(), f"pd.{severity}"),
        " ",
        (finding.code, "pd.strong"),
        "  ",
        (clean(finding.title), "pd.strong"),
    )


def place(finding: Finding) -> str:
    """``blocks.3.attn (SelfAttention) output, forward, step 37, rank 5 (tp rank 1)``; empty without a place."""
    location = finding.location
    thing = "" if location.module is None else location.module or location.root or "the model"
    if location.module_class and thing:
        thing += f" ({location.module_class})"
    if location.module is None and location.root and location.kind in _AROUND:
        thing = f"code around {location.root}"
    elif location.kind:
        thing = f"{thing} {KINDS.get(location.kind, location.kind)}".strip()
    parts = [thing] if thing else []
    if location.phase is not None and location.phase.value != location.kind:
        parts.append(location.phase.value)
    if location.step is not None:
        parts.append(finding.step_words(location.step))
    if location.rank is not None:
        parts.append(location.rank_place)
    return clean(", ".join(parts))


def _grid(rows: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    return Padding(facts(rows, gap=1, width=_LABEL), (0, 0, 0, 2))


def stated_facts(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """``(label, text, line of code or "")`` of the facts of a finding, in the order of every report."""
    location, evidence = finding.location, finding.evidence
    reason = evidence.get("confidence_reason")
    sure = finding.confidence >= 1.0
    facts = (
        ("where", place(finding)),
        ("source", location.source),
        ("op", location.op),
        ("cause", finding.cause),
        ("seen at", evidence.get("detected_at")),
        ("certainty", "" if sure else percent(finding.confidence) + (f": {clean(reason)}" if reason else "")),
    )
    for label, fact in facts:
        if isinstance(fact, Source):
            yield label, clean(fact.place), clean((fact.code or "").strip())
        elif isinstance(fact, str) and fact:
            yield label, clean(fact), ""


def _facts(finding: Finding, console: Console) -> Iterator[tuple[str, RenderableType]]:
    evidence = finding.evidence
    for label, text, code in stated_facts(finding):
        yield label, Text.assemble(text, (f"  {code}" if code else "", "pd.code"))
    if trend := _trend(evidence.get("history"), console):
        yield "before", Text(trend)
    if (bar := _range(evidence.get("range"), console)) is not None:
        yield "range", bar
    path = evidence.get("path")
    if isinstance(path, Sequence) and path and not isinstance(path, str):
        yield "path", _path(path, console)
    folded = evidence.get("consequences")
    if isinstance(folded, Sequence) and folded and not isinstance(folded, str):
        yield "also", _consequences([c for c in folded if isinstance(c, Mapping)])


def _consequences(consequences: Sequence[Mapping[str, Any]]) -> Text:
    lines = [clean(f"{c.get('code', '')} {c.get('message', '')}".strip()) for c in consequences[:_ALSO]]
    if len(consequences) > _ALSO:
        lines.append(f"and {len(consequences) - _ALSO} more")
    return Text("\n".join(lines))


def _trend(history: Any, console: Console) -> str:
    """The amax of the last steps: ``amax 12 ▁▂▃▅█ 6.1e+04 at steps 30 to 36``; empty with fewer than three values."""
    if not isinstance(history, Sequence) or isinstance(history, str):
        return ""
    points = [(h["step"], h["amax"]) for h in history if isinstance(h, Mapping) and h.get("amax") is not None]
    if len(points) < 3:
        return ""
    line = sparkline([amax for _, amax in points], 40, ascii_only=not can_draw(console), log=True)
    first, last = points[0], points[-1]
    return f"amax {number(float(first[1]))} {line} {number(float(last[1]))} at steps {first[0]} to {last[0]}"


def _value(key: str, value: Any) -> str:
    """A value formatted by its key: fractions as percentages, binades as factors, others as numbers."""
    if key.endswith("_binades") and isinstance(value, (int, float)):
        return factor(float(value))
    if key.endswith(("fraction", "share")) and isinstance(value, (int, float)):
        return percent(float(value))
    return number(value)


def _range(evidence: Any, console: Console) -> RenderableType | None:
    """The range bar with a caption; None if the evidence has no range."""
    if not isinstance(evidence, Mapping):
        return None
    room, plain = console.width - _LABEL - 3, not can_draw(console)
    bar = RangeBar.of(evidence, max(16, min(64, room - 20)))  # the labels of its ends take up to 20 columns
    if bar is not None and bar.text(ascii_only=plain).cell_len > room:  # and shares outside it take more
        bar = RangeBar.of(evidence, max(16, room - 46))
    if bar is None:
        return None
    amax = evidence.get("amax")
    caption = f"{bar.format.dtype}: subnormal, then normal"
    if isinstance(amax, (int, float)) and 0.0 < amax < float("inf"):
        caption += f"; amax {number(float(amax))}, {_distance(bar.format.headroom(amax))} {number(bar.format.max)}"
    parts = [bar.text(ascii_only=plain), Text(caption, "pd.quiet")]
    if evidence.get("tensor"):
        parts.insert(0, Text(f"of the {clean(evidence['tensor'], 160)}", "pd.quiet"))
    return Group(*parts)


def _path(path: Sequence[Any], console: Console) -> Table:
    """A table of the tensors on the path to the finding's tensor, which is last, in execution order."""
    entries = [entry for entry in path if isinstance(entry, Mapping)]
    bad = [bool(entry.get("nan") or entry.get("inf")) for entry in entries]
    titles = ("amax", "headroom", *(("NaN", "Inf") if any(bad) else ()))
    shown = table({"header": "  module"}, {"header": "tensor"}, *left("dtype"), *right(*titles))
    mark = "▸ " if can_draw(console) else "> "
    for entry, is_bad in zip(entries, bad, strict=True):
        kind, name = str(entry.get("kind") or ""), str(entry.get("name") or "")
        name = KINDS.get(name, name) if kind == "fp8_operand" else name  # an operand has the name of its kind
        kind = f"{KINDS.get(kind, kind)} {name}".strip()
        last = entry is entries[-1]
        shown.add_row(
            Name((mark if last else "  ") + clean(entry.get("module") or "(model)")),
            Name(kind),
            clean(entry.get("dtype") or ""),
            number(_float(entry.get("amax"))),
            factor(_float(entry.get("headroom_binades"))),
            *((number(entry.get("nan")), number(entry.get("inf"))) if any(bad) else ()),
            style="pd.bad" if is_bad else "pd.strong" if last else None,
        )
    return shown


def _distance(binades: float) -> str:
    """Headroom in words: ``2^12.3 below``, ``2^0.4 above``, ``just below`` or ``at``."""
    if abs(binades) < 0.05:
        return "just below" if binades > 0.0 else "at" if binades == 0.0 else "just above"
    return f"{factor(abs(binades))} {'below' if binades >= 0.0 else 'above'}"


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _prescription(prescription: Prescription) -> RenderableType:
    change, effect = stated_effect(prescription.title)
    title = Text(clean(change), "pd.good")
    predicted = clean(effect) or predicted_effect(prescription.predicted)
    return Group(title, Text.assemble(("predicted: ", "pd.label"), predicted)) if predicted else title


def stated_effect(title: str) -> tuple[str, str]:
    """Split a prescription's title into ``(change, predicted effect)``; the effect is "" if the title states none.

    ``eps=1e-12: elements below it 41 % -> 0 %`` gives ``eps=1e-12`` and ``elements below it 41 % -> 0 %``.
    """
    change, _, effect = title.rpartition(": ")
    return (change, effect) if change and " -> " in effect else (title, "")


def predicted_effect(predicted: Mapping[str, Any]) -> str:
    """The predicted effect in words: ``flushed fraction 41 % to 0.3 %, overflow 0``."""
    effects = []
    for key, value in jsonable({k: v for k, v in predicted.items() if v is not None}).items():
        if isinstance(value, Mapping) and {"from", "to"} <= set(value):
            shown = f"{_value(key, value['from'])} to {_value(key, value['to'])}"
        elif isinstance(value, list):
            shown = " to ".join(_value(key, v) for v in value)
        else:
            shown = _value(key, value)
        effects.append(f"{clean(key.removesuffix('_binades')).replace('_', ' ')} {shown}")
    return ", ".join(effects)


_COMMENT = "  # "


def fitted(code: str, width: int) -> str:
    """Wrap the comments of ``code`` so that they do not make a line wider than ``width`` cells.

    A trailing comment moves to lines above its statement; a comment on its own line is broken into several. Statements
    are never broken.
    """
    return "\n".join(part for line in code.split("\n") for part in _fitted(line, width))


def _fitted(line: str, width: int) -> list[str]:
    body = line.lstrip()
    if len(line) <= width or "#" not in body:
        return [line]
    indent = line[: len(line) - len(body)]
    code, found, comment = ("", "#", body[1:].strip()) if body.startswith("#") else body.rpartition(_COMMENT)
    if not found:
        return [line]
    start = f"{indent}# "
    above = textwrap.wrap(comment, max(width, len(start) + 20), initial_indent=start, subsequent_indent=start)
    return [*above, indent + code.rstrip()] if code else above
