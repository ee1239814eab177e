"""Attempts that a script gives up by itself, and gradients that are thrown away for other reasons."""

from __future__ import annotations

import math

import pytest

from tests.support.zoo.skipping import OVERFLOWS

SKIPPED = [attempt in OVERFLOWS for attempt in range(6)]


def test_gradients_thrown_away_because_they_overflowed_were_an_attempt(zoo):
    steps = zoo.steps("skips_by_hand")
    assert steps["skipped"].tolist() == SKIPPED
    assert steps["micro_steps"].tolist() == [1] * 6
    assert steps["loss"].tolist() == pytest.approx(zoo.plain["skips_by_hand"]["losses"], rel=1e-6)
    assert steps["loss_scale"].tolist() == [2.0**40 if skipped else 2.0**10 for skipped in SKIPPED]
    assert [math.isnan(norm) for norm in steps["grad_norm"]] == SKIPPED
    assert (steps["non_finite"] > 0).tolist() == SKIPPED
    assert steps["found_inf"].isna().all()
    assert zoo.events("skips_by_hand", "incident") == []  # an overflow under a loss scale is none


def test_rows_of_an_attempt_left_out_are_those_of_its_own_passes(zoo):
    for name in ("skips_by_hand", "skips_under_scaler"):
        rows = zoo.rows(name)
        assert set(rows[rows["kind"].isin(["update", "weight_grad_step"])]["step"]) == {2, 3, 5}, name
        for kind in ("output", "grad_output", "weight_grad", "weight"):
            per_step = rows[rows["kind"] == kind].groupby("step").size()
            assert per_step.tolist() == [per_step[2]] * 6, (name, kind)


def test_a_loop_that_zeroes_before_backward_is_known_from_its_second_pass_on(zoo):
    """The first two attempts are one: until then it might have been accumulating."""
    steps = zoo.steps("skips_by_hand_zeroed_late")
    assert steps["skipped"].tolist() == [True, False, False, True, False]
    assert steps["micro_steps"].tolist() == [2, 1, 1, 1, 1]
    outputs = zoo.rows("skips_by_hand_zeroed_late", kind="output").groupby("step").size()
    assert outputs.tolist() == [outputs[1]] * 5


@pytest.mark.parametrize("name", ["skips_under_scaler", "skips_under_scaler_zeroed_early"])
def test_a_scaler_that_is_updated_without_a_step_has_seen_an_attempt(zoo, name):
    steps = zoo.steps(name)
    assert steps["found_inf"].tolist() == steps["skipped"].tolist() == SKIPPED
    assert steps["loss_scale"].tolist() == [1024.0, 512.0, 256.0, 256.0, 256.0, 128.0]
    assert steps["growth_tracker"].tolist() == [0, 0, 0, 1, 2, 0]
    assert steps["micro_steps"].tolist() == [1] * 6
    assert [(e["step"], e["change"], e["to"]) for e in zoo.events(name, "scaler")] == [
        (1, "backoff", 512.0), (2, "backoff", 256.0), (5, "backoff", 128.0),
    ]  # fmt: skip


def test_each_optimizer_of_a_scaler_has_its_own_attempt(zoo):
    steps = zoo.steps("skips_two_optimizers")
    assert steps["optimizer"].tolist() == ["SGD#0", "SGD#1"] * 4
    assert steps["skipped"].tolist() == [True] * 4 + [False] * 4
    assert steps["micro_steps"].tolist() == [1, 0] * 4


@pytest.mark.parametrize(
    ("name", "micro_steps"),
    [
        ("gradient_surgery", [2, 2, 2]),
        ("two_ascents", [2, 2]),
        ("polluted_critic", [1] * 6),
        ("saliency_between", [2, 2, 2]),
        ("overflow_accumulated", [3, 3, 3]),
        ("learns_to_learn", [3, 3]),
    ],
)
def test_gradients_thrown_away_for_other_reasons_are_no_attempt(zoo, name, micro_steps):
    steps = zoo.steps(name)
    assert steps["micro_steps"].tolist()[-len(micro_steps) :] == micro_steps
    assert len(set(steps["optimizer"]) - {""}) == len(micro_steps) // 6 + 1
    assert not steps["skipped"].any()
