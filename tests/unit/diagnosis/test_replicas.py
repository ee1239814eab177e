"""Copies of weights held against one another: against a slow reference, in any order and grouping of the parts."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.analyses.replicas import COLUMNS, PARTIAL, Replicas, merge, replica_differences, summarise
from precdoctor.diagnosis.families.configuration import unequal_replicas, unequal_replicas_causes
from precdoctor.diagnosis.survey.view import Process
from precdoctor.reporting.finding_view import place as place_of
from precdoctor.runlog.schema import TENSORS
from tests.rules.PD710.samples import ALL, apart, replicas
from tests.support.training import FACTS, Training, poison

RANKS = 4
#: FSDP's and DDP's: two weights that all ranks hold, two that ranks 0 and 2, and 1 and 3, hold.
PLACEMENTS = [{"by": "DistributedDataParallel", "first": 0, "replicas": RANKS}, {"by": "DTensor", "replicas": 2}]


def facts(rank: int, *, restart: int | None = 0) -> dict[str, Any]:
    placements = [PLACEMENTS[0], {**PLACEMENTS[1], "first": rank % 2}, {"by": "DTensor", "first": rank, "replicas": 1}]
    parameters = [{"name": "weight", "module": str(n), "placement": n // 2} for n in range(6)]
    parameters.append({"name": "weight", "module": "local"})
    return {
        "layout": {"restart": restart, "placements": placements},
        "roots": [{"name": "Net#0", "parameters": parameters}],
    }


EVERYBODY = {Process(rank, 0): facts(rank) for rank in range(RANKS)}
ROW = st.fixed_dictionaries(
    {
        "step": st.integers(0, 3),
        "rank": st.integers(0, RANKS - 1),
        "module": st.sampled_from(("0", "1", "2", "3", "4", "local", "unknown")),
        "kind": st.sampled_from(("weight", "weight", "weight", "update")),
        "fingerprint": st.sampled_from((None, 1, 2, 2**64 - 1)),
        "order": st.sampled_from((None, 3, 7)),
        "nan": st.sampled_from((0, 0, 0, 5)),
    }
)
ROWS = st.lists(ROW, max_size=60, unique_by=lambda r: (r["step"], r["rank"], r["module"], r["kind"]))


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = [c for c in COLUMNS if c != "attempt"]
    filled = [{"root": "Net#0", "name": "weight", "nan": 0, "pos_inf": 0, "neg_inf": 0, **r} for r in rows]
    arrays = [pa.array([r[c] for r in filled], TENSORS.field(c).type) for c in columns]
    return pa.record_batch([*arrays, pa.array([0] * len(rows), pa.int32())], [*columns, "attempt"])


def slowly(rows: list[dict[str, Any]], held_by: Replicas) -> list[dict[str, Any]]:
    """The summary, row by row."""
    held = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for number, weight in enumerate(held_by.weights):
            mine = weight.module == row["module"] and Process(row["rank"], 0) in held_by.holders(number)
            if mine and row["kind"] == "weight" and row["fingerprint"] is not None:
                held[number][row["step"]].append(row)
    found = []
    for number, by_step in sorted(held.items()):
        compared = {step: mine for step, mine in by_step.items() if len(mine) > 1}
        if not compared:
            continue
        most = max(map(len, compared.values()))
        values = {step: {r["fingerprint"] for r in mine} for step, mine in compared.items()}
        different = sorted(step for step, v in values.items() if len(v) > 1)
        finite = {step for step, mine in compared.items() if not any(r["nan"] for r in mine)}
        equal = [s for s, v in values.items() if len(v) == 1 and len(compared[s]) == most and s in finite]
        orders = [r["order"] for mine in compared.values() for r in mine if r["order"] is not None]
        found.append(
            {
                "weight": number,
                "first": min(compared),
                "last": max(compared),
                "steps": len(compared),
                "different": len(different),
                "differs_from": different[0] if different else None,
                "equal_again": max(equal, default=None),
                "order": min(orders, default=None),
            }
        )
    return found


@settings(deadline=None, max_examples=150)
@given(ROWS, st.lists(st.integers(0, 59), max_size=6), st.randoms())
def test_any_order_and_grouping_gives_what_a_slow_comparison_gives(rows, cuts, random):
    replicas = Replicas(EVERYBODY)
    bounds = sorted({0, len(rows), *(min(c, len(rows)) for c in cuts)})
    shuffled = random.sample(rows, len(rows))
    parts = [replicas.compare(batch_of(shuffled[a:b])) for a, b in itertools.pairwise(bounds)]
    random.shuffle(parts)
    while len(parts) > 1:  # any tree
        at = random.randrange(len(parts) - 1)
        parts[at : at + 2] = [merge(parts[at : at + 2])]
    expected = slowly(rows, replicas)
    assert summarise(merge(parts)).to_pylist() == expected
    batches = [batch_of(rows[a:b]) for a, b in itertools.pairwise(bounds)]
    assert replica_differences(iter(batches), replicas).to_pylist() == expected


def test_only_what_two_recorded_ranks_hold_is_compared():
    weights = Replicas(EVERYBODY).weights
    assert [(w.module, w.first) for w in weights] == [("0", 0), ("1", 0), ("2", 0), ("3", 0), ("2", 1), ("3", 1)]
    assert [w.module for w in Replicas({Process(r, 0): facts(r) for r in (0, 1)}).weights] == ["0", "1"]
    assert Replicas({Process(0, 0): facts(0)}).weights == ()
    assert Replicas({Process(r, 0): {} for r in (0, 1)}).weights == (), "an older log"


def test_a_rank_that_was_started_again_is_not_held_against_one_that_was_not():
    assert Replicas({Process(0, 0): facts(0, restart=1), Process(1, 0): facts(1, restart=0)}).weights == ()


def test_memory_does_not_grow_with_ranks():
    """Per weight and step there is one row, however many ranks were merged."""
    rows = [{"step": s, "rank": r, "module": "0", "kind": "weight", "fingerprint": s, "order": 1}
            for r in range(RANKS) for s in range(10)]  # fmt: skip
    replicas = Replicas(EVERYBODY)
    total = PARTIAL.empty_table()
    for row in rows:
        total = merge([total, replicas.compare(batch_of([row]))])
    assert total.num_rows == 10
    assert set(total["copies"].to_pylist()) == {RANKS}


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ({}, "rank 1"),
        ({"dimensions": [{"name": "dp", "size": 2, "rank": 1}]}, "rank 1"),
        ({"dimensions": [{"name": "tp", "size": 2, "rank": 1}]}, "rank 1 (tp rank 1)"),
        (
            {"dimensions": [{"name": n, "size": 2, "rank": 1} for n in ("pp", "tp")], "stages": [2], "stage_count": 4},
            "rank 1 (tp rank 1, stage 2)",
        ),
        ({"dimensions": [{"name": n, "size": 2, "rank": 0} for n in ("dp", "cp")]}, "rank 1 (dp rank 0, cp rank 0)"),
        ({"dimensions": [{"name": "tp", "size": 1, "rank": 0}], "stages": []}, "rank 1"),
    ],
)
def test_a_finding_names_the_place_of_its_rank(tmp_path, layout, place):
    run = Training(ranks=2, facts={**FACTS, "layout": layout})
    mine = copy.deepcopy(run.tensors[7])
    poison(mine, "output", "head", nan=3)
    run.of_rank[1, 7] = mine
    (finding,) = [f for f in diagnose(run.write(tmp_path / "run")).findings if f.code == "PD101"]
    assert finding.location.rank == 1
    assert place_of(finding).endswith(f"step 7, {place}")


def test_ranks_that_count_steps_differently_are_not_held_against_one_another(tmp_path):
    run = replicas(2)
    for step, rows in run.tensors.items():
        mine = copy.deepcopy(rows)
        for row in mine:
            if row["kind"] == "weight" and step >= 4:
                row["fingerprint"] -= 1000  # those of the step before
        run.of_rank[1, step] = mine
    (outcome,) = [r for r in diagnose(run.write(tmp_path / "run")).rules if r.code == "PD710"]
    assert outcome.status.value == "indeterminate"
    assert "rank 1 holds on step 5 what rank 0 held on step 4" in outcome.reason


def test_a_rank_that_turns_nan_before_the_others_does_not_count_steps_differently(tmp_path):
    run = replicas(2)
    for step, rows in run.tensors.items():
        run.of_rank[1, step] = copy.deepcopy(rows)
        for since, mine in ((6, run.of_rank[1, step]), (7, rows)):
            for row in mine:
                if row["kind"] == "weight" and step >= since:
                    row.update(fingerprint=5, nan=4096)
    (outcome,) = [r for r in diagnose(run.write(tmp_path / "run")).rules if r.code == "PD710"]
    assert outcome.status.value == "failed", outcome.reason


@pytest.mark.parametrize(
    ("layout", "status"), [({}, "not-applicable"), ({"failed": "AttributeError: _spec"}, "indeterminate")]
)
def test_a_log_that_does_not_know_the_layout(tmp_path, layout, status):
    diagnosis = diagnose(Training(ranks=2, facts={**FACTS, "layout": layout}).write(tmp_path / "run"))
    (outcome,) = [r for r in diagnosis.rules if r.code == "PD710"]
    assert outcome.status.value == status


def unwrapped(**layout: Any) -> Training:
    """Two ranks of one process group, with the same model, and no wrapper that its layout names."""
    bare = replicas(2, dimensions=[], placements=[], **layout)
    run = Training(ranks=2, facts=bare.facts, steps=24)
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] in ("weight", "weight_grad_step"):
                row["fingerprint"] = 1 + 1000 * step + row["order"]
    return run


def drifting(run: Training, *, weights: tuple[str, ...] = ALL, since: int = 1, until: int = 99) -> Training:
    apart(run, 1, 0, ALL, kinds=("weight_grad_step",))
    return apart(run, 1, since, weights, until=until)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: drifting(unwrapped()), True),
        (lambda: unwrapped(), False),
        (lambda: drifting(unwrapped(), since=0), False),
        (lambda: drifting(unwrapped(), until=20), False),
        (lambda: drifting(unwrapped(), since=12), False),
        (lambda: drifting(unwrapped(), weights=ALL[1:]), False),
        (lambda: apart(unwrapped(), 1, 1, ALL), False),
        (lambda: drifting(unwrapped(stages=[1])), False),
    ],
    ids=["apart", "reduced by hand", "other seeds", "averaged again", "too short", "one matrix is shared",
         "equal gradients", "a pipeline"],
)  # fmt: skip
def test_ranks_that_nothing_keeps_equal(tmp_path, make, found):
    findings = [f for f in diagnose(make().write(tmp_path / "run")).findings if f.code == "PD710"]
    assert bool(findings) == found
    for finding in findings:
        assert (finding.cause, finding.severity.value, finding.location.step) == ("trained-apart", "warning", 1)
        assert "2 ranks train apart from step 1 on" in finding.title


def test_ranks_with_learning_rates_of_their_own_are_trials():
    class View:
        def __init__(self, rates: list[float]) -> None:
            self.rates = rates

        def step_facts(self, process: Process, _step: int) -> Any:
            return SimpleNamespace(lr=self.rates[process.rank])

    holders = SimpleNamespace(equal=0, holders=[Process(0, 0), Process(1, 0)])
    assert unequal_replicas._same_rates(View([0.1, 0.1]), holders)
    assert not unequal_replicas._same_rates(View([0.1, 0.2]), holders)


@pytest.mark.parametrize(("holds", "moved"), [((2, 2), 1), ((0, 4), 1), ((1, 3), 1), ((0, 2), None)])
def test_the_updates_of_a_weight_that_ranks_share_out_belong_to_all_of_them(holds, moved):
    """Of an optimizer that is sharded each rank has the update of a part, or none; here they add up to 8."""
    rows = []
    for rank, elements in enumerate(holds):
        share = 8.0 * elements / sum(holds)
        rows += (
            [(rank, "weight", 4, 1.0), (rank, "update", elements, share)] if elements else [(rank, "weight", 4, 1.0)]
        )
    before = pd.DataFrame(rows, columns=["rank", "kind", "numel", "sum"])
    now = pd.DataFrame([(0, "weight", 4, 9.01), (1, "weight", 4, 12.0)], columns=["rank", "kind", "numel", "sum"])
    assert unequal_replicas_causes._rank_that_changed(before, now, adjacent=True) == moved
