import math

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from precdoctor.errors import CorruptRunError, UsageError
from precdoctor.runlog import open_run, parts
from precdoctor.runlog.schema import TABLES
from tests.support.memory import memory_used_by
from tests.support.rows import awkward_rows
from tests.support.runs import write_run


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("table", TABLES)
def test_every_column_comes_back(tmp_path, table, end):
    rows = awkward_rows(table)
    run = open_run(write_run(tmp_path / "run", **{table: rows}, end=end))
    read = run.dataset(table).read_all()
    assert read.schema.names == [*TABLES[table].names, "attempt"]
    assert read.schema.remove(len(TABLES[table])).equals(TABLES[table])
    assert read.drop_columns(["attempt"]).to_pylist() == rows
    assert len(getattr(run, table)()) == len(rows)


def test_nan_and_null_stay_apart(tmp_path):
    run = open_run(write_run(tmp_path / "run", steps=[{"loss": math.nan}, {"loss": None}]))
    loss = run.dataset("steps", ["loss"]).read_all()["loss"]
    assert loss.null_count == 1
    assert math.isnan(loss[0].as_py())


def test_frames_keep_large_integers(tmp_path):
    frame = open_run(write_run(tmp_path / "run", [{"fingerprint": 2**64 - 1}, {"order": 2**53 + 1}])).tensors()
    assert frame["fingerprint"].tolist()[0] == 2**64 - 1
    assert frame["order"].tolist()[1] == 2**53 + 1
    assert str(frame["step"].dtype) == "int64"
    assert str(frame["module"].dtype) == "category"


def test_empty_tables_have_their_columns(tmp_path):
    run = open_run(write_run(tmp_path / "run"))
    for table, schema in TABLES.items():
        frame = getattr(run, table)()
        assert len(frame) == 0
        assert list(frame.columns) == [*schema.names, "attempt"]
    assert open_run(write_run(tmp_path / "none", ranks=0)).tensors(["step"], [("step", "==", 1)]).empty


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rows = [{"step": s, "module": m, "kind": k} for s in range(4) for m in "ab" for k in ("output", "weight")]
    return open_run(write_run(tmp_path_factory.mktemp("runs") / "run", rows, ranks=2))


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        (None, 32),
        ([], 32),
        ([("step", "==", 3)], 8),
        ([("step", "=", 3), ("rank", "==", 1)], 4),
        ([("step", ">=", 1), ("step", "<", 3)], 16),
        ([("step", ">", 1), ("step", "<=", 3)], 16),
        ([("step", "!=", 1)], 24),
        ([("step", "in", {0, 3}), ("kind", "==", "output")], 8),
        ([("module", "not in", ["a"])], 16),
        ([("kind", "in", [])], 0),
        ([[("step", "==", 0)], [("step", "==", 1), ("module", "==", "a")]], 12),
        ([("attempt", "==", 0)], 32),
        ([("attempt", "==", 1)], 0),
        ([("step", "==", 99)], 0),
        (pc.field("step") == 3, 8),
        ((pc.field("module") == "a") & (pc.field("rank") == 0), 8),
    ],
)
@pytest.mark.parametrize("columns", [None, ["name", "step"], ["attempt"]])
def test_filters(run, filters, rows, columns):
    frame = run.tensors(columns, filters)
    assert len(frame) == rows
    assert columns is None or list(frame.columns) == columns
    assert sum(batch.num_rows for batch in run.batches("tensors", columns, filters)) == rows


def test_steps_outside_a_part_are_not_decoded(tmp_path, monkeypatch):
    directory = write_run(tmp_path / "run", [{"step": 5}])
    opened = open_run(directory)
    monkeypatch.setattr(parts, "_open_parquet", None)
    assert opened.tensors(["step"], [("step", "<", 5)]).empty
    with pytest.raises(CorruptRunError):
        opened.tensors(["step"], [("step", "<=", 5)])


@pytest.mark.parametrize(
    ("columns", "filters", "message"),
    [
        (["modul"], None, "did you mean 'module'"),
        ("step", None, "takes a list"),
        (None, [("stpe", "==", 1)], "did you mean 'step'"),
        (None, [("step", "is", 1)], "no filter operator 'is'"),
        (None, [("step", "==", "x")], "cannot be evaluated"),
        (None, [("step", "in", 3)], "cannot be evaluated"),
        (None, [("step", "==")], "is a tuple"),
        (None, [("exp_hist", "==", 1)], "cannot be evaluated"),
        (None, pc.field("nothing") == 1, "cannot be evaluated"),
        (None, ["step"], "is a tuple"),
        (None, 3, "takes a list"),
    ],
)
def test_requests_that_cannot_be_met(run, columns, filters, message):
    with pytest.raises(UsageError, match=message):
        run.tensors(columns, filters)


def test_unknown_table(run):
    with pytest.raises(UsageError, match="did you mean 'tensors'"):
        run.batches("tensor")
    with pytest.raises(UsageError, match="no table"):
        run.dataset("../../etc")


def test_attempts_are_told_apart(tmp_path):
    directory = write_run(tmp_path / "run", [{"step": 1}])
    (directory / "rank-00000.1").mkdir()
    for path in (directory / "rank-00000").iterdir():
        (directory / "rank-00000.1" / path.name).write_bytes(path.read_bytes())
    opened = open_run(directory)
    assert opened.tensors(["attempt"])["attempt"].tolist() == [0, 1]
    assert [(r.rank, r.attempt) for r in opened.ranks] == [(0, 0), (0, 1)]


def test_a_killed_rank_is_incomplete_and_readable(tmp_path):
    opened = open_run(write_run(tmp_path / "run", [{}], facts={"device": {"type": "cpu"}}, end=False))
    (rank,) = opened.ranks
    assert not rank.complete
    assert rank.facts == {"device": {"type": "cpu"}}
    assert rank.problems == ["end.json is missing: the process was killed, is still running, or had no disk space left"]
    assert len(opened.tensors()) == 1


def test_dataset_reads_as_a_stream(run):
    reader = run.dataset("tensors", ["step", "module"], [("rank", "==", 1)])
    assert isinstance(reader, pa.RecordBatchReader)
    assert sum(batch.num_rows for batch in reader) == 16


def test_attach_lines(tmp_path):
    directory = write_run(tmp_path / "run")
    assert open_run(directory).attach_lines() == []
    (directory / "attach.jsonl").write_text('{"event": "boot"}\n{"event": "torch"}\n{"eve')
    assert [line["event"] for line in open_run(directory).attach_lines()] == ["boot", "torch"]


def test_memory_does_not_grow_with_the_log(tmp_path):
    def peak(parts):
        rows = [{"step": n, "exp_hist": [n] * 300} for n in range(200 * parts)]
        opened = open_run(write_run(tmp_path / str(parts), rows, batch_rows=200, rotate_bytes=1))

        def read():
            assert sum(batch.num_rows for batch in opened.batches("tensors")) == 200 * parts

        return memory_used_by(read)

    assert peak(8) < 1.5 * peak(2)
