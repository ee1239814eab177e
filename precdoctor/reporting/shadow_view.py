"""Renders the comparison of reduced precision with FP32 (``shadow``): on a terminal, in Markdown, as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.analyses.shadow_errors import FORWARD, Limits, Piece, Shadowed
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.numerics.formats import format_of_dtype
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.json_report import answer_head
from precdoctor.reporting.run_head import run_facts
from precdoctor.reporting.sparkline import sparkline
from precdoctor.reporting.tables import folded, left, right, table
from precdoctor.reporting.text import clean, spans
from precdoctor.runlog.atomic import jsonable

_KINDS = {
    "output": "output",
    "input": "output",
    "grad_input": "gradient",
    "grad_output": "gradient",
    "weight_grad": "weight gradient",
}
_STYLES = {"precision": "pd.bad", "clean": "pd.good", "indeterminate": "pd.near", "nothing-reduced": "pd.near"}
#: What a run without a comparison has to show.
NOTHING = Shadowed("", None, (), ())
_BAR = 12
_SPARK = 24


def verdict(found: Shadowed, limits: Limits) -> tuple[str, str]:
    """``(verdict, sentence)``: ``precision``, ``clean``, ``nothing-reduced`` or ``indeterminate``, and its reason."""
    if not found.steps:
        if found.nothing_reduced:
            return "nothing-reduced", _nothing_reduced(found)
        if not found.refused:
            return "indeterminate", "No answer: no step was reached that was to be compared."
        step, why = found.refused[0]
        return "indeterminate", f"No answer: step {step} could not be compared: {clean(why, 300)}."
    if guilty := limits.guilty(found):
        return "precision", _guilty(found, guilty, limits)
    layers = found.layers()
    within = sum(not limits.above_expectation(error, found) for error in layers.values())
    if not layers:
        return "indeterminate", "No answer: nothing in the compared calls could be compared."
    share = f"all {plural(within, 'layer')}" if within == len(layers) else f"{within} of {plural(len(layers), 'layer')}"
    share = "its only layer" if len(layers) == within == 1 else share
    worst = found.worst()[0]
    more = "" if within == len(layers) else f", limit {limits.limit * found.slack:g} u"
    verb = "is" if len(layers) == 1 else "are"
    return "clean", (
        f"Precision is not the problem in the modules: {share} {verb} within {_expected(found, limits)} of "
        f"{wide(found)} when fed the same, worst {clean(worst.place)} {units(worst.local, found.u)} "
        f"({percent(worst.local)}{more})."
    )


def _nothing_reduced(found: Shadowed) -> str:
    if found.reference == "float64":
        return "This run is FP64 throughout: there is nothing wider to compare it with."
    return "This run is FP32 throughout: nothing to shadow; --reference fp64 compares it with FP64."


def _guilty(found: Shadowed, guilty: Sequence[Piece], limits: Limits) -> str:
    first = guilty[0]
    if not limits.off(first, found):
        return (
            f"It is precision: {clean(first.place)} makes errors of {units(first.given, found.u)} in what it is given "
            f"into {units(first.accumulated, found.u)} ({percent(first.accumulated)}), by cancellation or a steep "
            f"function; rounding itself is as expected."
        )
    if not math.isfinite(first.local or 0.0):
        what = f"{clean(first.place)} overflows in {name(found)}, or is rounded to zero, where {wide(found)} does not"
    else:
        size = units(first.local, found.u).replace("x", " times its size")
        what = f"{clean(first.place)} is {size} off where {_expected(found, limits)} is expected"
    others = len({(p.root, p.module) for p in guilty} - {(first.root, first.module)})
    more = f"; {plural(others, 'other layer')} {'is' if others == 1 else 'are'} also above {limits.limit:g} u"
    return f"It is precision: {what}{_before(found, first, limits) or (more if others else '')}."


def _expected(found: Shadowed, limits: Limits) -> str:
    return f"{limits.expected * found.slack:g} u"


def _before(found: Shadowed, first: Piece, limits: Limits) -> str:
    """A clause: the layers before the worst one are clean ("" if not), or the error is in a gradient."""
    if first.kind not in FORWARD:
        return f", in the {'gradient of its weights' if first.kind == 'weight_grad' else 'backward pass'}"
    earlier = {p.module: 0.0 for p in found.pieces if p.root == first.root and p.order < first.order}
    for p in found.pieces:
        if p.module in earlier and p.kind in FORWARD and p.order < first.order:
            earlier[p.module] = max(earlier[p.module], p.local or 0.0)
    count = len(earlier)
    if not count or any(limits.above_expectation(e, found) for e in earlier.values()):
        return ""
    return "; the layer before it is clean" if count == 1 else f"; the {count} layers before it are clean"


def name(found: Shadowed) -> str:
    """The name of the narrowest format in use, such as ``BF16``."""
    return found.fmt.name if found.fmt is not None else "reduced precision"


def wide(found: Shadowed) -> str:
    """The name of the reference format: ``FP32`` or ``FP64``."""
    return format_of_dtype(found.reference).name


def units(error: float | None, u: float) -> str:
    """An error in unit roundoffs, ``0.7 u``; from ten times the tensor's size on as a multiple of it, ``12x``."""
    if error is None or not u:
        return "–"
    if not math.isfinite(error):
        return "all of it"
    if error >= 10.0:
        return f"{error:,.0f}x"
    ratio = error / u
    return (
        "0 u" if ratio == 0.0 else "<0.01 u" if ratio < 0.01 else f"{ratio:.2g} u" if ratio < 100 else f"{ratio:,.0f} u"
    )


def scope(found: Shadowed) -> str:
    """A clause on the comparison: the two formats, the steps, and whether the replay is bitwise exact."""
    u = f"u = 2^{round(math.log2(found.u))} of a tensor's size"
    compared = f"{wide(found)} beside {name(found)} ({u}) at step{'s' * (len(found.steps) > 1)}"
    replay = "the replay is the run bit for bit" if found.exact else "the replay is not the run bit for bit"
    return f"{compared} {spans(found.steps, 8)}; {replay}"


def notes(found: Shadowed) -> Iterator[str]:
    """Sentences on steps and gradients that were not compared, and other notes."""
    for step, why in found.refused[:3]:
        yield f"Step {step} was not compared: {clean(why, 300)}."
    if found.without_backward:
        yield f"Gradients of step {spans(found.without_backward)} overflowed and were not compared."
    for note in found.notes:
        yield f"Note: {clean(note, 300)}."


def growth(found: Shadowed, *, ascii_only: bool) -> Iterator[tuple[str, str, str]]:
    """``(heading, sparkline, ends and peak in words)`` of the accumulated errors along the depth.

    One entry per root for outputs, one for gradients; none with fewer than two errors.
    """
    for root in found.roots:
        for kind, what in (("output", "outputs"), ("grad_output", "gradients")):
            line = [(m, e) for m, e in found.along_depth(root, kind) if math.isfinite(e) and e > 0.0]
            if len(line) < 2:
                continue
            peak = max(line, key=lambda x: x[1])
            ends = [line[0], line[-1]] if peak in (line[0], line[-1]) else [line[0], peak, line[-1]]
            words = ", ".join(f"{units(e, found.u)} at {m or root}" for m, e in ends)
            heading = f"{what} of {root}" if len(found.roots) > 1 else what
            yield heading, sparkline([e for _, e in line], _SPARK, ascii_only=ascii_only, log=True), words


def print_full(found: Shadowed, run: Mapping[str, Any], console: Console, limits: Limits, *, worst: int) -> None:
    """Print the full report; the table lists at most ``worst`` pieces of code."""
    state, sentence = verdict(found, limits)
    console.print(Text(clean(run.get("path", "")), "pd.quiet"), soft_wrap=True)
    console.print(Text(run_facts(run), "pd.quiet"))
    console.print(Text("\n" + sentence, _STYLES[state]))
    if not found.steps:
        for line in notes(found):
            console.print(Text(line, "pd.quiet"))
        return
    console.print(Text(scope(found) + ".", "pd.quiet"))
    if worst and found.worst():
        console.print(Padding(_table(found, limits, worst, console), (1, 0, 0, 0)))
    lines = list(growth(found, ascii_only=not can_draw(console)))
    if lines:
        console.print(Text(f"\nErrors along the depth, {wide(found)} all the way beside {name(found)} all the way:"))
    for what, drawn, words in lines:
        console.print(Text.assemble(f"  {clean(what):9}  ", drawn, "  ", (clean(words), "pd.quiet")))
    if remarks := list(notes(found)):
        console.print(Text("\n" + "\n".join(remarks), "pd.quiet"))


def _table(found: Shadowed, limits: Limits, worst: int, console: Console) -> Table:
    worst_column = folded("worst by its own error")
    shown = table(*worst_column, *left("of its"), *right("own error"), *left(""), *right("all the way"))
    for p in _ranked(found, limits)[:worst]:
        bad = limits.off(p, found) or limits.amplifies(p)
        style = "pd.bad" if bad else "pd.near" if limits.above_expectation(p.local, found) else ""
        shown.add_row(
            Text(clean(p.place), style),
            _KINDS[p.kind],
            Text(units(p.local, found.u), style),
            Text(_bar(p.local, found.u, limits, ascii_only=not can_draw(console)), style or "pd.quiet"),
            Text(units(p.accumulated, found.u), "pd.bad" if limits.amplifies(p) else ""),
        )
    return shown


def _ranked(found: Shadowed, limits: Limits) -> list[Piece]:
    """The pieces for the table: those that fail the limits first, then those with an own error, the largest first."""
    guilty = limits.guilty(found)
    return [*guilty, *(p for p in found.worst() if p not in guilty and p.local)]


def _bar(error: float | None, u: float, limits: Limits, *, ascii_only: bool) -> str:
    """A bar for an error, logarithmic: it starts at a quarter of ``u`` and is full at 16 times the limit."""
    if not error or not u:
        return ""
    top = math.log2(limits.limit * 16 * 4)
    height = 1.0 if not math.isfinite(error) else math.log2(max(error / u * 4, 1.0)) / top
    return ("#" if ascii_only else "━") * max(1, min(_BAR, round(height * _BAR)))


def print_concise(found: Shadowed, console: Console, limits: Limits) -> None:
    """Print a line per piece that fails the limits, then the verdict."""
    for p in limits.guilty(found):
        errors = f"{units(p.local, found.u)} by itself, {units(p.accumulated, found.u)} all the way"
        console.print(f"{clean(p.place)} {_KINDS[p.kind]}: step {p.step}: {errors}", soft_wrap=True)
    console.print(verdict(found, limits)[1], soft_wrap=True)


def markdown(found: Shadowed, run: Mapping[str, Any], limits: Limits, *, worst: int) -> str:
    """The report as a section of a Markdown page."""
    lines = ["## Is it precision?", "", run_facts(run), "", f"**{_plain(verdict(found, limits)[1])}**", ""]
    if found.steps:
        lines += [scope(found) + ".", "", "| worst by its own error | of its | own error | all the way | step |"]
        lines += ["|---|---|---:|---:|---:|"]
        for p in _ranked(found, limits)[:worst]:
            cells = (_KINDS[p.kind], units(p.local, found.u), units(p.accumulated, found.u), str(p.step))
            lines.append(f"| `{_plain(clean(p.place)).replace('`', chr(39))}` | {' | '.join(cells)} |")
        for what, drawn, words in growth(found, ascii_only=False):
            lines += ["", f"Along the depth, {_plain(clean(what))}: `{drawn}` {_plain(clean(words))}"]
    lines += ["", *notes(found)]
    return "\n".join(lines).rstrip() + "\n"


def _plain(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")


def document(found: Shadowed, run: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The report as JSON values, with all pieces of code in order of execution; infinities are the string "Infinity".

    ``run`` is as in a diagnosis.
    """
    state, sentence = verdict(found, limits)
    guilty = limits.guilty(found)
    return {
        **answer_head(run),
        "verdict": state,
        "sentence": sentence,
        "reference": found.reference or None,
        "narrowest": found.dtype or None,
        "u": found.u or None,
        "limits": jsonable(asdict(limits)),
        "steps": list(found.steps),
        "refused": [{"step": s, "why": why} for s, why in found.refused],
        "bit_for_bit": found.exact if found.steps else None,
        "notes": list(found.notes),
        "pieces": [_piece(p, found.u, p in guilty) for p in found.pieces],
    }


def _piece(p: Piece, u: float, guilty: bool) -> dict[str, Any]:
    own = p.local / u if p.local is not None and u else None
    return {**jsonable(p), "local_u": jsonable(own), "guilty": guilty}
