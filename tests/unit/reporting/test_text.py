from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.reporting.text import LIMIT, clean, clean_block, number, percent, plural, size, spans
from tests.support.hostile import NAMES

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


@pytest.mark.parametrize("name", NAMES)
def test_no_hostile_name_keeps_a_control_character(name):
    assert not CONTROL.search(clean(name))
    assert len(clean(name)) <= LIMIT
    assert not CONTROL.search(clean_block(name).replace("\n", ""))


@given(st.text())
def test_clean_is_one_printable_line_and_idempotent(text):
    once = clean(text)
    assert not CONTROL.search(once)
    assert clean(once) == once
    once.encode("utf-8")


def test_harmless_text_is_left_alone():
    assert clean("blocks.3.attn: q @ kᵀ, größer [0]") == "blocks.3.attn: q @ kᵀ, größer [0]"
    assert clean("a\x1b[0m\n") == "a\\x1b[0m\\n"
    assert clean_block("a\n\tb") == "a\n    b"


def test_numbers_as_people_read_them():
    assert [number(v) for v in (None, True, 1234567, 12.0, 0.00012345, 65504.0, float("nan"), float("inf"))] == [
        "–", "yes", "1,234,567", "12", "0.0001234", "65504", "nan", "inf",
    ]  # fmt: skip
    shares = (None, 0.0, 1e-7, 0.0123, 0.41, 0.97, 0.99999, 1.0)
    assert [percent(v) for v in shares] == ["–", "0 %", "<0.01 %", "1.23 %", "41 %", "97 %", ">99.9 %", "100 %"]
    assert [size(v) for v in (0, 1023, 1024, 3 << 20, 5 << 30)] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5.0 GiB"]
    assert [plural(1, "step"), plural(0, "batch"), plural(2000, "row")] == ["1 step", "0 batches", "2,000 rows"]


def test_step_ranges():
    assert spans([]) == "none"
    assert spans([3, 1, 2, 7]) == "1–3, 7"
    assert spans(range(0, 100, 2)) == "0 … 98"
