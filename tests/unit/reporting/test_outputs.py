"""The formats of CI systems: one verdict in all of them, read back by tools that are not ours."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from markdown_it import MarkdownIt
from sarif_pydantic import Sarif

from precdoctor.cli.values import OUTPUT_FORMATS
from precdoctor.comparison.gate import GateCheck, GateReport
from precdoctor.diagnosis.claims.finding import Finding, Location, Prescription, Severity, Source
from precdoctor.reporting.github import MAX_ANNOTATIONS
from precdoctor.reporting.outputs import WRITERS, Report
from tests.support.diagnoses import BROKEN, CLEAN, OVERFLOW, UNDERFLOW, UNKNOWN
from tests.support.hostile import NAMES
from tests.support.offenders import check_each

BROKEN_REPORT = Report(BROKEN, 1, "error")


@pytest.fixture(autouse=True)
def outside_any_repository(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where recorded paths below the current directory are taken as they are; test_places.py has the others."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())


def written(name: str, report: Report = BROKEN_REPORT) -> str:
    stream = io.StringIO()
    WRITERS[name](report, stream)
    return stream.getvalue()


def hostile(*names: str) -> Report:
    """One finding for each of ``names``, which is every recorded text of it."""
    rules = tuple(
        dataclasses.replace(rule, reason=name) for rule, name in zip(BROKEN.rules, itertools.cycle(names), strict=False)
    )
    run = {**BROKEN.run, "path": names[0], "command": ["python", *(name + ".py" for name in names)]}
    return Report(
        dataclasses.replace(BROKEN, findings=tuple(map(hostile_finding, names)), rules=rules, run=run), 1, "error"
    )


def hostile_finding(name: str) -> Finding:
    location = Location(root=name, module=name, module_class=name, kind=name, step=3, op=name)
    location = dataclasses.replace(location, source=Source(name, 7, name))
    advice = (Prescription(name, {"module": name}, {"headroom_binades": 3.0}, name),)
    return dataclasses.replace(OVERFLOW, title=name, message=name, location=location, prescriptions=advice)


def gated(code: int, *checks: GateCheck, reasons: tuple[str, ...] = ()) -> Report:
    """A gate over one run."""
    gate = GateReport(("runs/a",), "runs/main", "error", checks, (BROKEN,), code, reasons)
    return Report(gate.diagnosis, code, "error", gate)


def check(name: str, *, passed: bool | None, fails: bool = False) -> GateCheck:
    return GateCheck("runs/a", name, "head output", "0.1 %", "12 %", "+2 %", passed, "error" if fails else None, fails)


def test_every_format_the_command_line_offers_can_be_written() -> None:
    assert set(WRITERS) == set(OUTPUT_FORMATS)


# -- JUnit ------------------------------------------------------------------------------------------------------------


def test_junit_has_a_case_per_rule_and_fails_at_the_level() -> None:
    [suite] = JUnitXml.fromstring(written("junit").encode())
    cases = {case.name.split()[0]: case for case in suite}
    assert set(cases) == {rule.code for rule in BROKEN.rules}
    [failure] = cases["PD101"].result
    assert isinstance(failure, Failure)
    assert failure.message == OVERFLOW.title and "train.py:42" in failure.text
    assert cases["PD201"].result == [] and "flushed" in cases["PD201"].system_out  # a warning, told but not failing
    assert isinstance(cases["PD103"].result[0], Skipped)
    assert (suite.tests, suite.failures, suite.skipped, suite.errors) == (5, 1, 2, 0)


@pytest.mark.parametrize(("level", "failures"), [("error", 1), ("warning", 2), (None, 1)])
def test_junit_follows_the_level(level: str | None, failures: int) -> None:
    assert JUnitXml.fromstring(written("junit", Report(BROKEN, 1, level)).encode()).failures == failures


def test_junit_shows_a_verdict_nobody_can_trust_as_an_error() -> None:
    [suite] = JUnitXml.fromstring(written("junit", Report(UNKNOWN, 3, "error")).encode())
    [error] = [case.result[0] for case in suite if case.result and isinstance(case.result[0], Error)]
    assert "1,024 rows were dropped" in error.message
    assert suite.errors == 1


def test_junit_of_a_gate_tells_expected_found_and_limit() -> None:
    report = gated(1, check("PD801 x", passed=False, fails=True), check("PD802 y", passed=True))
    [suite] = JUnitXml.fromstring(written("junit", report).encode())
    failed, passed = suite
    assert failed.result[0].message == "expected 0.1 %, found 12 %, limit +2 %"
    assert failed.result[0].type == "PD801" and passed.result == []
    assert (suite.name, suite.failures) == ("runs/a", 1)


# -- GitHub -----------------------------------------------------------------------------------------------------------


def annotations(text: str) -> list[tuple[str, str, str]]:
    found = [re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line) for line in text.splitlines()]
    return [(m[1], m[2], m[3]) for m in found if m]


def test_github_names_file_and_line() -> None:
    (kind, fields, message), (second, *_) = annotations(written("github"))
    assert (kind, second) == ("error", "warning")
    assert fields == "file=train.py,line=42,title=PD101 nonfinite-origin-forward"
    assert message.startswith("`blocks.3.attn` made the first Inf at step 37%0A")
    assert written("github").splitlines()[-1] == "precdoctor 1 error, 1 warning; 1 rule could not be judged"


def test_github_never_exceeds_what_is_shown_and_counts_the_rest() -> None:
    many = dataclasses.replace(BROKEN, findings=(OVERFLOW,) * 25 + (UNDERFLOW,))
    found = annotations(written("github", Report(many, 1, "error")))
    errors = [a for a in found if a[0] == "error"]
    assert len(errors) == MAX_ANNOTATIONS
    assert errors[-1][2].startswith("16 more errors")
    assert sum(a[0] == "warning" for a in found) == 1


@pytest.mark.parametrize("shape", ["github", "gitlab", "sarif"])
def test_recorded_names_are_looked_for_in_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)

    def check(name: str) -> None:
        assert written(shape, hostile(name))

    check_each(check, NAMES, repr)


def test_github_obeys_no_recorded_name() -> None:
    check_each(_check_github, NAMES, repr)


def _check_github(name: str) -> None:
    text = written("github", hostile(name))
    lines = text.split("\n")
    assert len(lines) == 3 and not lines[2]
    assert lines[0].startswith("::error ") and lines[0].count("::") == 2 + lines[0].split("::", 2)[2].count("::")
    assert not lines[1].startswith("::") and "##[" not in text and "##vso[" not in text
    assert not any(ord(c) < 32 and c != "\n" for c in text)


# -- GitLab -----------------------------------------------------------------------------------------------------------


def test_gitlab_has_what_code_quality_needs() -> None:
    issues = json.loads(written("gitlab"))
    assert [i["severity"] for i in issues] == ["critical", "major"]
    assert issues[0]["location"] == {"path": "train.py", "lines": {"begin": 42}}
    assert issues[1]["location"] == {"path": "train.py", "lines": {"begin": 1}}  # no line: the script
    assert len({i["fingerprint"] for i in issues}) == 2


def test_a_fingerprint_outlives_the_step_and_the_numbers() -> None:
    later = dataclasses.replace(
        OVERFLOW, title="elsewhere", location=dataclasses.replace(OVERFLOW.location, step=99), evidence={}
    )
    moved = dataclasses.replace(OVERFLOW, location=dataclasses.replace(OVERFLOW.location, module="blocks.4.attn"))

    def prints(*findings: object) -> list[str]:
        diagnosis = dataclasses.replace(BROKEN, findings=findings)
        return [i["fingerprint"] for i in json.loads(written("gitlab", Report(diagnosis, 1, None)))]

    assert prints(OVERFLOW) == prints(later) != prints(moved)
    assert len(set(prints(OVERFLOW, OVERFLOW))) == 2  # equal ones would be merged


# -- SARIF ------------------------------------------------------------------------------------------------------------


def test_sarif_is_valid_and_complete() -> None:
    log = Sarif.model_validate_json(written("sarif"))
    [run] = log.runs
    assert [rule.id for rule in run.tool.driver.rules] == ["PD101", "PD201"]
    first, second = run.results
    assert (first.rule_id, first.level.value, second.level.value) == ("PD101", "error", "warning")
    [place] = first.locations
    assert place.physical_location.artifact_location.uri == "train.py"
    assert place.physical_location.region.start_line == 42
    raw = json.loads(written("sarif"))["runs"][0]
    assert (
        raw["results"][0]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "GPT#0.blocks.3.attn output"
    )
    assert "## What it finds" in raw["tool"]["driver"]["rules"][0]["help"]["markdown"] or raw["tool"]["driver"]["rules"]


def test_sarif_says_when_nobody_can_trust_it() -> None:
    run = json.loads(written("sarif", Report(UNKNOWN, 3, "error")))["runs"][0]
    [invocation] = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 3)
    assert "rows were dropped" in invocation["toolExecutionNotifications"][0]["message"]["text"]


# -- Markdown ---------------------------------------------------------------------------------------------------------


def test_markdown_tells_the_findings_and_what_to_do() -> None:
    text = written("markdown")
    assert text.startswith("## precdoctor 1 error, 1 warning")
    assert "- source: `train.py:42` `att = q @ k.transpose(-2, -1)`" in text
    assert "- cause: `matmul-overflow`" in text
    assert "- resume from a checkpoint at or before step 36" in text
    assert "```python\nwith torch.autocast" in text
    assert "(predicted: flushed fraction 41 % to 0.3 %, overflow 0)" in text


def test_markdown_of_a_gate_shows_what_failed() -> None:
    report = gated(3, check("PD801 x", passed=False, fails=True), reasons=("the baseline was killed",))
    text = written("markdown", report)
    assert text.startswith("## precdoctor no trustworthy verdict: 1 error")
    assert "**No trustworthy verdict:** the baseline was killed" in text
    assert "| fails | PD801 x | head output | 0.1 % | 12 % | +2 % |" in text


def test_markdown_shows_recorded_names_as_text() -> None:
    check_each(_check_markdown, NAMES, repr)


def _check_markdown(name: str) -> None:
    text = written("markdown", hostile(name))
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    flat = [t for token in tokens for t in (token, *(token.children or ()))]
    kinds = {t.type for t in flat}
    assert not kinds & {"link_open", "image", "html_inline", "s_open", "em_open"}
    blocks = {t.content.strip() for t in flat if t.type == "html_block"}
    assert blocks == {"<details><summary>3 rules checked, 1 passed</summary>", "</details>"}
    assert not any(line.lstrip().startswith("::") for line in text.splitlines())
    columns = [t for t in flat if t.type == "th_open"]
    assert len(columns) == 4 + 3
    assert "@" not in re.sub(r"`[^`]*`|```.*?```", "", text, flags=re.DOTALL)
    assert len(text) < 900_000


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", OUTPUT_FORMATS)
def test_hostile_names_break_no_document(shape: str) -> None:
    """One report that holds all of them, and one for each, in which no other stands before it."""
    reports = [NAMES, *((name,) for name in NAMES)]
    check_each(lambda names: _check_document(shape, written(shape, hostile(*names))), reports)


def _check_document(shape: str, text: str) -> None:
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in text)
    if shape == "junit":
        ET.fromstring(text)
    elif shape in ("json", "gitlab", "sarif"):
        json.loads(text)
    if shape == "sarif":
        Sarif.model_validate_json(text)


@pytest.mark.parametrize("shape", OUTPUT_FORMATS)
def test_a_clean_run_alarms_nobody(shape: str) -> None:
    text = written(shape, Report(CLEAN, 0, "error"))
    assert "::error" not in text and "<failure" not in text and "<error" not in text
    if shape == "gitlab":
        assert json.loads(text) == []
    if shape == "sarif":
        assert json.loads(text)["runs"][0]["results"] == []


def test_findings_of_every_weight_reach_every_annotation_format() -> None:
    note = dataclasses.replace(UNDERFLOW, severity=Severity.INFO)
    report = Report(dataclasses.replace(BROKEN, findings=(OVERFLOW, UNDERFLOW, note)), 1, "error")
    assert [a[0] for a in annotations(written("github", report))] == ["error", "warning", "notice"]
    assert [r["level"] for r in json.loads(written("sarif", report))["runs"][0]["results"]] == [
        "error",
        "warning",
        "note",
    ]
