"""The allow-list: read strictly, applied by code and module, loud past its date."""

from __future__ import annotations

import datetime as dt

import pytest

from precdoctor.comparison.allowances import Allowance, AllowList, read_allowances
from precdoctor.comparison.gate import gate
from precdoctor.diagnosis.claims.finding import Severity
from precdoctor.errors import UsageError
from tests.support.training import Training

TODAY = dt.date(2026, 3, 1)
ENTRY = '[[allow]]\ncode = "PD808"\nreason = "on purpose"\nuntil = 2026-03-01\n'


def allowance(code="PD808", module="*", until=TODAY):
    return Allowance(code, module, "on purpose", until)


def read(tmp_path, text):
    file = tmp_path / "allow.toml"
    file.write_text(text)
    return read_allowances(file)


def test_an_entry(tmp_path):
    assert read(tmp_path, ENTRY) == (allowance(),)
    by_name = read(tmp_path, ENTRY.replace("PD808", "dtype-changed") + 'module = "blocks.*"\n')
    assert by_name == (allowance(module="blocks.*"),)
    assert read(tmp_path, "") == ()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('reason = "on purpose"', 'reason = " "', "entry 1 needs a reason"),
        ('reason = "on purpose"', "", "entry 1 needs a reason"),
        ("until = 2026-03-01", "", "needs a last day"),
        ("2026-03-01", '"2026-03-01"', "without quotes"),
        ("2026-03-01", "2026-03-01T00:00:00Z", "needs a last day"),
        ("PD808", "PD899", "no rule is called 'PD899'"),
        ("reason", "reasn", "did you mean 'reason'?"),
        ("[[allow]]", "[[allowed]]", "a key 'allowed'"),
        ("[[allow]]", "[[allow", "is no allow-list"),
    ],
)
def test_mistakes_are_told(tmp_path, old, new, words):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, ENTRY.replace(old, new))
    assert words in str(caught.value)
    with pytest.raises(UsageError, match="no such allow-list"):
        read_allowances(tmp_path / "none.toml")


@pytest.fixture
def runs(tmp_path):
    """A run with one tensor in BF16, and its healthy baseline."""
    changed = Training(steps=3).change(lambda r: r.update(dtype="bfloat16"), module="head", kind="output")
    return changed.write(tmp_path / "run"), Training(steps=3).write(tmp_path / "base")


def test_what_is_allowed_is_told_and_does_not_fail(runs):
    run, base = runs
    assert gate([run], base).exit_code == 1
    report = gate([run], base, allowances=[allowance(module="hea?")], today=TODAY)
    [finding] = [f for f in report.findings if f.code == "PD808"]
    assert (report.exit_code, finding.severity) == (0, Severity.INFO)
    assert finding.evidence["allowed"] == "on purpose (until 2026-03-01)" and "on purpose" in finding.message
    assert report.notes == ("3 steps are too few to judge growth, dead layers and updates",)


@pytest.mark.parametrize("entry", [{"module": "blocks.*"}, {"code": "PD801"}])
def test_what_is_not_meant_still_fails_and_the_entry_is_idle(runs, entry):
    report = gate([runs[0]], runs[1], allowances=[allowance(**entry)], today=TODAY)
    assert report.exit_code == 1
    assert [note for note in report.notes if "accepted nothing" in note]


def test_past_its_date_an_entry_fails_even_what_it_never_touched(runs):
    tomorrow = TODAY + dt.timedelta(days=1)
    report = gate([runs[1]], allowances=[allowance(code="PD401")], today=tomorrow)
    assert report.exit_code == 1
    assert [c.check for c in report.checks if c.fails] == ["PD816 allowance-expired"]
    assert {f.code for f in report.findings} == {"PD816"}
    assert AllowList([allowance()], TODAY).expired_lines() == []
