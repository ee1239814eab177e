from __future__ import annotations

import io

import pytest

from precdoctor.comparison.gate import GateCheck, GateReport
from precdoctor.reporting.console import make_console
from precdoctor.reporting.gate_view import print_gate
from tests.support.diagnoses import CLEAN
from tests.support.hostile import NAMES
from tests.support.offenders import check_each


def check(name="PD803 headroom-lost", passed=True, fails=False, **texts):
    values = {"subject": "a output", "expected": "5 binades", "found": "1 binade", "limit": "-3 binades"} | texts
    return GateCheck(run="runs/a", check=name, passed=passed, fails=fails, severity=None, **values)


def printed(checks, code, concise=False, **fields):
    report = GateReport(("runs/a",), "runs/main", "error", tuple(checks), (CLEAN,), code, **fields)
    file = io.StringIO()
    print_gate(report, make_console(file, 100), concise=concise)
    return file.getvalue()


CHECKS = [
    check(),
    check("PD101 x", passed=None),
    check("PD102 y", passed=False),
    check("PD804 z", passed=False, fails=True),
]


def test_failures_come_first_with_expected_found_and_limit():
    text = printed(CHECKS, 1)
    assert text.startswith("FAILED: 1 of 4 checks at or above error.\n")
    order = [text.index(name) for name in ("PD804", "PD102", "PD101", "PD803")]
    assert order == sorted(order)
    assert "a output: expected 5 binades, found 1 binade, limit -3 binades" in text
    assert "runs/a, against runs/main" in text


def test_concise_leaves_out_what_passed():
    text = printed(CHECKS, 1, concise=True)
    assert "PD804" in text and "PD803" not in text and "PD101" not in text
    assert "nothing to report" in printed([check()], 0, concise=True)
    long = printed([check(found="x" * 300, passed=False)], 1, concise=True)
    assert any("x" * 300 in line and "expected" in line for line in long.splitlines()), "a line each, for grep"


def test_the_worst_of_many_subjects_and_where_to_look_first():
    many = [check(passed=False, fails=True, subject=f"layer {at} output") for at in range(30)]
    text = printed(many, 1, suspects=("blocks.0.norm", "", "head", "fourth"))
    assert "layer 7 output" in text and "layer 8 output" not in text and "and 22 more" in " ".join(text.split())
    assert "Look first at: blocks.0.norm, the model itself, head\n" in text


@pytest.mark.parametrize(("code", "words"), [(0, "PASSED: 1 check"), (3, "NO TRUSTWORTHY VERDICT."), (1, "FAILED")])
def test_the_verdict_comes_first(code, words):
    text = printed([check()], code, untrustworthy=("rows were dropped",), notes=("worth knowing",))
    assert text.startswith(words)
    assert "  rows were dropped\n" in text and "  Note: worth knowing\n" in text


def test_the_next_command_is_the_one_that_shows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").mkdir()
    regression, rule = check(passed=False, fails=True), check("PD102 y", passed=False, fails=True)
    moved = "precdoctor compare one runs/a\n"
    text = printed([regression], 1, baseline_runs=("gone", "one"))
    assert moved in text and "precdoctor diagnose" not in text
    text = printed([rule], 1, baseline_runs=("one",))
    assert "precdoctor compare" not in text and "precdoctor diagnose runs/a\n" in text
    text = printed([rule, regression], 1, baseline_runs=("gone",))
    assert "precdoctor diagnose runs/a\n" in text and "precdoctor compare A_RUN_OF_THE_BASELINE runs/a\n" in text
    assert moved in printed([check()], 3, untrustworthy=("another model",), baseline_runs=("one",))


def test_hostile_names():
    check_each(check_printed, NAMES, repr)


def check_printed(name):
    text = printed([check(subject=name, found=name, expected=name, limit=name, passed=False)], 1, notes=(name,))
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert not any(line.lstrip().startswith("::") for line in text.splitlines())
