"""The largest stable learning rate, told from gradient descent that diverges."""

from pathlib import Path

import numpy as np
import pytest

from precdoctor.diagnosis.advice.stable_rate import StableRate, rounded_down, stable_rate
from precdoctor.diagnosis.engine import view_of
from precdoctor.diagnosis.survey.view import Process
from tests.support.training import FACTS, Training

CURVATURE = np.array([0.3, 2.0, 40.0])


def descent(rate: float, momentum: float, steps: int) -> list[float]:
    """Gradient norms of heavy-ball descent on a quadratic, as ``torch.optim.SGD`` does it."""
    weights, velocity, norms = np.ones(3), np.zeros(3), []
    for _ in range(steps):
        gradient = CURVATURE * weights
        norms.append(float(np.linalg.norm(gradient)))
        velocity = momentum * velocity + gradient
        weights = weights - rate * velocity
    return norms


def told(path: Path, rate: float, momentum: float = 0.0, *, steps: int = 40, **group: object) -> StableRate | None:
    return of_norms(path, descent(rate, momentum, steps), rate, momentum, **group)


def of_norms(path: Path, norms: list[float], rate: float, momentum: float = 0.0, **group: object) -> StableRate | None:
    settings = {"lr": rate, "momentum": momentum, "nesterov": False, **group}
    facts = {**FACTS, "optimizers": [{"name": "SGD#0", "class": "SGD", "groups": [settings]}]}
    run = Training(steps=len(norms), facts=facts)
    for step, norm in enumerate(norms):
        run.step_rows[step] |= {"optimizer": "SGD#0", "lr": rate, "grad_norm": norm}
    view = view_of(run.write(path))
    return stable_rate(view, view.timeline[Process(0, 0)])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("excess", [1.1, 3.0, 500.0])
def test_the_limit_is_that_of_the_largest_curvature(excess: float, momentum: float, tmp_path: Path) -> None:
    limit = 2.0 * (1.0 + momentum) / CURVATURE.max()
    found = told(tmp_path / "run", excess * limit, momentum)

    assert found is not None
    assert found.rate * found.limit == pytest.approx(limit, rel=0.02)
    assert found.factor <= found.limit / 2.0
    assert found.after < 1.0


def test_the_proposed_rate_does_what_is_predicted(tmp_path: Path) -> None:
    found = told(tmp_path / "run", 4.0 / CURVATURE.max(), 0.0)

    assert found is not None
    fast = descent(found.rate * found.factor, 0.0, 2)
    assert descent(found.rate, 0.0, 2)[1] / fast[0] == pytest.approx(found.growth, rel=0.02)
    assert fast[1] / fast[0] == pytest.approx(found.after, rel=0.05)


def test_a_rate_that_converges_tells_nothing(tmp_path: Path) -> None:
    assert told(tmp_path / "run", 1.9 / CURVATURE.max()) is None


def test_a_run_that_is_thrown_off_later_tells_nothing(tmp_path: Path) -> None:
    """Its norm creeps up, and jumps in the end."""
    assert of_norms(tmp_path / "run", [*(1.001**k for k in range(30)), 30.0, 900.0, 27000.0], 0.1) is None


def test_nesterov_is_not_judged(tmp_path: Path) -> None:
    assert told(tmp_path / "run", 4.0 / CURVATURE.max(), 0.9, nesterov=True) is None


@pytest.mark.parametrize(("factor", "rounded"), [(1.0, 1.0), (0.99, 0.5), (0.02, 0.02), (0.0199, 0.01), (4.7e-4, 2e-4)])
def test_rounded_down(factor: float, rounded: float) -> None:
    assert rounded_down(factor) == rounded
