"""Runs from the same weights and data: the first step agrees but for rounding."""

from __future__ import annotations

import pytest

from precdoctor.comparison.gate import gate
from precdoctor.comparison.rounding import differences
from precdoctor.comparison.summary import Start
from tests.support.training import Training


def found(report):
    """What PD813 says: passed, its subject and its module."""
    [check] = [c for c in report.checks if c.check.startswith("PD813")]
    finding = next((f for f in report.findings if f.code == "PD813"), None)
    return check, finding


def scaled(factor: float, module: str, kind: str = "output", step: int | None = None):
    def change(row):
        row.update(sum_sq=row["sum_sq"] * factor**2, sum=row["sum"] * factor, amax=row["amax"] * factor)

    return lambda training: training.change(change, module=module, kind=kind, step=step)


@pytest.fixture
def judged(tmp_path):
    def run(*changes, dtype="float32"):
        training = Training(steps=3, dtype=dtype)
        for change in changes:
            change(training)
        return found(
            gate(
                [training.write(tmp_path / "a")], Training(steps=3, dtype=dtype).write(tmp_path / "b"), ignore=["PD811"]
            )
        )

    return run


@pytest.mark.parametrize(
    ("dtype", "factor", "passed"),
    [
        ("float32", 1.0, True),
        ("float32", 1.0 + 2.0**-24, True),  # one rounding
        ("float32", 1.0 + 2.0**-18, False),
        ("bfloat16", 1.0 + 2.0**-14, True),  # 4096 elements rounded on their own differ by that much in RMS
        ("bfloat16", 1.0 + 2.0**-10, False),
    ],
)
def test_the_limit_is_what_rounding_explains(judged, dtype, factor, passed):
    check, finding = judged(scaled(factor, "blocks.0.mlp.up"), dtype=dtype)
    assert check.passed is passed
    assert (finding is None) is passed


def test_the_first_in_execution_order_is_named(judged):
    check, finding = judged(scaled(1.01, "blocks.0.mlp.down"), scaled(1.5, "head"), scaled(1.02, "norm", "grad_output"))
    assert check.subject.startswith("GPT#0 blocks.0.mlp.down output") and "2 tensors after it" in check.subject
    assert finding.location.module == "blocks.0.mlp.down" and finding.location.step == 0


def test_gradients_count_too(judged):
    _, finding = judged(scaled(1.01, "blocks.0.attn.qkv", "weight_grad"))
    assert (finding.location.module, finding.location.kind) == ("blocks.0.attn.qkv", "weight_grad")


def test_a_later_step_is_left_to_the_statistics(judged):
    check, _ = judged(scaled(1.3, "head", step=2))
    assert check.passed


def test_other_weights_are_another_start(tmp_path):
    run = Training(steps=3)
    scaled(1.001, "norm", "weight")(run)
    scaled(1.5, "head")(run)
    report = gate([run.write(tmp_path / "a")], Training(steps=3).write(tmp_path / "b"))
    assert [c for c in report.checks if c.check.startswith("PD813")] == []
    [rule] = [r for r in report.diagnosis.rules if r.code == "PD813"]
    assert rule.status.value == "not-applicable"


def test_differences_are_relative():
    assert differences(Start(2.0, 0.0, 8.0), Start(1.0, 0.5, 8.0)) == {"rms": 0.5, "mean": 0.25, "amax": 0.0}
    assert differences(Start(0.0, 0.0, 0.0), Start(0.0, 0.0, 0.0)) == {"rms": 0.0, "mean": 0.0, "amax": 0.0}
