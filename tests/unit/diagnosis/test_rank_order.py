"""Which of several ranks went non-finite first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.engine import diagnose
from tests.support.runs import write_run
from tests.support.training import FACTS, Training, tensor

SECOND = 10**9


def _finding(
    path: Path,
    bad: dict[int, int],
    *,
    ranks: int = 4,
    reports: dict[int, float] | None = None,
    skew: float = 0.0,
    change: Callable[[int, Training], None] = lambda _rank, _training: None,
    replays: Sequence[dict[str, Any]] = (),
    reported: int = 0,
) -> Finding:
    """The finding of a run of which the ranks in ``bad`` have a NaN from that step on.

    Args:
        path: where the run is written.
        bad: the first bad step by rank.
        ranks: how many there are.
        reports: seconds at which ranks report it.
        skew: seconds by which the clock of each rank is ahead of the one before.
        change: made to the rows of each rank.
        replays: events of replayed steps.
        reported: the step that ranks report that are not in ``bad``.
    """
    tensors: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = [*replays]
    for rank in range(ranks):
        training = Training(dtype="float16")
        if rank in bad:
            training.poison(bad[rank], "output", "head", nan=1)
        change(rank, training)
        tensors += [{**row, "rank": rank} for rows in training.tensors.values() for row in rows]
        ends = {"rank": rank}
        steps += [{**row, **ends, "wall_time": 100.0 + s + rank * skew} for s, row in training.step_rows.items()]
        if reports is not None and rank in reports:
            report = {"event": "nonfinite", "step": bad.get(rank, reported), "rank": rank, "data": "{}"}
            events.append({**report, "time_ns": int(reports[rank] * SECOND)})
    write_run(path, tensors, steps, events, facts=FACTS, ranks=ranks)
    return diagnose(path).findings[0]


def test_the_first_rank_is_named_with_those_that_followed(tmp_path: Path) -> None:
    finding = _finding(tmp_path / "run", {2: 5, 0: 6, 1: 6})
    assert "Rank 2 went non-finite first, at step 5. 2 more ranks followed by step 6. 1 rank stayed finite." in (
        finding.message
    )
    order = finding.evidence["rank_order"]
    assert (order["ranks"], order["certain"], order["later_ranks"], order["finite_ranks"]) == ([2], True, 2, 1)


def test_reports_decide_where_clocks_agree(tmp_path: Path) -> None:
    reports = {0: 110.0, 3: 109.2}
    finding = _finding(tmp_path / "run", {0: 5, 3: 5}, reports=reports, skew=0.01)
    assert "Rank 3 reported it first, 0.8 s before the next (clocks differ by up to 0.03 s)." in finding.message
    assert finding.evidence["rank_order"]["certain"]


def test_clocks_that_differ_leave_it_open(tmp_path: Path) -> None:
    finding = _finding(tmp_path / "run", {0: 5, 3: 5}, reports={0: 110.0, 3: 109.9}, skew=0.5)
    assert "Ranks 0, 3 went non-finite at the same step. Which came first is unknown, because" in finding.message
    assert "clocks differ by up to 1.5 s" in finding.message
    assert not finding.evidence["rank_order"]["certain"]


def test_a_rank_that_got_it_through_the_gradients_is_not_the_first(tmp_path: Path) -> None:
    """It reports first, because its own loss is finite and nothing holds it up."""

    def spread(rank: int, training: Training) -> None:
        if rank == 0:
            for row in training.tensors[5]:
                if row["kind"] in ("output", "loss", "grad_output", "input"):
                    row |= {"nan": 0, "first_bad_order": None, "amax": 1.0}
            training.step_rows[5]["loss"] = 2.5

    finding = _finding(tmp_path / "run", {0: 5, 1: 5}, ranks=2, reports={0: 109.0, 1: 110.0}, change=spread)
    assert "Rank 1 went non-finite first, at step 5. 1 more rank followed by step 5." in finding.message


def _replay(rank: int, outcome: str, step: int = 5) -> list[dict[str, Any]]:
    """The events of a rank whose replay found the derivative of a root (``origin``), or nothing (``outside``)."""
    found = {"outcome": outcome, "phase": "backward", "reproduced": "bit-for-bit"}
    found |= {"origins": [2], "path": [2]} if outcome == "origin" else {}
    common = {"step": step, "rank": rank}
    events = [{**common, "event": "incident", "id": f"{rank}-i0", "data": json.dumps(found)}]
    if outcome != "origin":
        return events
    ops = [
        {"index": 1, "phase": "forward", "op": "aten.sqrt.default", "bad_out": 0},
        {
            "index": 2,
            "phase": "backward",
            "op": "aten.div.Tensor",
            "node": "SqrtBackward0",
            "forward": 1,
            "bad_out": 2,
            "bad_in": [0, 0],
            "sources": [[0], [1]],
        },
    ]
    for op in ops:
        where = {"op": op["op"], "file": "train.py", "line": 19, "code": "d = x.sqrt()"}
        events.append({**common, "event": "op", "parent_id": f"{rank}-i0", **where, "data": json.dumps(op)})
    return events


def _reduced(own: dict[int, bool]) -> Callable[[int, Training], None]:
    """Rows of ranks that all receive a NaN with the reduced gradients of step 5; ``own``: made in their own pass."""

    def change(rank: int, training: Training) -> None:
        late = ("weight_grad_step", "update") if not own[rank] else ("grad_output", "weight_grad", "weight_grad_step")
        for row in training.tensors[5]:
            if row["kind"] in late:
                row |= {"nan": 1, "first_bad_order": row["order"], "amax": None}
        training.step_rows[5]["non_finite"] = 1

    return change


@pytest.mark.parametrize("named", [True, False])
def test_the_rank_whose_backward_pass_made_it_goes_before_those_that_received_it(named: bool, tmp_path: Path) -> None:
    """All ranks report behind the reduction, so the order of their reports says nothing."""
    replays = [*_replay(0, "outside"), *_replay(1, "origin")] if named else []
    own = {0: False, 1: True}
    reports = {0: 109.0, 1: 110.0}
    training = {"ranks": 2, "reports": reports, "change": _reduced(own), "replays": replays}
    finding = _finding(tmp_path / "run", {}, **training, reported=5)
    assert (finding.code, finding.location.rank) == ("PD102", 1)
    assert ("sqrt in the loss code" in finding.title) is named
    assert "Rank 1 went non-finite first, at step 5. 1 more rank followed by step 5." in finding.message


@pytest.mark.parametrize("first", [0, 1])
def test_a_replay_that_found_an_op_decides_where_all_ranks_have_bad_gradients(first: int, tmp_path: Path) -> None:
    """Sharded gradients are reduced before anybody sees them."""
    replays = [*_replay(first, "origin"), *_replay(1 - first, "outside")]
    training = {"ranks": 2, "reports": {0: 109.0, 1: 110.0}, "replays": replays}
    finding = _finding(tmp_path / "run", {}, **training, change=_reduced({0: True, 1: True}), reported=5)
    assert (finding.location.rank, finding.location.op) == (first, "aten.sqrt.default")
    assert f"Rank {first} went non-finite first, at step 5." in finding.message


def test_reports_of_reduced_gradients_tell_no_order(tmp_path: Path) -> None:
    change = _reduced({0: True, 1: True})
    finding = _finding(tmp_path / "run", {}, ranks=2, reports={0: 109.0, 1: 110.0}, change=change, reported=5)
    assert "Ranks 0, 1 went non-finite at the same step. Which came first is unknown." in finding.message


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_alone_is_not_worth_a_sentence(ranks: int, tmp_path: Path) -> None:
    finding = _finding(tmp_path / "run", {0: 5}, ranks=ranks)
    assert ("rank_order" in finding.evidence) is (ranks > 1)


def test_a_report_of_another_rank_does_not_contradict_the_origin(tmp_path: Path) -> None:
    """Through tensor parallelism a rank is given what went wrong on the other one, and may say so before it."""

    def batch(rank: int, training: Training) -> None:
        training.tensors[5].insert(0, tensor(5, "batch", "", 0, module_class="GPT", name="0", nan=int(rank == 3)))

    finding = _finding(tmp_path / "run", {0: 5, 3: 5}, reports={0: 109.2, 3: 110.0}, skew=0.01, change=batch)
    assert (finding.code, finding.location.rank) == ("PD104", 3)
    assert "reported it first" not in finding.message and "at the same step." in finding.message
