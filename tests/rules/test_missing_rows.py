"""A log that lost rows: no rule calls what it could not see a pass, and none invents a fault out of a hole."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Severity, Status
from precdoctor.runlog import Run, open_run
from tests.support import samples
from tests.support.runs import write_run
from tests.support.training import Training

SHARE = 0.3
FIRST = {code: sample for code, _, sample in reversed(list(samples.firing()))}
#: Of every second rule one sample; `make slow` takes all.
RECORDED = [
    pytest.param(p, id=f"{code}-{p.name}", marks=pytest.mark.slow if number or nth % 2 else ())
    for nth, (code, of_code) in enumerate(itertools.groupby(samples.recorded("healthy"), key=lambda found: found[0]))
    for number, (_, p) in enumerate(of_code)
]


def drop_event(rows: int) -> dict[str, Any]:
    return {"event": "drop", "step": 0, "data": json.dumps({"reason": "queue_full", "rows": rows})}


def thinned(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    return [r for r in rows if rng.random() >= SHARE]


def with_holes(make: Callable[[], Training], path: Path) -> Run:
    """The training with three rows in ten gone, of its tensors and of its steps."""
    run, rng = make(), random.Random(7)
    before = sum(map(len, run.tensors.values())) + len(run.step_rows)
    run.tensors = {step: thinned(rows, rng) for step, rows in run.tensors.items()}
    run.step_rows = {r["step"]: r for r in thinned(list(run.step_rows.values()), rng)}
    run.events.append(drop_event(before - sum(map(len, run.tensors.values())) - len(run.step_rows)))
    return run.write(path)


@pytest.mark.parametrize(
    "code", [pytest.param(c, marks=pytest.mark.slow if nth % 2 else ()) for nth, c in enumerate(sorted(FIRST))]
)
def test_a_fault_in_a_log_with_holes_is_never_passed(code: str, tmp_path: Path) -> None:
    diagnosis = diagnose(with_holes(FIRST[code].make, tmp_path / "run"), select=[code])

    [outcome] = [r for r in diagnosis.rules if r.code == code]
    assert outcome.status in (Status.INDETERMINATE, Status.FAILED), outcome.reason
    assert diagnosis.recorder["dropped"]["queue_full"] > 0


@pytest.mark.parametrize("folder", RECORDED)
def test_holes_in_a_healthy_log_are_no_fault(folder: Path, tmp_path: Path) -> None:
    healthy, rng = open_run(folder / "run"), random.Random(7)
    tables = {}
    for table in ("tensors", "steps", "events"):
        rows = healthy.dataset(table).read_all().to_pylist()
        tables[table] = [{k: v for k, v in r.items() if k not in ("attempt", "id")} for r in rows]
    kept = {table: thinned(tables[table], rng) for table in ("tensors", "steps")}
    lost = sum(len(tables[t]) - len(kept[t]) for t in kept)
    events = [*tables["events"], drop_event(lost)]
    facts = healthy.ranks[0].facts or {}
    write_run(tmp_path / "run", kept["tensors"], kept["steps"], events, facts=facts)

    diagnosis = diagnose(open_run(tmp_path / "run"))

    assert [f"{f.code}: {f.title}" for f in diagnosis.findings if f.severity is not Severity.INFO] == []
    assert Status.PASSED not in {r.status for r in diagnosis.rules}
