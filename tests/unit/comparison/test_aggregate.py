"""Several repeats of one candidate, decided by the worst, the median or the best."""

from __future__ import annotations

import pytest

from precdoctor.comparison.gate import gate
from precdoctor.diagnosis.claims.finding import Severity
from precdoctor.errors import UsageError
from tests.support.training import Training


@pytest.fixture
def make(tmp_path):
    count = iter(range(100))
    return lambda training: training.write(tmp_path / f"run-{next(count)}")


def saturated() -> Training:
    return Training(steps=3).change(lambda r: r.update(at_max=400), kind="output", module="norm")


def nan() -> Training:
    return Training(steps=3).poison(2, "output", "head", nan=1)


@pytest.mark.parametrize("bad", [saturated, nan])
@pytest.mark.parametrize(
    ("aggregate", "sick", "code"),
    [
        ("worst", 1, 1),
        pytest.param("median", 1, 0, marks=pytest.mark.slow),
        ("median", 2, 1),
        ("best", 2, 0),
        pytest.param("best", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_three_runs(make, bad, aggregate, sick, code):
    runs = [make(bad() if at < sick else Training(steps=3)) for at in range(3)]
    report = gate(runs, make(Training(steps=3)), aggregate=aggregate)
    assert report.exit_code == code
    lines = [c for c in report.checks if c.check.startswith("PD802")]
    assert len(lines) == (3 if aggregate == "worst" else 1)
    if not code:
        assert all(f.severity is Severity.INFO for f in report.findings)


def test_of_two_the_median_is_the_worse_one(make):
    runs = [make(saturated()), make(Training(steps=3))]
    assert gate(runs, make(Training(steps=3)), aggregate="median").exit_code == 1


def test_a_run_without_a_verdict_is_never_outvoted(make):
    killed = Training(steps=3)
    killed.end = False
    runs = [make(killed), make(Training(steps=3)), make(Training(steps=3))]
    assert gate(runs, make(Training(steps=3)), aggregate="best").exit_code == 3


def test_one_run_is_its_own_median(make):
    assert gate([make(saturated())], make(Training(steps=3)), aggregate="median").exit_code == 1
    with pytest.raises(UsageError, match="median, best, worst"):
        gate([make(Training(steps=3))], aggregate="mean")
