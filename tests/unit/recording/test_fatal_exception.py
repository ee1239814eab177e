"""What ends a recorded block, and what ended earlier code of the same process."""

from __future__ import annotations

import sys

import pytest

from precdoctor.recording.process import fatal_exception


@pytest.fixture(autouse=True)
def _as_before():
    yield
    vars(sys).pop("last_value", None)
    fatal_exception.begin_anew()


def test_a_failed_cell_before_the_block_is_not_its_end(monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("an earlier cell"), raising=False)
    assert fatal_exception.ends_badly()
    fatal_exception.begin_anew()
    assert not fatal_exception.ends_badly()
    assert fatal_exception.fatal_exception() is None
    monkeypatch.setattr(sys, "last_value", ValueError("this one"), raising=False)
    assert fatal_exception.ends_badly()
    assert fatal_exception.fatal_exception()["message"] == "this one"


def test_a_status_that_earlier_code_left_with_is_forgotten(monkeypatch):
    monkeypatch.setattr(fatal_exception, "_exit_arguments", [2])
    assert fatal_exception.ends_badly()
    fatal_exception.begin_anew()
    assert not fatal_exception.ends_badly()


@pytest.mark.parametrize(
    ("raised", "tells"),
    [
        (ValueError("Expected parameter loc ... but found invalid values: tensor([nan])"), True),
        (RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"), True),
        (RuntimeError("the input matrix contained non-finite values"), True),
        (FloatingPointError("loss is not finite"), True),
        (ValueError("no information on the inference of nanoseconds"), False),
        (KeyboardInterrupt("nan"), False),
        (None, False),
    ],
)
def test_exceptions_that_tell_of_nonfinite_values(monkeypatch, raised, tells):
    monkeypatch.setattr(sys, "last_value", raised, raising=False)
    assert fatal_exception.tells_of_nonfinite() == tells


def test_the_line_that_raised_may_tell_it(monkeypatch):
    try:
        assert not sys.float_info.max.is_integer(), "isnan"  # the message of an assertion is often empty
    except AssertionError as error:
        error.args = ()
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert fatal_exception.tells_of_nonfinite()
    assert [c.tb_frame.f_code.co_name for c in fatal_exception.calls_left()] == [
        "test_the_line_that_raised_may_tell_it"
    ]
