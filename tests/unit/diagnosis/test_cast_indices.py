"""Indices that were cast to a narrow format: one finding, at the cast, for all lines that read them back."""

from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from tests.rules.PD706.samples import halved_batch, integers
from tests.support.scanning import scanned


def test_what_reads_the_integers_back_is_listed_under_their_cast(tmp_path: Path) -> None:
    (finding,) = diagnose(halved_batch().write(tmp_path), select=["PD706"]).findings
    assert finding.location.source is not None
    assert finding.location.source.line == 42
    assert len(finding.evidence["consequences"]) == 2
    (advice,) = finding.prescriptions
    assert advice.title.startswith("keep the indices as integers at model.py:42")
    assert advice.change["cast"] == {"from": "bfloat16", "to": "int64"}
    assert "is_floating_point()" in advice.snippet


@pytest.mark.parametrize(("times", "numel", "lines"), [(2, 999, {42, 61}), (1, 1000, {42, 61})])
def test_other_values_are_another_finding(times: int, numel: int, lines: set[int], tmp_path: Path) -> None:
    """Another number of elements; or one tensor was cast, and another one reaches as far."""
    findings = diagnose(halved_batch(times, numel).write(tmp_path), select=["PD706"]).findings
    assert {f.location.source.line for f in findings if f.location.source is not None} == lines


def test_positions_that_nothing_reads_back_are_angles(tmp_path: Path) -> None:
    (finding,) = diagnose(scanned(integers()).write(tmp_path), select=["PD706"]).findings
    assert finding.prescriptions[0].snippet.startswith("angles = ")
