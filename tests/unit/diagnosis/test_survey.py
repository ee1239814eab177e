"""The survey of a log: parts and ranks may be read in any grouping, by anybody, and come to the same."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.diagnosis.engine import diagnose, diagnose_view, resolve_options, view_of
from precdoctor.diagnosis.registry import RULES
from precdoctor.diagnosis.survey import stored
from precdoctor.diagnosis.survey.processes import MOST_PROCESSES, Glance, Process, most_processes, representatives
from precdoctor.diagnosis.survey.survey import (
    FEWEST_STEPS,
    MOST_ROWS,
    MOST_STEPS,
    Survey,
    Task,
    chosen_steps,
    merged_surveys,
    read_pieces,
    tasks_of,
)
from precdoctor.diagnosis.survey.totals import KEYS, READ, SUMS, merged, totals
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import RunUnreadableError, UsageError
from precdoctor.reporting.json_report import document, dumps
from precdoctor.runlog import Run, open_run
from precdoctor.runlog.schema import TENSORS
from tests.support.runs import write_run
from tests.support.training import FACTS, Training

_COUNTS = st.integers(0, 1 << 40)
_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.integers(0, 9),
            "rank": st.integers(0, 2),
            "attempt": st.integers(0, 1),
            "root": st.sampled_from(["A#0", "B#0"]),
            "module": st.sampled_from(["", "up", "down"]),
            "kind": st.sampled_from(["output", "weight"]),
            "name": st.sampled_from(["", "weight"]),
            "dtype": st.sampled_from(["float16", "float32"]),
            "format": st.sampled_from([None, "float8_e4m3fn"]),
            "call": st.integers(0, 1),
            "nan": st.sampled_from([0, 0, 0, 3]),
            "amax": st.none() | st.sampled_from([0.0, 1.0, 1.5, 2.0**-30, 2.0**60]),
            "saturated": st.none() | _COUNTS,
            "flushed": st.none() | _COUNTS,
            **dict.fromkeys(("numel", "pos_inf", "neg_inf", "zero", "subnormal"), _COUNTS),
        }
    ),
    max_size=40,
)


def _batch(rows: Sequence[dict[str, object]]) -> pa.RecordBatch:
    fields = [TENSORS.field(n) if n in TENSORS.names else pa.field(n, pa.int32()) for n in READ]
    return pa.RecordBatch.from_pylist(list(rows), pa.schema(fields))


def _sorted(table: pa.Table) -> list[dict[str, object]]:
    return sorted(table.to_pylist(), key=lambda r: tuple(str(r[k]) for k in KEYS))


def _slowly(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The totals by their definition, row by row."""
    found: dict[tuple[object, ...], dict[str, object]] = {}
    for r in rows:
        into = found.setdefault(
            tuple(r[k] for k in KEYS),
            {k: r[k] for k in KEYS} | dict.fromkeys(SUMS, 0) | {"amax": None},
        )
        more = {"rows": 1, "clipping_casts": r["saturated"] is not None}
        more["flushing_casts"] = r["flushed"] is not None
        for name in SUMS:
            into[name] += int(more[name] if name in more else r[name] or 0)  # type: ignore[operator]
        if r["amax"] is not None and (into["amax"] is None or r["amax"] > into["amax"]):  # type: ignore[operator]
            into["amax"] = r["amax"]
    return sorted(found.values(), key=lambda r: tuple(str(r[k]) for k in KEYS))


@given(_ROWS)
@settings(max_examples=60, deadline=None)
def test_totals_are_what_their_definition_says(rows: list[dict[str, object]]) -> None:
    found = _sorted(merged([totals(_batch(rows))] if rows else []))
    assert found == _slowly(rows)


@given(_ROWS, st.randoms(use_true_random=False), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_totals_of_parts_in_any_order_and_grouping_are_those_of_the_whole(
    rows: list[dict[str, object]], order: random.Random, groups: int
) -> None:
    whole = _sorted(merged([totals(_batch(rows))] if rows else []))
    parts: list[list[dict[str, object]]] = [[] for _ in range(groups)]
    for row in rows:
        order.choice(parts).append(row)
    tables = [totals(_batch(part)) for part in parts if part]
    order.shuffle(tables)
    while len(tables) > 1:
        taken = tables[: order.randint(2, len(tables))]
        tables = [merged(taken), *tables[len(taken) :]]
    assert _sorted(merged(tables)) == whole


def _facts(survey: Survey) -> tuple[object, ...]:
    """All that a survey holds, in a form that can be compared."""
    kinds = {kind: steps.tolist() for kind, steps in survey.steps_of.items()}
    batches, rows = survey.batches.to_pylist(), survey.rows.to_pylist()
    return _sorted(survey.totals), kinds, survey.bad.to_pylist(), batches, str(rows), survey.kept


@pytest.mark.parametrize("steps", [None, (2, 5, 11)])
def test_surveys_of_ranks_merge_to_the_survey_of_all(steps: tuple[int, ...] | None, tmp_path: Path) -> None:
    run = _several_ranks(tmp_path / "run", 4)
    pieces = run.pieces("tensors")
    whole = read_pieces(Task(tuple(pieces), steps, True)).survey
    apart = [read_pieces(Task((piece,), steps, True)).survey for piece in pieces]
    first, last = merged_surveys(apart[:2], run.budget), merged_surveys(apart[2:], run.budget)
    found = [_facts(merged_surveys(parts, run.budget)) for parts in ([first, last], apart)]
    assert found[0] == found[1] == _facts(whole)
    assert whole.covers([2, 5]) and whole.covers([3]) is (steps is None)


def _several_ranks(path: Path, ranks: int, *, bad: int | None = None, step: int = 7) -> Run:
    """A run of so many ranks, one of which may have a NaN at a step and behind it."""
    trainings = [Training(dtype="float16") for _ in range(ranks)]
    if bad is not None:
        trainings[bad].poison(step, "output", "head", nan=1)
    tensors, steps = (
        [{**row, "rank": rank} for rank, rows in enumerate(found) for row in rows]
        for found in (
            [[row for rows in t.tensors.values() for row in rows] for t in trainings],
            [list(t.step_rows.values()) for t in trainings],
        )
    )
    return open_run(write_run(path, tensors, steps, facts=FACTS, ranks=ranks))


def test_a_short_log_is_kept_whole_and_a_long_one_by_its_ends_and_bad_steps() -> None:
    sampled = list(range(0, 100_000, 2))
    assert chosen_steps(sampled, [], MOST_ROWS) is None
    found = chosen_steps(sampled, [50_000, 50_002], 10 * MOST_ROWS)
    assert found is not None and found == sorted(found)
    assert {0, 2, 50_000, 50_002, 49_998, 49_986, sampled[-1], sampled[-100]} <= set(found)
    assert FEWEST_STEPS < len(found) <= MOST_STEPS + 100
    gaps = np.diff(found)
    assert gaps.max() <= 2 * 2 * len(sampled) // (MOST_STEPS // 2)


def test_a_large_model_keeps_fewer_steps() -> None:
    sampled = list(range(1000))
    found = chosen_steps(sampled, [], 1000 * 50_000)
    assert found is not None
    assert len(found) <= FEWEST_STEPS + 10


def test_no_finding_of_a_recorded_log_is_lost_where_only_some_of_its_steps_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tests = Path(__file__).resolve().parents[2]
    runs = sorted(p.parent for p in (tests / "rules").glob("*/*/*/run/run.json"))
    long = [path for path in runs if len(RunView(open_run(path)).sampled_steps) > 1.3 * FEWEST_STEPS]
    assert len(long) >= 10
    lost = []
    for path in long:
        found = []
        for most in (MOST_ROWS, 10):
            with monkeypatch.context() as patched:
                patched.setattr("precdoctor.diagnosis.survey.survey.MOST_ROWS", most)
                view = view_of(open_run(path))
                diagnosis = diagnose_view(view, RULES, resolve_options({}))
            found.append({(f.code, f.severity, f.location.module) for f in diagnosis.findings})
        if found[0] != found[1]:
            lost.append(path.relative_to(tests))
    assert lost == []


def test_small_pieces_are_read_together_and_kept_ones_apart_from_others(tmp_path: Path) -> None:
    pieces = _several_ranks(tmp_path / "run", 4).pieces("tensors")
    tasks = tasks_of(zip(pieces, [True, True, False, False], strict=True), [1])
    assert [len(t.pieces) for t in tasks] == [2, 2]
    assert [t.keeps for t in tasks] == [True, False]


@given(st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_processes_that_stand_out_are_chosen_in_any_order(order: random.Random) -> None:
    glances = [Glance(Process(r, 0), math.inf, 99.0, 1.0, 65536.0, 2.0) for r in range(300)]
    strange = {
        17: Glance(Process(17, 0), 40.0, 99.0, 1.0, 65536.0, 2.0),
        101: Glance(Process(101, 0), math.inf, 12.0, 1.0, 65536.0, 2.0),
        202: Glance(Process(202, 0), math.inf, 99.0, 1e6, 65536.0, 2.0),
        250: Glance(Process(250, 0), math.inf, 99.0, 1.0, 2.0, 2.0),
        299: Glance(Process(299, 0), math.inf, 99.0, 1.0, 65536.0, 9.0),
    }
    glances = [strange.get(g.process.rank, g) for g in glances]
    expected = representatives(glances)
    order.shuffle(glances)
    assert representatives(glances) == expected
    assert len(expected) == MOST_PROCESSES
    assert {0, *strange} <= {p.rank for p in expected}


@pytest.mark.parametrize("most", [1, 2, 3, 6, 11])
def test_no_more_processes_are_chosen_than_there_is_room_for(most: int) -> None:
    glances = [Glance(Process(r, 0), math.inf, 99.0, 1.0, 65536.0, 2.0) for r in range(20)]
    for n, changed in enumerate(({"first_bad": 40.0}, {"last": 12.0}, {"grad_norm": 1e6}, {"loss": 9.0})):
        for rank in (4 * n + 3, 4 * n + 4):
            glances[rank] = replace(glances[rank], **changed)
    chosen = [p.rank for p in representatives(glances, most)]
    assert len(set(chosen)) == most and 3 in chosen
    assert {0, 3, 7, 11, 15} <= set(chosen) or most < 6


@pytest.mark.parametrize(
    ("processes", "rows", "most"),
    [(8, 800, 8), (64, 64_000, 16), (8, 8 * 100_000, 2), (4, 4 * 1_000_000, 1), (1, 0, 1)],
)
def test_fewer_processes_are_looked_at_where_each_has_many_steps(processes: int, rows: int, most: int) -> None:
    assert most_processes(processes, rows) == most


def test_a_rank_that_cannot_be_read_is_said_and_the_rest_is_judged(tmp_path: Path) -> None:
    run = _several_ranks(tmp_path / "run", 3, bad=2)
    part = next((run.path / "rank-00001").glob("tensors-*.parquet"))
    part.write_bytes(part.read_bytes()[:-20] + bytes(20))
    found = diagnose(run.path)
    assert [f.code for f in found.findings] == ["PD101"]
    assert [p for p in found.run["problems"] if "rank-00001" in p and "left out" in p]
    passed = [o for o in found.rules if str(o.status) == "passed"]
    assert not passed, "with a rank left out nothing passes"


def test_a_run_whose_only_rank_cannot_be_read_is_refused(tmp_path: Path) -> None:
    run = Training().write(tmp_path / "run")
    part = next((run.path / "rank-00000").glob("tensors-*.parquet"))
    part.write_bytes(part.read_bytes()[:-20] + bytes(20))
    with pytest.raises(RunUnreadableError, match="log verify"):
        diagnose(run.path)


def test_a_fault_of_one_rank_of_many_is_found(tmp_path: Path) -> None:
    run = _several_ranks(tmp_path / "run", MOST_PROCESSES + 5, bad=19)
    view = view_of(run)
    found = diagnose_view(view, RULES, resolve_options({}))
    assert len(view.processes) == MOST_PROCESSES
    assert (found.run["ranks"], found.findings[0].location.rank) == (MOST_PROCESSES + 5, 19)
    counted = sum(view.survey.totals["rows"].to_pylist())
    assert counted == sum(b.num_rows for b in run.batches("tensors", ["step"])), "the totals are of all ranks"


def test_rows_from_the_log_are_of_the_same_processes_as_the_rows_that_were_kept(tmp_path: Path) -> None:
    view = view_of(_several_ranks(tmp_path / "run", MOST_PROCESSES + 5))
    mine = {p.rank for p in view.processes}
    assert len(mine) == MOST_PROCESSES
    for columns in ((), ("block32_hist",)):  # the rows kept have no such column
        assert {r for b in view.batches(columns, ("output",)) for r in b["rank"].to_pylist()} == mine
        every = {r for b in view.batches(columns, ("output",), everyone=True) for r in b["rank"].to_pylist()}
        assert every == set(range(MOST_PROCESSES + 5))


@pytest.mark.parametrize("engine", ["local:2", pytest.param("dask", marks=pytest.mark.slow)])
def test_every_engine_gives_the_same_report(engine: str, tmp_path: Path) -> None:
    if engine == "dask":
        pytest.importorskip("distributed")
    path = _several_ranks(tmp_path / "run", 3, bad=1).path
    texts, environment = [], dict(os.environ)
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # Dask's usual port; somebody else may have it
            taken.bind(("", 8787))
            taken.listen()
        for name in (None, engine):
            run = open_run(path)
            run.engine = name
            texts.append(dumps(document(diagnose(run), 0)))
    assert texts[0] == texts[1]
    assert dict(os.environ) == environment, "what is started later has as many threads as ever"


@pytest.mark.slow
def test_a_dask_worker_that_dies_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr("precdoctor.diagnosis.survey.survey._SMALL", 0)
    run = _several_ranks(tmp_path / "run", 8, bad=5)
    expected = _facts(RunView(run).survey)
    again = open_run(run.path)
    started = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with mock.patch.dict(os.environ), distributed.LocalCluster(**started) as cluster:
        again.engine = f"dask:{cluster.scheduler_address}"
        killed: list[int] = []

        def kill(what: str, done: int, _of: int) -> None:
            if what == "reading tensors" and done == 1:
                worker = next(iter(cluster.workers.values()))
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

        again.progress = kill
        found = _facts(RunView(again).survey)
    assert killed
    assert found == expected


def test_an_engine_that_does_not_exist_is_refused() -> None:
    from precdoctor.runlog.pieces import checked_engine

    assert [checked_engine(e) for e in (None, "local", "local:3", "dask", "dask:tcp://a:8786")]
    for wrong in ("ray", "local:0", "local:x", ""):
        if wrong:
            with pytest.raises(UsageError, match="--engine takes"):
                checked_engine(wrong)


def test_a_stored_survey_is_used_for_these_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "WORTH_STORING", 1)
    run = Training(dtype="float16").poison(7, "output", "head", nan=1).write(tmp_path / "run")
    first = RunView(run).survey
    files = list((tmp_path / "cache").rglob("*.arrows"))
    assert len(files) == 1

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patched:
        patched.setattr("precdoctor.diagnosis.survey.view.read_pieces", refuse)
        assert _facts(RunView(open_run(run.path)).survey) == _facts(first)
    (run.path / "rank-00000" / "parts.jsonl").rename(tmp_path / "parts.jsonl")
    other = Training(dtype="float16").write(tmp_path / "other")
    assert _facts(RunView(other).survey) != _facts(first)
    assert len(list((tmp_path / "cache").rglob("*.arrows"))) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "writable"])
def test_a_stored_survey_that_cannot_be_trusted_is_passed_over(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "WORTH_STORING", 1)
    run = Training().write(tmp_path / "run")
    expected = _facts(RunView(run).survey)
    (file,) = (tmp_path / "cache").rglob("*.arrows")
    if damage == "writable":
        file.parent.chmod(0o777)
    else:
        file.write_bytes(file.read_bytes()[: 900 if damage == "cut" else 0])
    key = file.stem
    assert stored.load(key) is None
    assert _facts(RunView(open_run(run.path)).survey) == expected


def test_stored_surveys_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stored, "_MOST_FILES", 3)
    survey = RunView(Training(steps=2).write(tmp_path / "run")).survey
    for number in range(6):
        stored.store(f"{number:032x}", survey)
        file = tmp_path / "precdoctor" / "surveys" / f"{number:032x}.arrows"
        os.utime(file, ns=(number, number))
    left = {f.stem for f in (tmp_path / "precdoctor" / "surveys").iterdir()}
    assert left == {f"{n:032x}" for n in (3, 4, 5)}
