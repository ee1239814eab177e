"""Exit codes: one row per way a run can end."""

from pathlib import Path

import numpy as np
import pytest

from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, Location, RuleOutcome, Severity, Status
from precdoctor.diagnosis.engine import diagnose
from precdoctor.diagnosis.ranking.verdict import exit_code, untrustworthy, worst
from precdoctor.errors import NothingRecordedError, UsageError
from precdoctor.reporting.run_head import run_facts
from precdoctor.runlog import open_run
from tests.support.runs import write_run
from tests.support.tensors import row_of


def diagnosis(
    *severities: Severity, status: Status = Status.PASSED, complete: bool = True, dropped: int = 0
) -> Diagnosis:
    findings = [Finding("PD101", "n", s, 0.9, "t", "m", Location()) for s in severities]
    rules = [RuleOutcome("PD102", "n", status, "why")]
    return Diagnosis({"complete": complete}, findings, rules, {"dropped": {"disk": dropped} if dropped else {}})


E, W, I = Severity.ERROR, Severity.WARNING, Severity.INFO  # noqa: E741


@pytest.mark.parametrize(
    ("given", "level", "code"),
    [
        (diagnosis(), "error", 0),
        (diagnosis(E), None, 0),
        (diagnosis(E), "error", 1),
        (diagnosis(W), "error", 0),
        (diagnosis(W), "warning", 1),
        (diagnosis(I), "warning", 0),
        (diagnosis(complete=False), "error", 3),
        (diagnosis(complete=False), None, 0),
        (diagnosis(W, complete=False), "error", 3),
        (diagnosis(E, complete=False), "error", 1),
        (diagnosis(status=Status.INDETERMINATE), "error", 3),
        (diagnosis(E, status=Status.INDETERMINATE), "error", 1),
        (diagnosis(status=Status.NOT_APPLICABLE), "error", 0),
        (diagnosis(dropped=5), "error", 3),
        (diagnosis(E, dropped=5), "error", 3),
    ],
)
def test_exit_code(given: Diagnosis, level: str | None, code: int) -> None:
    assert exit_code(given, level) == code


@pytest.mark.parametrize(("codes", "one"), [([], 0), ([0, 1], 1), ([1, 3, 0], 3), ([3, 2, 1], 2), ([1, 1], 1)])
def test_priority(codes: list[int], one: int) -> None:
    assert worst(codes) == one


def test_unknown_level() -> None:
    with pytest.raises(UsageError, match="error, warning"):
        exit_code(diagnosis(), "fatal")


def test_reasons_are_sentences() -> None:
    assert untrustworthy(diagnosis()) is None
    assert "never closed" in (untrustworthy(diagnosis(complete=False)) or "")
    assert "5 rows were dropped" in (untrustworthy(diagnosis(dropped=5)) or "")
    assert "could not be judged: why" in (untrustworthy(diagnosis(status=Status.INDETERMINATE)) or "")


def test_a_log_that_ends_before_the_training_is_not_clean(tmp_path: Path) -> None:
    why = "the log has reached --max-disk (400000 bytes)"
    steps = [{"step": n, "loss": 1.0} for n in range(16)]
    rows = [row_of(np.ones(8), step=n, kind="output") for n in range(16)]
    whole = diagnose(open_run(write_run(tmp_path / "whole", rows, steps, end={"reason": "exit"})))
    short = diagnose(
        open_run(write_run(tmp_path / "short", rows, steps, end={"reason": "disk_budget", "message": why}))
    )
    assert "cut_short" not in whole.run and short.run["cut_short"] == why
    assert Status.PASSED in {r.status for r in whole.rules}
    assert {r.status for r in short.rules} == {Status.INDETERMINATE}
    assert all(r.reason.endswith(f"recording ended before the training did: {why}") for r in short.rules)
    assert run_facts(short.run).endswith(f"recorded no further: {why}") and "further" not in run_facts(whole.run)
    assert exit_code(short, "error") == 3

    empty = write_run(tmp_path / "empty", rows, end={"reason": "disk_budget", "message": why})
    with pytest.raises(NothingRecordedError, match=r"recording ended in its first step: .*max-disk"):
        diagnose(open_run(empty))
