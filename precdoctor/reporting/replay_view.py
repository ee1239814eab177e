"""Prints what-if replays of a log: loss scalers, FP8 recipes, accumulators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.offline.replay.accumulator import AccumulatorReplay, LengthErrors
from precdoctor.diagnosis.offline.replay.fp8 import RecipeReplay
from precdoctor.diagnosis.offline.replay.loss_scale import LossScaleReplay
from precdoctor.diagnosis.offline.replay.specs import spell_policy
from precdoctor.diagnosis.survey.rows import grouped
from precdoctor.numerics.accumulation import Rounding
from precdoctor.numerics.cells import Estimate
from precdoctor.reporting import tables
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.formats_view import error
from precdoctor.reporting.run_head import print_head
from precdoctor.reporting.sparkline import sparkline
from precdoctor.reporting.tables import folded, grid, left, right
from precdoctor.reporting.text import clean, number, power, spans, tensor_label

_SHOWN_STEPS = 4
_CAVEAT = "Recorded gradients are taken as they are: skipping other steps would change later ones a little."


def _table(console: Console, *columns: str) -> Table:
    """A table with text in the first column and numbers in the others."""
    first, *others = columns
    numbers = ({"header": title, "justify": "right"} for title in others)
    return tables.table(*folded(first), *numbers, gap=2 if console.width >= 100 else 1)


def _notes(notes: Sequence[str], console: Console) -> None:
    for i, note in enumerate(notes):
        console.print(Text("\n" * (i == 0) + clean(note), "pd.quiet"))


def share(estimate: Estimate | None) -> str:
    """A share: ``0.2 %``, with its bounds if they differ: ``0.2 % (0 % to 1.3 %)``; an en dash for None."""
    if estimate is None:
        return "–"
    low, middle, high = (percent(x) for x in (estimate.low, estimate.estimate, estimate.high))
    return middle if low == middle == high else f"{middle} ({low} to {high})"


# -- loss scaling -----------------------------------------------------------------------------------------------------


def print_loss_scale(answer: LossScaleReplay, run: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the scales over time, a table of policies, and the tensors that made the scale back off."""
    searched = bool(answer.scores)
    asked = "the best loss scaler" if searched else f"the loss scaler {spell_policy(answer.replay.policy)}"
    print_head(run, console, f"What if this run had had {asked}?")
    console.print(Text(_verdict(answer), "pd.bad" if answer.overflows > len(answer.recorded_overflows) else "pd.good"))
    console.print(Text(_sureness(answer)))
    _print_scales(answer, console)
    console.print(Padding(_policies(answer, console), (1, 0, 0, 0)))
    if answer.culprits:
        _print_culprits(answer, console)
    _notes([*answer.notes, _CAVEAT], console)


def _verdict(answer: LossScaleReplay) -> str:
    total = plural(len(answer.run.updates), "step")
    head = f"{answer.overflows} of {total} would be skipped"
    if answer.scores:
        head = f"{spell_policy(answer.replay.policy)} loses least: {head}"
    if any(scale is not None for scale in answer.recorded_scales):
        head += f"; the run itself skipped {len(answer.recorded_overflows)}"
    flushed = answer.replay.flushed
    if flushed is None:
        return f"{head}. What would be flushed is not known: no sampled step is left."
    where = f"on {plural(answer.replay.flushed_steps, 'sampled step')}"
    return f"{head}. Gradient elements flushed to zero {where}: {share(flushed)}."


def _sureness(answer: LossScaleReplay) -> str:
    doubt = answer.replay.uncertain_steps
    if not doubt:
        return "The log shows for every step whether it overflows at that scale."
    return (
        f"On {doubt} of {plural(len(answer.run.updates), 'step')} the log does not prove whether they overflow at that "
        "scale; the likelier is taken."
    )


def _print_scales(answer: LossScaleReplay, console: Console) -> None:
    shown = grid(*left("", style="pd.label"), *right(""), *left(""), *right(""))
    width = max(16, min(72, console.width - 44))
    series: dict[str, Sequence[float | None]] = {
        "this scaler": [s.scale for s in answer.replay.steps],
        "recorded": answer.recorded_scales,
        "largest clean": [i.estimate if 0.0 < i.estimate < math.inf else None for i in answer.ideal],
    }
    for title, values in series.items():
        present = [v for v in values if v is not None]
        if present:
            line = sparkline(values, width, ascii_only=not can_draw(console), log=True)
            shown.add_row(title, power(present[0]), Text(line, "pd.code"), power(present[-1]))
    console.print(Padding(shown, (1, 0, 0, 0)))


def _policies(answer: LossScaleReplay, console: Console) -> Table:
    table = _table(console, "policy", "skipped", "flushed", "lowest", "highest")
    replay = answer.replay
    scales = [s.scale for s in replay.steps]
    row = (str(answer.overflows), percent(_middle(replay.flushed)), power(min(scales)), power(max(scales)))
    table.add_row(Text(spell_policy(replay.policy), "pd.strong"), *row)
    for score in answer.scores[1:]:
        cells = (str(score.skipped), percent(score.flushed), power(score.lowest), power(score.highest))
        table.add_row(spell_policy(score.policy), *cells)
    recorded = [scale for scale in answer.recorded_scales if scale is not None]
    if recorded:
        named = f"the run: {spell_policy(answer.used)}" if answer.used else "the run itself"
        range_ = (power(min(recorded)), power(max(recorded)))
        flushed = percent(_middle(answer.recorded_flushed))
        table.add_row(Text(named, "pd.quiet"), str(len(answer.recorded_overflows)), flushed, *range_)
    return table


def _middle(estimate: Estimate | None) -> float | None:
    return estimate.estimate if estimate is not None else None


def _print_culprits(answer: LossScaleReplay, console: Console) -> None:
    examined = f"{len(answer.culprits)} of {plural(answer.overflows, 'overflow')}"
    console.print(Text(f"\nWhat overflows first, {examined} examined", "pd.strong"))
    by_tensor = grouped(((c.root, c.module, c.kind, c.name), c) for c in answer.culprits)
    table = _table(console, "tensor", "overflows", "at steps", "seen")
    for (root, module, kind, name), found in sorted(by_tensor.items(), key=lambda item: -len(item[1])):
        label = clean(tensor_label(module or root, kind, name))
        if any(c.forward for c in found):
            label += " (forward: no loss scale mends it)"
        how = ", ".join(sorted({c.how for c in found}))
        table.add_row(label, str(len(found)), spans([c.step for c in found], _SHOWN_STEPS), how)
    console.print(table)


# -- FP8 recipes ------------------------------------------------------------------------------------------------------


_OWN_SCALES = (
    "Each block has a scale of its own, taken from itself: nothing goes stale. Power-of-two scales that are rounded "
    "down (OCP MX) clip the largest elements of a block a little."
)


def print_recipe(
    replays: Sequence[RecipeReplay], best: RecipeReplay | None, run: Mapping[str, Any], console: Console, *, worst: int
) -> None:
    """Print totals, a table of recipes if there was a search, and the ``worst`` tensors under the chosen recipe."""
    chosen = best or replays[0]
    print_head(
        run, console, f"What if tensors had been cast with {'the best delayed scaling' if best else chosen.recipe}?"
    )
    head = f"{chosen.recipe} loses least: " if best else ""
    words = f"{head}{share(chosen.saturated)} of the elements saturate, {share(chosen.flushed)} are flushed to zero."
    console.print(Text(words))
    total = plural(len(chosen.tensors), "tensor")
    if chosen.stale_tensors:
        behind = f"The scale is stale on at least one step of {chosen.stale_tensors} of {total}: amax jumps past it."
        console.print(Text(behind, "pd.bad"))
    elif chosen.history:
        console.print(Text(f"No scale is stale on any step of {total}.", "pd.good"))
    if chosen.stale_tensors:
        _print_steps(chosen, console)
    if best:
        console.print(Padding(_recipes(replays, best, console), (1, 0, 0, 0)))
    if worst and chosen.tensors:
        console.print(Padding(_tensors(chosen, worst, console), (1, 0, 0, 0)))
    _notes(_recipe_notes(chosen), console)


def _print_steps(replay: RecipeReplay, console: Console) -> None:
    """Print the share that saturates, and the number of tensors with a stale scale, over the recorded steps."""
    shown = grid(*left("", style="pd.label"), *left(""), *right(""))
    width = max(16, min(72, console.width - 60))
    worst = max(replay.steps, key=lambda s: (s.saturated.estimate, s.stale_tensors))
    most = max(replay.steps, key=lambda s: s.stale_tensors)
    saturated = [s.saturated.estimate for s in replay.steps]
    stale = [float(s.stale_tensors) for s in replay.steps]
    plain = not can_draw(console)
    peak = f"at most {percent(worst.saturated.estimate)}, step {worst.step}"
    shown.add_row("saturated", Text(sparkline(saturated, width, ascii_only=plain), "pd.code"), peak)
    peak = f"at most {most.stale_tensors}, step {most.step}"
    shown.add_row("stale tensors", Text(sparkline(stale, width, ascii_only=plain), "pd.code"), peak)
    console.print(Padding(shown, (1, 0, 0, 0)))


def _recipes(replays: Sequence[RecipeReplay], best: RecipeReplay, console: Console) -> Table:
    table = _table(console, "recipe", "saturated", "flushed", "stale tensors")
    for replay in sorted(replays, key=lambda r: r.rank):
        cells = (percent(replay.saturated.estimate), percent(replay.flushed.estimate), str(replay.stale_tensors))
        table.add_row(Text(replay.recipe, "pd.strong" if replay is best else ""), *cells)
    return table


def _tensors(replay: RecipeReplay, worst: int, console: Console) -> Table:
    behind = ("stale steps", "worst", "padding") if replay.history else ()
    table = _table(console, "tensor", "format", "saturated", "flushed", *behind)
    for t in replay.tensors[:worst]:
        cells = [t.format, percent(t.saturated.estimate), percent(t.flushed.estimate)]
        if replay.history:
            furthest = f"{t.worst.binades:.1f} binades, step {t.worst.step}" if t.worst else "–"
            padding = "–" if t.padding_binades is None else f"{round(t.padding_binades, 1) + 0.0:.1f}"
            cells += [f"{t.stale_steps} of {t.steps}", furthest, padding]
        label = clean(tensor_label(t.module or t.root, t.kind, t.name))
        table.add_row(Text(label, "pd.bad" if t.stale_steps else ""), *cells)
    return table


def _recipe_notes(replay: RecipeReplay) -> list[str]:
    if not replay.history:
        return [_OWN_SCALES]
    notes = ["Padding: median binades between amax times scale and the largest number."]
    cold, sparse, bad = (
        sum(getattr(t, name) for t in replay.tensors) for name in ("cold_steps", "sparse_steps", "non_finite_steps")
    )
    if cold:
        notes.append(f"{plural(cold, 'tensor step')} with an empty history (scale 1) are not counted.")
    if sparse:
        notes.append(
            f"On {plural(sparse, 'tensor step')} no sample lies within the history, so an older amax stands in: the "
            "run's own scales would be fresher. Record with --every 1 to be sure."
        )
    if bad:
        notes.append(
            f"On {plural(bad, 'tensor step')} the history holds a NaN or Inf. It is left out here; implementations "
            "that admit it keep the old scale until it has passed through."
        )
    return notes


# -- accumulators -----------------------------------------------------------------------------------------------------

_EXTREMES = (
    "Root-mean-square error of a sum over that of the exact sums, for operands at the two extremes: of mean 0, and all "
    "of one sign. Real operands lie between."
)


def print_accumulator(answer: AccumulatorReplay, run: Mapping[str, Any], console: Console, *, worst: int) -> None:
    """Print one line per length of sum, the longest first, at most ``worst`` lines."""
    a = answer.accumulator
    promoted = f", promoted to FP32 every {a.promote} products" if a.promote else ", never promoted"
    print_head(run, console, f"What if matrix units accumulated in {a.bits} bits{promoted}?")
    table = _table(console, "sum of", "zero-mean", "same-sign", "FP32", "products")
    for entry in answer.lengths[:worst]:
        fp32 = max(entry.fp32_zero_mean.relative, entry.fp32_same_sign.relative)
        errors = (error(entry.zero_mean.relative), error(entry.same_sign.relative), error(fp32))
        table.add_row(number(entry.length), *errors, _example(entry))
    table.columns[-1].justify = "left"
    console.print(Padding(table, (1, 0, 0, 0)))
    if len(answer.lengths) > worst:
        console.print(Text(f"{plural(len(answer.lengths) - worst, 'shorter length')} not shown: --worst", "pd.quiet"))
    beyond = "cut off" if a.rounding is Rounding.TOWARD_ZERO else "rounded to nearest"
    _notes(
        [_EXTREMES, f"Products are aligned in groups of {a.group}; bits beyond are {beyond}.", *answer.notes], console
    )


def _example(entry: LengthErrors) -> str:
    first = entry.products[0]
    more = f" and {len(entry.products) - 1} more" if len(entry.products) > 1 else ""
    return clean(f"{first.module or first.root} {first.role}{more}")
