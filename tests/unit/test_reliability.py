"""How stated confidence is held against the corpus: what counts as right, and what may be concluded from few cases."""

import pytest

from benchmarks.faults.truth import Truth
from benchmarks.intervals import wilson
from benchmarks.reliability import Claim, by_confidence, judged, verdict
from precdoctor.diagnosis.claims.finding import Finding, Location, Severity

QUIET = Truth("quiet/x", "quiet", "mlp", fault="f", code="PD201", also_code=("PD202",), root="Net", modules=("body.*",))
LOUD = Truth("y", "first", "mlp", fault="f", code="PD101", phase="forward", root="Net", module="head")
HEALTHY = Truth("z", "first", "mlp", healthy="why")


def said(code, module, confidence=0.9, root="Net#0"):
    return Finding(code, "name", Severity.WARNING, confidence, "t", "m", Location(root=root, module=module))


@pytest.mark.parametrize(
    ("truth", "finding", "right", "family"),
    [
        (QUIET, said("PD201", "body.0"), True, True),
        (QUIET, said("PD202", "body.1"), True, True),
        (QUIET, said("PD201", "head"), False, True),
        (QUIET, said("PD203", "body.0"), False, True),
        (LOUD, said("PD101", "head"), True, True),
        (LOUD, said("PD101", "body"), False, True),
        (LOUD, said("PD301", "head"), False, False),
        (HEALTHY, said("PD101", "head"), False, False),
    ],
)
def test_a_finding_is_right_with_code_and_module(truth, finding, right, family):
    claim = judged(truth, 0, finding)
    assert (claim.right, claim.family) == (right, family)


def test_a_fault_outside_of_all_modules_asks_for_none():
    scaler = Truth("quiet/s", "quiet", "mlp", fault="f", code="PD302")
    assert judged(scaler, 0, said("PD302", None, root=None)).right


def of(confidence, *, right, count):
    return [Claim(LOUD, 0, "PD101", confidence, i < right, True) for i in range(count)]


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        (of(0.95, right=19, count=20), "in the interval"),
        (of(0.95, right=10, count=20), "too sure"),
        (of(0.50, right=20, count=20), "too modest"),
        (of(0.95, right=0, count=4), "too few"),
    ],
)
def test_what_is_said_of_a_stated_confidence(claims, words):
    assert verdict(claims) == words


def test_every_confidence_is_in_one_bin():
    claims = [Claim(LOUD, 0, "PD101", c / 100, right=True, family=True) for c in range(101)]
    binned = [c for _, group in by_confidence(claims) for c in group]
    assert sorted(binned, key=lambda c: c.confidence) == claims


def test_wilson_against_published_figures():
    # Newcombe 1998, table I: 81 of 263, and 0 of 20
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(20, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)
