"""A run held against a healthy one while it goes on: what parts from it, and what only looks so."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from precdoctor.comparison.leading import (
    CODES,
    FEWEST,
    drifting_gradients,
    growing_gradients,
    leading_findings,
    loss_gap,
)
from precdoctor.diagnosis.survey.view import IDENTITY, RunView
from tests.support.training import Training

KEY = ("GPT#0", "blocks.0.mlp.up", "weight_grad_step", "weight", 0)


def losses(seed, steps=400, *, noise=0.05, slower=1.0, above=0.0, since=0):
    """A loss that falls like a power law, with batch noise."""
    random = np.random.default_rng(seed)
    s = np.arange(steps)
    curve = 1.0 + 3.0 * (1.0 + s / (20.0 * slower)) ** -0.7
    curve = curve + random.normal(0.0, noise, steps) + above * (s >= since)
    return dict(enumerate(curve.tolist()))


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.05, 0.3])
def test_another_seed_is_not_above(noise):
    for seed in range(1, 40):
        ours, theirs = losses(seed, noise=noise), losses(-seed + 1000, noise=noise)
        for upto in range(20, 400, 20):
            found = loss_gap({s: v for s, v in ours.items() if s < upto}, theirs)
            assert found is None or found.gap <= found.limit, (seed, upto, found)


def test_a_run_that_is_a_little_slower_is_not_above():
    for seed in range(40):
        found = loss_gap(losses(seed, slower=1.05), losses(seed + 100))
        assert found.gap <= found.limit


@pytest.mark.parametrize(("above", "noise"), [(0.1, 0.0), (0.2, 0.05), (1.0, 0.3)])
def test_a_run_that_stays_above_is(above, noise):
    for seed in range(20):
        found = loss_gap(losses(seed, noise=noise, above=above, since=300), losses(seed + 100, noise=noise))
        assert found.gap > found.limit


def test_too_few_steps_say_nothing():
    assert loss_gap(losses(1, steps=FEWEST - 1), losses(2)) is None
    assert loss_gap(losses(1, steps=40), losses(2)) is None, "nothing earlier to be held against"


def course(seed, growth=0.0, level=0.0, steps=32, noise=0.4):
    """One gradient: binades of amax over the steps, and its mean square."""
    random = np.random.default_rng(seed)
    binades = -10.0 + level + growth * np.linspace(0.0, 1.0, steps) + random.normal(0.0, noise, steps)
    places = pd.MultiIndex.from_tuples([(*KEY, s) for s in range(steps)], names=[*IDENTITY, "step"])
    return pd.DataFrame({"amax": np.exp2(binades), "square": np.exp2(2.0 * binades - 6.0)}, index=places)


def test_gradients_of_another_seed_neither_grow_nor_drift():
    for seed in range(200):
        ours, theirs = course(seed), course(seed + 1000)
        assert growing_gradients(ours, theirs) == drifting_gradients(ours, theirs) == []


def test_gradients_that_grow_in_both_runs_do_not_grow_away():
    assert growing_gradients(course(1, growth=6.0), course(2, growth=6.0)) == []


def test_a_gradient_that_grows_away_and_one_that_is_far_away():
    [found] = growing_gradients(course(1, growth=4.0), course(2))
    assert (found.code, found.location.module, found.location.kind) == ("PD822", KEY[1], KEY[2])
    assert 2.0 < found.evidence["binades"] < 5.0 and "limit 2" in found.message
    assert growing_gradients(course(2), course(1, growth=4.0)) == [], "one that shrinks does not"
    assert [f.code for f in drifting_gradients(course(1, level=3.0), course(2))] == ["PD823"]
    assert [f.code for f in drifting_gradients(course(1, level=-3.0), course(2))] == ["PD823"]


def test_from_logs(tmp_path):
    reference, same, worse = (Training(80) for _ in range(3))
    for training, above in ((reference, 0.0), (same, 0.0), (worse, 0.5)):
        for step, row in training.step_rows.items():
            row["loss"] = 2.0 + above * (step >= 40)
    for row in (r for rows in worse.tensors.values() for r in rows):
        if row["kind"] == "weight_grad_step" and row["module"] == "head":
            row["amax"] *= 2.0 ** max(0.0, (row["step"] - 50) / 5.0)
            row["sum_sq"] *= 1024.0
    views = [RunView(t.write(tmp_path / str(i))) for i, t in enumerate((reference, same, worse))]
    assert leading_findings(views[0], views[1]) == []
    found = leading_findings(views[0], views[2])
    assert [f.code for f in found] == ["PD821", "PD822", "PD823"] == list(CODES)
    assert {f.location.module for f in found[1:]} == {"head"}
    assert [f.name for f in found] == list(CODES.values())
