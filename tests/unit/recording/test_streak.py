"""Skips in a row, optimizer by optimizer."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from precdoctor.recording.steps.step_attempt import MAX_SKIPS, Streak  # noqa: E402


def after(*bad: bool) -> Streak:
    streak = Streak()
    for each in bad:
        streak.add(bad=each)
    return streak


def scaler(scale: float):
    made = torch.amp.GradScaler("cpu", init_scale=scale)
    made.scale(torch.ones(()))  # makes its scale
    return made


def test_the_second_skip_in_a_row_is_suspicious_once():
    assert not after(False, True).is_suspicious
    assert after(False, True, True).is_suspicious
    assert not after(False, True, True, True).is_suspicious
    assert not after(False, True, False, True).is_suspicious


def test_a_fresh_scaler_may_skip_until_it_has_let_one_through():
    assert not after(True, True).is_suspicious
    assert not after(*[True] * 12).is_stuck(scaler(1024.0))
    assert after(False, *[True] * MAX_SKIPS).is_stuck(scaler(1024.0))
    assert not after(False, *[True] * (MAX_SKIPS - 1)).is_stuck(scaler(1024.0))


def test_a_scale_that_is_down_to_one_is_not_to_blame():
    assert after(True).is_stuck(scaler(1.0))
