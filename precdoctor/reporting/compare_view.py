"""Prints a comparison of two runs: first difference, loss, ``--apply``, regressions, drift; also its JSON section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.comparison.compare import LOSS_GAP, Comparison
from precdoctor.comparison.divergence import Divergence
from precdoctor.comparison.drift import MOVED, Drift
from precdoctor.comparison.pairing import subject
from precdoctor.comparison.predictions import Applied, Outcome
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.prescriptions.file import effect_as_dict
from precdoctor.diagnosis.survey.rows import Key, grouped
from precdoctor.reporting.finding_view import KINDS
from precdoctor.reporting.tables import Name, folded, right, table
from precdoctor.reporting.text import clean, number
from precdoctor.runlog.atomic import jsonable

#: Most tensors in a table, and in the JSON report.
TOP = 10
JSON_TENSORS = 500
#: Tensors that moved by at most this many binades are not listed.
_QUIET = 0.05
_VERDICTS = {True: ("came true", "pd.good"), False: ("missed", "pd.bad"), None: ("not measured", "pd.near")}


def print_compare(comparison: Comparison, console: Console, *, concise: bool = False) -> None:
    """Print the comparison; ``concise`` leaves out the tables of drifts."""
    for name, path in (("A", comparison.a), ("B", comparison.b)):
        console.print(Text.assemble((f"{name}  ", "pd.label"), clean(path)), soft_wrap=True)
    console.print(Text(_scope(comparison), "pd.quiet"))
    console.print()
    _print_bits(comparison, console)
    console.print(Text(_loss(comparison)))
    if comparison.applied is not None:
        print_applied(comparison.applied, console)
    for note in comparison.notes:
        console.print(Text(f"{clean(note[:1].upper() + note[1:])}.", "pd.near"))
    _print_lines(comparison, console)
    if not concise:
        _print_drifts(comparison, console)


def _scope(c: Comparison) -> str:
    parts = [
        plural(len(c.common_steps), "common step"),
        f"{number(len(c.sampled_steps))} of them compared tensor by tensor",
        f"{plural(c.paired, 'tensor')} paired",
    ]
    parts += [f"{number(len(c.renamed))} modules under another name"] if c.renamed else []
    parts += [f"{number(len(c.only_a))} only in A (such as {clean(c.only_a[0])})"] if c.only_a else []
    parts += [f"{number(len(c.only_b))} only in B (such as {clean(c.only_b[0])})"] if c.only_b else []
    return "; ".join(parts)


def _print_bits(c: Comparison, console: Console) -> None:
    bits = c.bits
    if not bits.compared and bits.first is None:
        console.print(Text("No tensor has a fingerprint in both runs; bits were not compared.", "pd.near"))
    elif bits.first is None:
        words = f"Equal in every bit: {plural(bits.compared, 'tensor')} on {plural(bits.steps, 'step')}."
        console.print(Text(words, "pd.good"))
    else:
        console.print(Text(f"The runs part at step {bits.first.step}: {_named(bits.first)}", "pd.strong"))
        before = bits.first.sentence
        console.print(Padding(Text(clean(before)), (0, 0, 0, 2)))


def _named(first: Divergence) -> str:
    _, module, kind, name, call = first.key
    owner = f"{module or first.key[0] or 'the loss'}" + (f" ({first.module_class})" if first.module_class else "")
    words = [owner, "" if kind == "loss" else KINDS.get(kind, kind), name, f"call {call}" if call else ""]
    return clean(f"{' '.join(w for w in words if w)}, {first.phase.value}, rank {first.rank}")


def _loss(c: Comparison) -> str:
    if c.loss_a is None or c.loss_b is None:
        return "No loss was recorded on a common step."
    gap = c.loss_b - c.loss_a
    apart = f" ({gap:+.4g})" if math.isfinite(gap) else ""
    losses = f"Loss at step {c.common_steps[-1]}: A {number(c.loss_a)}, B {number(c.loss_b)}{apart}"
    if c.loss_differs_at is None:
        return f"{losses}; equal on all common steps."
    if c.loss_gap_at is None:
        return f"{losses}; differs from step {c.loss_differs_at}, within {LOSS_GAP} at the end."
    return f"{losses}; differs from step {c.loss_differs_at}, by more than {LOSS_GAP} from step {c.loss_gap_at}."


def _print_lines(c: Comparison, console: Console) -> None:
    """Print one line per failed regression, the most severe first: its worst subject, and the number of others."""
    ordered = sorted(c.lines, key=lambda line: (-line.severity.weight, line.code))
    groups = grouped((line.check, line) for line in ordered if not line.passed)
    if not groups:
        return
    console.print(f"\nWorse in B ({plural(sum(map(len, groups.values())), 'regression')}):")
    for check, (line, *others) in groups.items():
        text = f"{line.subject}: A {line.expected}, B {line.found}, limit {line.limit}"
        more = f"; and {number(len(others))} more" if others else ""
        style = f"pd.{line.severity.value}"
        console.print(Padding(Text.assemble((clean(check), style), "  ", clean(text) + more), (0, 0, 0, 2)))


def _print_drifts(c: Comparison, console: Console) -> None:
    twice = {d.key for d in c.drifts}
    shown = [d for d in c.drifts if _gradient_of(d) not in twice]
    moved = [d for d in c.first_to_move if d in shown]
    if moved:
        console.print(f"\nFirst to move by more than {MOVED} binades and stay there:")
        console.print(Padding(_table(moved[:TOP]), (0, 0, 0, 2)))
    most = [d for d in shown if d.typical > _QUIET and d not in moved[:TOP]][:TOP]
    if most:
        heading = "Of the others, moved most" if moved else "Moved most"
        console.print(f"\n{heading}, median over the steps:")
        console.print(Padding(_table(most), (0, 0, 0, 2)))
    known = max((d.steps.size for d in c.drifts), default=0)
    if not known:
        console.print("\nNo tensor has finite elements other than zero in both runs on a step that both sampled.")
    elif not moved and not most:
        few = f", on {plural(known, 'step')}: on others they are not finite" if known < len(c.sampled_steps) / 2 else ""
        console.print(f"\nNo tensor moved by more than {_QUIET} binades{few}.")


def _gradient_of(drift: Drift) -> Key | None:
    """For a ``weight_grad_step`` the key of its ``weight_grad``, with which it moves; None for other kinds."""
    root, module, kind, name, call = drift.key
    return (root, module, "weight_grad", name, call) if kind == "weight_grad_step" else None


def _table(drifts: Sequence[Drift]) -> Table:
    made = table({"header": "tensor"}, *right("from step", "moved", "amax", "E[x²]", "zeros"))
    for drift in drifts:
        made.add_row(Name(subject(drift.key)), *_cells(drift))
    return made


def _cells(drift: Drift) -> Iterator[str]:
    yield "" if drift.moved_at is None else str(drift.moved_at)
    yield f"{drift.typical:.2f} bin"
    yield "–" if drift.amax_binades is None else f"{drift.amax_binades:+.2f} bin"
    yield "–" if drift.second_moment_ratio is None else f"× {drift.second_moment_ratio:.3g}"
    share = drift.zero_share
    yield "–" if share is None or abs(share) < 1e-12 else f"{'+' if share > 0 else '-'}{percent(abs(share))}"


def compare_section(comparison: Comparison) -> dict[str, Any]:
    """The ``compare`` object of the JSON report; it has ``applied`` only if B was recorded with ``--apply``."""
    first = comparison.bits.first
    return {
        "a": comparison.a,
        "b": comparison.b,
        "common_steps": len(comparison.common_steps),
        "compared_steps": list(comparison.sampled_steps),
        "paired": comparison.paired,
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
        "renamed": [{"b": new, "a": old} for new, old in comparison.renamed],
        "bitwise": {
            "equal": first is None and comparison.bits.compared > 0,
            "compared": comparison.bits.compared,
            "first_difference": None if first is None else {**jsonable(first), "meaning": first.meaning},
        },
        "loss": jsonable(
            {
                "a": comparison.loss_a,
                "b": comparison.loss_b,
                "differs_at": comparison.loss_differs_at,
                "gap_at": comparison.loss_gap_at,
                "gap_limit": LOSS_GAP,
            }
        ),
        "tensors": [_tensor(d) for d in comparison.drifts[:JSON_TENSORS]],
        "notes": list(comparison.notes),
        **({} if comparison.applied is None else {"applied": applied_section(comparison.applied)}),
    }


def _tensor(drift: Drift) -> dict[str, Any]:
    root, module, kind, name, call = drift.key
    values = {
        "moved_at": drift.moved_at,
        "distance_binades": drift.typical,
        "largest_distance_binades": drift.largest,
        "amax_binades": drift.amax_binades,
        "second_moment_ratio": drift.second_moment_ratio,
        "zero_share": drift.zero_share,
        "steps": len(drift.steps),
    }
    place = {"root": root, "module": module, "kind": kind, "name": name, "call": call}
    return jsonable({**place, "dtype_a": drift.dtypes[0], "dtype_b": drift.dtypes[1], **values})


def print_applied(applied: Applied, console: Console) -> None:
    """Print the applied changes, one per line, and a table of predicted and measured effects."""
    console.print("\nB was recorded with --apply:")
    if applied.problem:
        console.print(Text(f"  its own account of it cannot be read: {clean(applied.problem)}", "pd.near"))
    for line in applied.done:
        console.print(Padding(Text(clean(line, 200)), (0, 0, 0, 2)))
    if not applied.outcomes:
        return
    shown_table = table(*folded("predicted effect"), *right("A", "predicted", "measured in B", ""))
    for outcome in applied.outcomes:
        words, style = ("went further", "pd.near") if outcome.went_further else _VERDICTS[outcome.came_true]
        cells = (outcome.before, outcome.effect.after, outcome.measured)
        shown_table.add_row(subject_of(outcome), *(shown(outcome, v) for v in cells), Text(words, style))
    console.print(Padding(shown_table, (0, 0, 0, 2)))


def subject_of(outcome: Outcome) -> str:
    """The effect's name in the table: ``PD201 gradient elements flushed to zero, blocks.3.mlp grad_output``."""
    scope = outcome.effect.scope
    place = " ".join(p for p in (".".join(filter(None, (scope.module, scope.name))), scope.kind) if p)
    return clean(f"{outcome.code} {outcome.effect.measure.doc}" + (f", {place}" if place else ""), 120)


def shown(outcome: Outcome, value: float | None) -> str:
    """A value of the effect, formatted in the measure's unit; ``-`` for None."""
    if value is None:
        return "-"
    unit = outcome.effect.measure.unit
    if unit == "share":
        return percent(value)
    return plural(int(value), "step") if unit == "steps" else f"{value:.3g}"


def applied_section(applied: Applied) -> dict[str, Any]:
    """The ``applied`` object under ``compare`` in the JSON report."""
    return {
        "changes": [{"code": p.code, **c.as_dict()} for p in applied.prescriptions for c in p.changes],
        "done": list(applied.done),
        "problem": applied.problem or None,
        "effects": [
            jsonable(
                {
                    "code": o.code,
                    **effect_as_dict(o.effect),
                    "before": o.before,
                    "measured": o.measured,
                    "measured_steps": o.steps,
                    "came_true": o.came_true,
                }
            )
            for o in applied.outcomes
        ],
    }
