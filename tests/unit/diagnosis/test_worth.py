"""Advice that hardly helps by its own prediction does not come first."""

import dataclasses

import pytest

from precdoctor.diagnosis.advice.prescription_order import is_worthwhile, saving, worthwhile_first
from precdoctor.diagnosis.claims.finding import Finding, Location, Prescription, Severity


def advice(title: str, **predicted: object) -> Prescription:
    return Prescription(title, {"lr_factor": 0.1}, predicted, "pass\n")


LITTLE = advice("a little", skipped_steps={"from": 62, "to": 58})
MUCH = advice("much", skipped_steps={"from": 62, "to": 3})
ELSE = advice("something else", headroom_binades={"from": 0.4, "to": 5.2})


@pytest.mark.parametrize(
    ("prescription", "saved"),
    [
        (LITTLE, 4 / 62),
        (MUCH, 59 / 62),
        (ELSE, None),
        (advice("none of it", flushed_share={"from": 0.0, "to": 0.0}), None),
        (advice("worse", flushed_share={"from": 0.2, "to": 0.4}), -1.0),
        (advice("one of two", flushed_share={"from": 0.4, "to": 0.1}, skipped_steps={"from": 2, "to": 2}), 0.75),
    ],
)
def test_saving_is_the_share_of_the_harm(prescription: Prescription, saved: float | None) -> None:
    assert saving(prescription) == (None if saved is None else pytest.approx(saved))


def test_what_saves_less_than_a_quarter_goes_behind_the_rest_in_order() -> None:
    told = Finding("PD301", "n", Severity.ERROR, 0.5, "t", "m", Location(), prescriptions=(LITTLE, ELSE, MUCH))
    assert [p.title for p in worthwhile_first(told).prescriptions] == ["something else", "much", "a little"]
    assert is_worthwhile(advice("a quarter", skipped_steps={"from": 8, "to": 6}))


def test_a_finding_in_order_is_left_as_it_is() -> None:
    told = Finding("PD301", "n", Severity.ERROR, 0.5, "t", "m", Location(), prescriptions=(MUCH, LITTLE))
    assert worthwhile_first(told) is told
    alone = dataclasses.replace(told, prescriptions=(LITTLE,))
    assert worthwhile_first(alone) is alone
