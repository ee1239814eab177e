from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.claims import words
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.reporting.text import LIMIT, clean, clean_block, factor, number, recording_cost, spans
from tests.support.hostile import NAMES
from tests.support.offenders import check_each

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def test_no_hostile_name_keeps_a_control_character():
    check_each(check_clean, NAMES, repr)


def check_clean(name):
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
    assert [factor(b) for b in (None, 12.34, -5.06, -0.01)] == ["–", "2^12.3", "2^-5.1", "2^0"]


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (None, "–"), (float("nan"), "–"), (0.0, "0 %"), (2e-5, "<0.01 %"), (1e-4, "0.01 %"), (0.0123, "1.2 %"),
        (0.0996, "10 %"), (0.414, "41 %"), (0.9894, "99 %"), (0.9949, "99.5 %"), (0.9996, ">99.9 %"), (1.0, "100 %"),
        (12.3, "1,230 %"), (-0.3, "-30 %"),
    ],
)  # fmt: skip
def test_a_share_is_rounded_in_one_way_and_never_to_an_end(fraction, shown):
    assert percent(fraction) == shown


@given(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))
def test_what_is_not_all_is_never_all_and_what_is_not_nothing_is_never_nothing(fraction):
    assert percent(fraction) not in ("0 %", "100 %")


def test_findings_and_screens_round_and_count_alike():
    assert percent is words.percent and plural is words.plural
    counts = [(1, "step"), (0, "batch"), (2000, "row"), (2, "loss"), (3, "weight matrix"), (2, "box"), (1, "matrix")]
    shown = ["1 step", "0 batches", "2,000 rows", "2 losses", "3 weight matrices", "2 boxes", "1 matrix"]
    assert [plural(*c) for c in counts] == shown


COST = {"full_steps": 64, "scanned_steps": 3, "budget": 0.01, "settled_fraction": None, "settled_ns": None}


@pytest.mark.parametrize(
    ("recorder", "said"),
    [
        ({"overhead_fraction": None}, None),
        ({"overhead_fraction": 0.012, "cost": COST}, "Recording took 1.2 % of the run's time."),
        ({"overhead_fraction": 0.62}, "Recording took 62 % of the run's time."),
        (
            {"overhead_fraction": 2.79},
            "Recording took 2.8 times the run's time, as it also works in a thread of its own.",
        ),
        ({"overhead_fraction": 0.012, "waited_fraction": 0.004}, "Recording took 1.2 % of the run's time."),
        (
            {"overhead_fraction": 0.012, "waited_fraction": 0.31},
            (
                "Recording took 1.2 % of the run's time (beside 31 % in which its hooks waited for the device, "
                "which worked for the training)."
            ),
        ),
        (
            {"overhead_fraction": 0.62, "cost": COST},
            (
                "Recording took 62 % of the run's time: the first 64 steps are recorded in full (3 of them op by op). "
                "Longer runs are sampled to stay near `--budget`, 1 %."
            ),
        ),
        (
            {"overhead_fraction": 0.62, "cost": {**COST, "step_ns": 5_000_000}},
            (
                "Recording took 62 % of the run's time: the first 64 steps are recorded in full (3 of them op by op). "
                "Longer runs are sampled and cost less."
            ),
        ),
        (
            {"overhead_fraction": 0.1, "between": {"fraction": 0.0949, "step_ns": 10_900_000}},
            (
                "Recording took 10 % of the run's time. "
                "Steps of 11 ms cost 9.5 % between samples; longer runs settle below 14 %."
            ),
        ),
        (
            {"overhead_fraction": 0.62, "cost": {**COST, "settled_fraction": 0.031, "settled_ns": 340_000}},
            (
                "Recording took 62 % of the run's time: the first 64 steps are recorded in full (3 of them op by op). "
                "Since then it took 3.1 %, 0.34 ms a step."
            ),
        ),
        (
            {"overhead_fraction": 0.07, "cost": {**COST, "settled_fraction": 0.22, "settled_ns": 220_000_000}},
            (
                "Recording took 7 % of the run's time: the first 64 steps are recorded in full (3 of them op by op). "
                "Since then it took 22 %, 220 ms a step."
            ),
        ),
        (
            {"overhead_fraction": 0.9, "cost": {**COST, "full_steps": 1, "budget": None}},
            "Recording took 90 % of the run's time: the first step is recorded in full.",
        ),
    ],
)
def test_a_high_cost_is_explained(recorder, said):
    assert recording_cost(recorder) == said


def test_step_ranges():
    assert spans([]) == "none"
    assert spans([3, 1, 2, 7]) == "1–3, 7"
    assert spans(range(0, 100, 2)) == "0 … 98"
