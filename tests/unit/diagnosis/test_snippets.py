"""Code that findings offer to copy."""

from __future__ import annotations

from precdoctor.diagnosis.claims.snippets import lower_rate_and_clip


def test_no_comment_wraps_into_a_line_of_code_at_80_columns():
    lines = lower_rate_and_clip().splitlines()
    assert max(map(len, lines)) <= 80 - 4  # the margin that a finding gives it
    assert [line for line in lines if "optimizer.step()" in line] == ["# before optimizer.step():"]
