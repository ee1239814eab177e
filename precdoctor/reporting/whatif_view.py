"""Renders the forecast for tensors in another format (``whatif``) on a terminal and in Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.claims.words import memory, module_label, percent, plural
from precdoctor.diagnosis.offline.whatif.cache import LayerCache, cache_of
from precdoctor.diagnosis.offline.whatif.forecast import Answer, Forecast
from precdoctor.diagnosis.offline.whatif.native import not_native
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.rangebar import RangeBar, range_words
from precdoctor.reporting.run_head import print_head, run_facts
from precdoctor.reporting.tables import Name, left, right, table
from precdoctor.reporting.text import clean, number, tensor_label
from precdoctor.reporting.whatif_report import together

#: Width from which on scale and headroom are shown.
_WIDE = 120
#: Width from which on "saturated" is always shown, and columns are two blanks apart.
_ROOMY = 100
#: Most cells of a range bar.
_BAR = 20


def print_full(answer: Answer, run: Mapping[str, Any], console: Console, *, worst: int) -> None:
    """Print the full report; the table lists at most ``worst`` tensors."""
    print_head(run, console, question(answer))
    console.print(Text(verdict(answer), "pd.bad" if answer.failing else "pd.good" if not answer.unknown else "pd.near"))
    console.print(Text(all_steps(answer)))
    if cached := cache_memory(answer):
        console.print(Text(cached))
    shown = answer.forecasts[:worst]
    if shown:
        console.print(Padding(_table(answer, shown, console), (1, 0, 0, 0)))
    hidden = len(answer.failing) - len(shown)
    if hidden > 0:
        console.print(Text(f"{plural(hidden, 'more tensor')} fail{'s' * (hidden == 1)}: --worst {len(answer.failing)}"))
    for line in remedies(answer):
        console.print(Text(line))
    for line in notes(answer, run):
        console.print(Text(line, "pd.quiet"))


def question(answer: Answer) -> str:
    """The question as a sentence: ``What if E4M3FN, with amax scaling per tensor at each step?``"""
    recipe = answer.question.recipe
    scale = f", loss scale {recipe.loss_scale:g}" if recipe.loss_scale is not None else ""
    return f"What if {recipe.name}, with {recipe.describe()}{scale}?"


def verdict(answer: Answer) -> str:
    """A sentence on how many tensors meet the target."""
    total, failing, unknown = len(answer.forecasts), len(answer.failing), len(answer.unknown)
    steps = plural(len(answer.steps), "recorded step")
    every = f"at each of {steps}" if len(answer.steps) > 1 else f"at the {steps}"
    if failing:
        head = f"{failing} of {plural(total, 'tensor')} {'fails' if failing == 1 else 'fail'}"
    else:
        head = (
            f"{total - unknown} of {plural(total, 'tensor')} hold" if unknown else f"All {plural(total, 'tensor')} hold"
        )
    reasons = {f.unknown for f in answer.unknown}
    why = f" ({reasons.pop()})" if len(reasons) == 1 else ""
    unpredicted = f"; nothing can be predicted for {unknown}{why}" if unknown else ""
    return f"{head}{unpredicted}. Target: {target(answer)} {every}."


def target(answer: Answer) -> str:
    """The target in words: ``flushed at most 0.5 %, none saturated, SQNR at least 20 dB``."""
    limits = answer.question.recipe.limits(answer.question.target)
    parts = [f"flushed at most {percent(limits.max_flushed)}"] if limits.max_flushed < math.inf else []
    if limits.max_saturated < math.inf:
        parts.append(f"saturated at most {percent(limits.max_saturated)}" if limits.max_saturated else "none saturated")
    return ", ".join([*parts, f"SQNR at least {limits.min_sqnr_db:g} dB"])


def all_steps(answer: Answer) -> str:
    """A sentence on the shares of all elements, over all steps, that would be flushed and saturated."""
    sums = together(answer)
    flushed, clipped = (percent(share.estimate) for share in sums.shares())
    elements = quantity(float(sums.elements))
    return f"Over all steps {flushed} of {elements} recorded non-zero elements would be flushed, {clipped} saturated."


def cache_memory(answer: Answer) -> str:
    """A sentence on the memory of the KV cache, as recorded and in the asked format; empty without a cache."""
    layers = cache_of((f.seen for f in answer.forecasts), lambda _: answer.question.recipe)
    return cache_words(layers, f"in {answer.question.recipe.name}") if layers else ""


def cache_words(layers: Sequence[LayerCache], then: str) -> str:
    """``Cache: 1.5 KiB per token in 3 layers of 2 x 8 heads x 32, 816 B in INT8 (53 %).``; ``then`` is ``in INT8``."""
    now, asked = sum(layer.now for layer in layers), sum(layer.asked for layer in layers)
    shapes = {f"{layer.tensors} x {plural(layer.heads, 'head')} x {layer.features}" for layer in layers}
    each = f" of {shapes.pop()}" if len(shapes) == 1 else ""
    saved = f" ({100 * asked / now:.0f} %)" if now else ""
    layers_ = plural(len(layers), "layer")
    return f"Cache: {memory(round(now))} per token in {layers_}{each}, {memory(round(asked))} {then}{saved}."


def quantity(count: float) -> str:
    """A count in short: ``1.2 M``."""
    for unit, each in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= each:
            return f"{count / each:.3g} {unit}"
    return f"{count:.0f}"


def remedies(answer: Answer) -> Iterator[str]:
    """Sentences on the cheapest recipes that would hold for the tensors that fail."""
    if not answer.failing:
        return
    counts = Counter(f.instead.recipe for f in answer.failing if f.instead is not None)
    parts = [
        f"{r.short()} ({r.bits_per_element:.4g} bits) for {plural(count, 'tensor')}"
        for r, count in sorted(counts.items(), key=lambda item: item[0].bits_per_element)
    ]
    if parts:
        yield f"\nCheapest that would hold: {'; '.join(parts)}."
    if lost := sum(f.instead is None for f in answer.failing):
        yield f"{'' if parts else chr(10)}Nothing that was tried holds for {plural(lost, 'tensor')}."


def notes(answer: Answer, run: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on the assumptions behind the numbers, and on rows and tensors left out."""
    recipe = answer.question.recipe
    yield f"\nAsked about: {', '.join(answer.kinds)}. Numbers are of each tensor's worst step, most likely values."
    if recipe.block is not None:
        yield "Blocks run along the last dimension: the numbers hold for products that contract it."
    if recipe.clips_by_design:
        yield "Block scales rounded down clip the largest elements a little (--scale-rule up does not): judged by SQNR."
    if any("bulk" in f.misses for f in answer.failing):
        yield (
            "A few large elements hold most of the energy: integers fail where the smaller nine tenths have less than "
            f"{recipe.limits(answer.question.target).min_bulk_db:g} dB."
        )
    if recipe.format.bits < 8:
        yield "The target is made for 8 bits and more; formats narrower than that rarely meet it."
    if recipe.scaling in {"none", "fixed"} and recipe.loss_scale is None and "grad_output" in answer.kinds:
        scaled = [f for f in answer.forecasts if f.seen.key.kind in {"grad_output", "weight_grad"}]
        if scaled:
            yield "Gradients carry the loss scale they were recorded with, if any; --loss-scale X asks about another."
    lost = [f for f in answer.forecasts if f.lost_before > answer.question.target.max_flushed]
    if lost:
        most = max(lost, key=lambda f: f.lost_before)
        counted = f"what {recipe.name} would flush too is counted" if recipe.block is None else "they are not counted"
        yield (
            f"{plural(len(lost), 'tensor')} had lost elements to the recorded dtype already (most: "
            f"{percent(most.lost_before)} of {clean(place(most, answer))}): {counted}."
        )
    if answer.vectors:
        yield f"Left out: {plural(answer.vectors, 'one-dimensional weight')} (biases, gains); --kind weight has them."
    if answer.non_finite:
        yield f"Left out: {plural(answer.non_finite, 'row')} holding a NaN or +Inf."
    unknown = Counter(f.unknown for f in answer.unknown)
    for why, count in unknown.items() if len(unknown) > 1 else ():  # a single reason is in the verdict
        yield f"Not evaluated: {plural(count, 'tensor')}, {why}."
    yield from filter(None, [not_native([recipe], run.get("device"))])


def place(forecast: Forecast, answer: Answer) -> str:
    """The label of a tensor: ``blocks.0.attn.q weight_grad bias``."""
    key = forecast.seen.key
    return tensor_label(module_label(key.root, key.module, several=answer.several_models), key.kind, key.name)


def _table(answer: Answer, shown: tuple[Forecast, ...], console: Console) -> Table:
    ascii_only, gap = not can_draw(console), 2 if console.width >= _ROOMY else 1
    clipped = console.width >= _ROOMY or any(f.prediction and f.prediction.saturated.estimate for f in shown)
    columns = ["flushed", *(["saturated"] if clipped else []), "SQNR"]
    columns += [*(["headroom", "scale"] if console.width >= _WIDE else []), "step"]
    range_column = left(range_words(answer.question.recipe.format, ascii_only=ascii_only))
    instead = left("would hold") if answer.failing else []
    shown_table = table({"header": "tensor"}, *range_column, *right(*columns), *instead, gap=gap)
    for f in shown:
        by_column = _prediction_cells(f)
        cells: list[RenderableType] = [Name(place(f, answer), "pd.bad" if f.misses else ""), bar(f, answer, ascii_only)]
        cells += [by_column.get(column, Text("–", "pd.quiet")) for column in columns]
        shown_table.add_row(*cells, *([Text(would_hold(f))] if answer.failing else []))
    return shown_table


def _prediction_cells(f: Forecast) -> dict[str, Text]:
    """The cells of one tensor by column; empty without a prediction."""
    p = f.prediction
    if p is None:
        return {}
    return {
        "flushed": Text(percent(f.flushed), "pd.bad" if "flushed" in f.misses else ""),
        "saturated": Text(percent(p.saturated.estimate), "pd.bad" if "saturated" in f.misses else ""),
        "SQNR": Text(decibels(p.sqnr_db.estimate), "pd.bad" if {"sqnr", "bulk"} & set(f.misses) else ""),
        "headroom": Text(binades(p.headroom_binades.estimate)),
        "scale": Text(number(p.scale)),
        "step": Text(number(f.step)),
    }


def would_hold(f: Forecast) -> str:
    """The recipe that would hold for a tensor that fails, or ``nothing``; empty for a tensor that holds."""
    if f.holds is not False or f.instead is None:
        return "" if f.holds is not False else "nothing"
    return f.instead.recipe.short() if f.instead.recipe.grouping else f.instead.recipe.name


def bar(forecast: Forecast, answer: Answer, ascii_only: bool) -> Text:
    """The range bar of the tensor's exponents over all steps, after scaling, on the range of the asked format."""
    drawn: ExponentHistogram = forecast.drawn
    evidence = {"dtype": answer.question.recipe.format.dtype, "exp_lo": drawn.lo, "exp_hist": drawn.counts}
    drawing = RangeBar.of(evidence, _BAR)
    return Text("–", "pd.quiet") if drawing is None else drawing.text(ascii_only=ascii_only, ends=False)


def decibels(value: float) -> str:
    """An SQNR: ``31.2 dB``; ``exact`` for +Inf, ``lost`` for -Inf."""
    return "exact" if value == math.inf else "lost" if value == -math.inf else f"{round(value, 1) + 0.0:.1f} dB"


def binades(value: float) -> str:
    """Binades with one decimal; an en dash for Inf, the headroom of a tensor without a non-zero element."""
    return f"{round(value, 1) + 0.0:.1f}" if math.isfinite(value) else "–"


def print_concise(answer: Answer, console: Console) -> None:
    """Print one line per tensor that fails, then the verdict."""
    for f in answer.failing:
        assert f.prediction is not None
        p = f.prediction
        held = f"; {f.instead.recipe.short()} would hold" if f.instead else "; nothing tried holds"
        console.print(
            f"{clean(place(f, answer))}: step {f.step}: flushed {percent(f.flushed)}, saturated "
            f"{percent(p.saturated.estimate)}, SQNR {decibels(p.sqnr_db.estimate)}{held}",
            soft_wrap=True,
        )
    console.print(verdict(answer), soft_wrap=True)


def markdown(answer: Answer, run: Mapping[str, Any], *, worst: int) -> str:
    """The report as a section of a Markdown page; the table has at most ``worst`` tensors."""
    lines = [f"## {question(answer)}", "", run_facts(run), "", verdict(answer), "", all_steps(answer), ""]
    lines += [cached, ""] if (cached := cache_memory(answer)) else []
    lines += [
        "| tensor | flushed | saturated | SQNR | headroom | scale | step | would hold |",
        "|---|" + "---:|" * 6 + "---|",
    ]
    columns = ("flushed", "saturated", "SQNR", "headroom", "scale", "step")
    for f in answer.forecasts[:worst]:
        by_column = _prediction_cells(f)
        cells = [by_column[column].plain if by_column else "–" for column in columns]
        name = clean(place(f, answer)).replace("|", "\\|").replace("`", "'")
        lines.append(f"| `{name}` | {' | '.join(cells)} | {would_hold(f)} |")
    lines += [line.strip("\n") for line in ("", *remedies(answer), *notes(answer, run))]
    return "\n".join(lines) + "\n"
