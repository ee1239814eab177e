"""Names in narrow table cells."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from precdoctor.reporting.console import make_console
from precdoctor.reporting.tables import Name, wrapped


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, ["transformer.h.0.attn.c_proj grad_output"]),
        (30, ["transformer.h.0.attn.c_proj ", "grad_output"]),
        (27, ["transformer.h.0.attn.c_proj ", "grad_output"]),
        (21, ["transformer.h.0.attn.", "c_proj grad_output"]),
        (12, ["transformer.", "h.0.attn.", "c_proj ", "grad_output"]),
        (7, ["transformer.", "h.0.", "attn.", "c_proj ", "grad_", "output"]),
    ],
)
def test_lines_end_where_a_reader_ends_them(width, lines):
    assert list(wrapped("transformer.h.0.attn.c_proj grad_output", width)) == lines


@given(st.text("abc._ [é層", max_size=40), st.integers(1, 40))
def test_nothing_is_lost(name, width):
    assert "".join(wrapped(name, width)) == name


@pytest.mark.parametrize("width", [20, 30, 60])
def test_a_table_cell_shows_all_of_a_name_and_no_more_than_its_width(width):
    out = io.StringIO()
    table = Table(box=None, show_header=False, header_style="pd.label")
    table.add_column("tensor")
    table.add_column("amax", no_wrap=True)
    table.add_row(Name("encoder.averyveryverylongnamewithoutanybreak.weight[x]"), "12.5")
    console = make_console(out, width)
    console.print(table)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = "".join(line.replace("12.5", "").strip() for line in lines)
    assert shown == "encoder.averyveryverylongnamewithoutanybreak.weight[x]"
