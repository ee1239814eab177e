"""Prints number formats: the table of all, one format in detail, or one number in every format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.claims.words import percent
from precdoctor.numerics.bitview import BitView, Update
from precdoctor.numerics.blocks import BlockFormat
from precdoctor.numerics.casting_array import decode
from precdoctor.numerics.formats import Format, Kind
from precdoctor.reporting import tables
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.tables import Column, left, right

#: From this width on, a number's stored values and its neighbours share one table.
_WIDE = 120
#: Colours of the fields of a code.
_SIGN, _EXPONENT, _MANTISSA = "pd.bad", "pd.code", "pd.near"
_OUTCOMES = {
    "exact": "pd.good",
    "subnormal": "pd.near",
    "flushed": "pd.bad",
    "saturated": "pd.bad",
    "overflow": "pd.bad",
    "not representable": "pd.bad",
}


def print_formats(formats: Sequence[Format], blocks: Sequence[BlockFormat], console: Console) -> None:
    """Print the table of ``precdoctor formats``."""
    ranges = right("max", "min normal", "smallest", "binades", "ulp at 1", "Inf", "NaN")
    table = _table(console, *left("format"), *right("bits"), *left("fields"), *ranges)
    for f in formats:
        integer = f.kind is Kind.INTEGER
        table.add_row(
            Text(f.name, "pd.strong"),
            str(f.bits),
            fields(f),
            short(f.max),
            "–" if integer else power(f.min_normal),
            power(f.min_subnormal),
            f"{f.binades:.1f}",
            power(f.ulp_at_one),
            "yes" if f.has_infinity else "–",
            "–" if f.nan.name == "NONE" else "yes",
        )
    console.print(table)
    console.print(Text("\nBlock formats", "pd.strong"))
    words = left("format", "elements", "scale", "block", "scale rule")
    shared = _table(console, *words, *right("bits/element"))
    for b in blocks:
        scale = b.scale.name + (f", {b.tensor_scale.name} per tensor" if b.tensor_scale else "")
        block = f"{b.block[0]}x{b.block[1]}"
        shared.add_row(
            Text(b.name, "pd.strong"), b.element.name, scale, block, b.rule.value, f"{b.bits_per_element:.4g}"
        )
    console.print(shared)
    console.print(
        Text("\nfields: sign.exponent.mantissa; binades: from the smallest number to the largest", "pd.quiet")
    )
    console.print(Text("One of them: precdoctor formats e4m3. One number in all: precdoctor formats 1e-5", "pd.quiet"))


def print_format(fmt: Format, console: Console) -> None:
    """Print one format: its fields, its range, and every code point if there are at most 256."""
    console.print(Text.assemble((fmt.name, "pd.strong"), f"  {fmt.source}", ("" if fmt.stored else "  compute only")))
    _print_facts(_facts(fmt), console)
    if fmt.bits > 8:
        return
    console.print(Text("\nCode points", "pd.strong"))
    if fmt.kind is Kind.FLOAT:
        _print_by_exponent(fmt, console)
    else:
        _print_in_order(fmt, console)


def print_block_format(fmt: BlockFormat, console: Console) -> None:
    """Print one block format: its parts, its scale rule and its memory."""
    console.print(Text.assemble((fmt.name, "pd.strong"), f"  {fmt.source}"))
    facts = [
        ("elements", f"{fmt.element.name}, {fmt.element.bits} bits, at most {short(fmt.element.max)}"),
        ("block", f"{fmt.block[0]} x {fmt.block[1]} elements share a scale; columns run along the last dimension"),
        ("scale", f"{fmt.scale.name}, {fmt.scale.bits} bits"),
        ("tensor scale", fmt.tensor_scale.name if fmt.tensor_scale else "none"),
        ("scale rule", f"{fmt.rule.value}: {_RULES[fmt.rule.value]}"),
        ("memory", f"{fmt.bits_per_element:.4g} bits per element"),
    ]
    _print_facts(facts, console)


_RULES = {
    "floor": "2^(floor(log2 amax) - exponent of the largest element); may clip",
    "up": "the smallest power of two that clips nothing",
    "amax": "amax over the largest element, rounded to the scale's format",
}


def print_number(value: float, views: Sequence[BitView], console: Console) -> None:
    """Print one number in every format: bits, stored value and error, neighbours, smallest updates that stick."""
    console.print(Text.assemble((f"{value!r}", "pd.strong"), f"  {value.hex()}" if math.isfinite(value) else ""))
    legend = Text.assemble(("sign", _SIGN), " ", ("exponent", _EXPONENT), " ", ("mantissa", _MANTISSA))
    console.print(Text.assemble("\nBits: ", legend))
    bits = _table(console, *left("", style="pd.strong"), *left(""), header=False)
    for view in views:
        parts = [(view.sign, _SIGN), (view.exponent, _EXPONENT), (view.mantissa, _MANTISSA)]
        fields_ = [part for part in parts if part[0]]
        text = Text(" ").join([Text(*part) for part in fields_]) if fields_ else Text("–", "pd.quiet")
        bits.add_row(view.format, text)
    console.print(bits)
    if console.width >= _WIDE:
        _print_views("Value, neighbours, and the smallest update that sticks", [*_VALUE, *_AROUND], views, console)
    else:
        _print_views("Value", _VALUE, views, console)
        _print_views("Neighbours, and the smallest update that sticks", _AROUND, views, console)


_VALUE = ("stored", "error", "outcome")
_AROUND = ("next below", "next above", "update down", "update up")


def _print_views(title: str, columns: Sequence[str], views: Sequence[BitView], console: Console) -> None:
    console.print(Text(f"\n{title}", "pd.strong"))
    shown = (column for title in columns for column in (left if title == "outcome" else right)(title))
    table = _table(console, *left("format", style="pd.strong"), *shown)
    draws = can_draw(console)
    for view in views:
        digits = min(_digits(view), 17 if console.width >= _WIDE else 15)
        cells: dict[str, str | Text] = {
            "stored": short(view.stored),
            "error": error(view.relative_error),
            "outcome": Text(view.outcome, _OUTCOMES.get(view.outcome, "")),
            "next below": short(view.below, digits),
            "next above": short(view.above, digits),
            "update down": update(view.down, draws=draws),
            "update up": update(view.up, draws=draws),
        }
        table.add_row(view.format, *(cells[column] for column in columns))
    console.print(table)


def _digits(view: BitView) -> int:
    """The number of significant digits that distinguish a number from its neighbours, 6 to 17."""
    values = {v for v in (view.below, view.stored, view.above) if v is not None}
    return next((d for d in range(6, 17) if len({f"{v:.{d}g}" for v in values}) == len(values)), 17)


def _facts(fmt: Format) -> Iterator[tuple[str, str]]:
    yield "dtype", fmt.dtype
    yield "fields", f"{fmt.sign_bits} sign, {fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa: {fmt.bits} bits"
    if fmt.kind is not Kind.INTEGER:
        yield "bias", str(fmt.bias)
    yield "largest", exact(fmt.max)
    yield "most negative", "none" if fmt.kind is Kind.SCALE else exact(fmt.min)
    if fmt.kind is not Kind.INTEGER:
        yield "smallest normal", exact(fmt.min_normal)
    if fmt.has_subnormals:
        yield "smallest subnormal", exact(fmt.min_subnormal)
    if fmt.kind is not Kind.SCALE:
        flushed = exact(fmt.flush_limit) if fmt.flush_limit else "below any float64"
        yield "rounds to zero", f"up to and including {flushed}"
    if math.isfinite(fmt.overflow_limit):
        word = "from" if fmt.tie_overflows else "above"
        yield "out of range", f"{word} {exact(fmt.overflow_limit)} when rounded to nearest"
    numbers = "integers from 1" if fmt.kind is Kind.INTEGER else "normal numbers"
    yield "range", f"{fmt.binades:.1f} binades, {fmt.decades:.1f} decades of {numbers}"
    yield "ulp at 1", f"{exact(fmt.ulp_at_one)}; half of it is lost when added to 1"
    yield "Inf", "yes" if fmt.has_infinity else "no"
    yield "NaN", fmt.nan.value


def _print_facts(facts: Iterator[tuple[str, str]] | Sequence[tuple[str, str]], console: Console) -> None:
    console.print(Padding(tables.facts(facts), (1, 0, 0, 0)))


def _print_by_exponent(fmt: Format, console: Console) -> None:
    """Print the non-negative code points, one row per exponent, one column per mantissa."""
    table = _table(console, *left("exponent", style=_EXPONENT))
    columns = 1 << fmt.mantissa_bits
    for mantissa in range(columns):
        table.add_column(Text(f"{mantissa:0{fmt.mantissa_bits}b}", _MANTISSA), justify="right", no_wrap=True)
    for exponent in range(1 << fmt.exponent_bits):
        codes = range(exponent * columns, (exponent + 1) * columns)
        table.add_row(f"{exponent:0{fmt.exponent_bits}b}", *(brief(decode(code, fmt)) for code in codes))
    console.print(table)
    negative = " except that negative zero is NaN" if fmt.nan.name == "NEGATIVE_ZERO" else ""
    console.print(Text(f"With the sign bit set, the same below zero{negative}.", "pd.quiet"))


def _print_in_order(fmt: Format, console: Console) -> None:
    """Print all code points in order, eight per row."""
    table = _table(console, *left("code", style="pd.label"), *right(*(f"+{low}" for low in range(8))))
    write = power if fmt.kind is Kind.SCALE else short
    for first in range(0, 1 << fmt.bits, 8):
        table.add_row(f"0x{first:02x}", *(write(decode(first + low, fmt)) for low in range(8)))
    console.print(table)


def _table(console: Console, *columns: Column, header: bool = True) -> Table:
    return tables.table(*columns, gap=1 if console.width < 100 else 2, header=header)


def fields(fmt: Format) -> str:
    """Widths of sign, exponent and mantissa: ``1.4.3``."""
    return f"{fmt.sign_bits}.{fmt.exponent_bits}.{fmt.mantissa_bits}"


def power(value: float) -> str:
    """``2^-9`` for a power of two other than 1; else digits."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent != 1 else brief(value)


def exact(value: float) -> str:
    """Ten significant digits, and ``= 2^-9`` for a power of two."""
    mantissa, exponent = math.frexp(value)
    return f"{value:.10g}" + (f" = 2^{exponent - 1}" if mantissa == 0.5 and exponent != 1 else "")


def short(value: float | None, digits: int = 6) -> str:
    """``digits`` significant digits; an en dash for None."""
    return "–" if value is None else f"{value:.{digits}g}" if math.isfinite(value) else _word(value)


def brief(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}" if math.isfinite(value) else _word(value)


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def error(relative: float | None) -> str:
    """A relative error: in percent from 1e-4 on, below in scientific notation; an en dash for None."""
    if relative is None:
        return "–"
    return percent(relative) if relative == 0.0 or relative >= 1e-4 else f"{relative:.1e}"


def update(step: Update | None, *, draws: bool) -> str:
    """The smallest update that sticks: ``≥ 0.001953``, or ``> 0.001953`` if the tie itself is lost."""
    if step is None:
        return "–"
    return f"{('≥' if draws else '>=') if step.inclusive else '>'} {brief(step.size)}"
