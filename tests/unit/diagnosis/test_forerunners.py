"""A run that diverged before it overflowed: what threw it off is mended, and what is gone back to is sound."""

import dataclasses
from functools import partial

import pytest

from precdoctor.diagnosis.claims.finding import Finding, Location, Prescription, Severity
from precdoctor.diagnosis.ranking import consequences
from precdoctor.diagnosis.registry import RELATIONS

LOOK = Prescription("stop and look", {"module": "head", "hook": "forward"}, {"stops_at_step": 126}, "pass\n")
WIDEN = Prescription("widen", {"module": "head", "dtype": "float32"}, {"nonfinite_steps": 0}, "pass\n")
SLOWER = Prescription("a smaller rate", {"lr": {"from": 0.75, "to": 0.15}}, {"grad_norm": 0.6}, "pass\n")

fold = partial(consequences.fold, relations=RELATIONS)


def finding(code: str, step: int, *prescriptions: Prescription, severity: Severity = Severity.ERROR) -> Finding:
    evidence = {"last_finite_step": step - 1}
    return Finding(code, "n", severity, 0.9, code, "Told.", Location(step=step), None, evidence, prescriptions)


def test_the_rate_comes_before_a_closer_look_and_behind_a_cure() -> None:
    [kept] = fold([finding("PD101", 126, LOOK), finding("PD603", 121, SLOWER)])
    assert [p.title for p in kept.prescriptions] == ["a smaller rate", "stop and look"]
    [kept] = fold([finding("PD101", 126, LOOK, WIDEN), finding("PD603", 121, SLOWER)])
    assert [p.title for p in kept.prescriptions] == ["widen", "a smaller rate", "stop and look"]


def test_large_updates_are_advised_against_where_there_is_no_cure() -> None:
    [kept] = fold([finding("PD101", 26, LOOK), finding("PD504", 2, SLOWER)])
    assert [p.title for p in kept.prescriptions] == ["a smaller rate", "stop and look"]
    assert kept.resume_step == 25
    [kept] = fold([finding("PD101", 26, WIDEN), finding("PD504", 2, SLOWER)])
    assert [p.title for p in kept.prescriptions] == ["widen"]


def test_the_rate_comes_first_where_gradient_descent_is_seen_to_diverge() -> None:
    updates = finding("PD504", 2, SLOWER)
    updates = dataclasses.replace(updates, evidence={**updates.evidence, "stable_rate": 0.15, "diverges_from": 0})
    [kept] = fold([finding("PD101", 26, WIDEN, LOOK), updates])
    assert [p.title for p in kept.prescriptions] == ["a smaller rate", "widen", "stop and look"]
    assert kept.resume_step is None
    assert "start again" in kept.message


def test_the_same_change_is_asked_for_once() -> None:
    [kept] = fold([finding("PD101", 126, LOOK), finding("PD603", 121, SLOWER), finding("PD605", 119, SLOWER)])
    assert [p.title for p in kept.prescriptions] == ["a smaller rate", "stop and look"]


def test_one_goes_back_to_before_the_divergence() -> None:
    cause = finding("PD101", 126, LOOK)
    assert cause.resume_step == 125
    [kept] = fold([cause, finding("PD605", 119, SLOWER), finding("PD603", 121, SLOWER)])
    assert kept.resume_step == 118
    assert "at step 119 (PD605" in kept.message


def test_a_run_off_its_course_from_the_first_step_has_nothing_to_go_back_to() -> None:
    [kept] = fold([finding("PD101", 6, LOOK), finding("PD603", 0, SLOWER)])
    assert kept.resume_step is None


@pytest.mark.parametrize(
    "effect",
    [
        finding("PD603", 126, SLOWER),  # the overflow is what exploded
        finding("PD605", 60, SLOWER),  # long over
        finding("PD603", 121, SLOWER, severity=Severity.INFO),
        finding("PD601", 0, SLOWER),
    ],
    ids=["same step", "long ago", "information", "another fault"],
)
def test_what_did_not_lead_to_it_changes_nothing(effect: Finding) -> None:
    cause = finding("PD101", 126, LOOK)
    [kept] = fold([cause, effect])
    assert (kept.prescriptions, kept.message, kept.resume_step) == ((LOOK,), "Told.", 125)


def test_what_a_scaler_recovered_from_is_nothing_to_go_back_from() -> None:
    evidence = {"last_finite_step": 125, "recovered": True}
    assert dataclasses.replace(finding("PD102", 126), evidence=evidence).resume_step is None
