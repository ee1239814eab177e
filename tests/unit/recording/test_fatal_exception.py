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
