import errno
import io
import math
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precdoctor.runlog import DiskBudgetReached, RankWriter, create_rank_directory, create_run, open_run, seal
from precdoctor.runlog import writer as writer_module
from precdoctor.runlog.verify import verify
from tests.support.processes import ROOT
from tests.support.rows import training_columns
from tests.support.runs import columns_of


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def rank_directory(tmp_path):
    create_run(tmp_path / "run", {})
    return create_rank_directory(tmp_path / "run", 0)


def append(writer, first, last, table="tensors"):
    rows = [{"step": step} for step in range(first, last)]
    writer.append(table, columns_of(table, rows), len(rows))


def until_full(write):
    """How many times it could be called."""
    for n in range(10_000):
        try:
            write()
        except DiskBudgetReached:
            return n
    raise AssertionError("the budget never ended")


def names(directory, ending=""):
    """The files of a directory, but for temporary ones."""
    return sorted(p.name for p in directory.iterdir() if p.name.endswith(ending) and not p.name.startswith("."))


def test_rotation_by_age(rank_directory):
    clock = Clock()
    writer = RankWriter(rank_directory, rotate_seconds=30, clock=clock)
    append(writer, 0, 2)
    clock.now = 29.9
    append(writer, 2, 3)
    assert names(rank_directory) == ["tensors-000001.arrows.open"]
    clock.now = 30.0
    append(writer, 3, 4)
    assert names(rank_directory, ".parquet") == ["tensors-000001.parquet"]
    assert names(rank_directory, ".open") == []
    append(writer, 4, 5)
    writer.close({"reason": "exit"})
    run = open_run(rank_directory.parent)
    assert run.tensors()["step"].tolist() == [0, 1, 2, 3, 4]
    assert run.ranks[0].end == {"reason": "exit"}
    report = verify(run.path)
    assert report.ok
    assert [(p.name, p.rows, p.first_step, p.last_step) for p in report.ranks[0].parts] == [
        ("tensors-000001.parquet", 4, 0, 3),
        ("tensors-000002.parquet", 1, 4, 4),
    ]


def test_parts_of_a_long_run_grow_with_it(rank_directory):
    clock = Clock()
    writer = RankWriter(rank_directory, rotate_seconds=30, clock=clock)
    half_hour, end = 30 * 60, 3 * 3600
    steps = 0
    for clock.now in [*range(0, half_hour, 30), *range(half_hour, end, 60)]:
        append(writer, steps, steps + 1)
        steps += 1
    parts = names(rank_directory, ".parquet")
    assert len(parts) < 64 * (1 + math.log(end / half_hour)), "one every half minute would be 360"
    rows = [p.rows for p in verify(rank_directory.parent).ranks[0].parts]
    assert rows[:20] == [2] * 20, "every half minute at first"
    assert rows[-2] > rows[25]
    writer.close({})
    assert open_run(rank_directory.parent).tensors()["step"].tolist() == list(range(steps))


def test_a_stream_of_many_batches_does_not_grow_older(rank_directory):
    clock = Clock()
    writer = RankWriter(rank_directory, rotate_seconds=30, clock=clock)
    clock.now = 7 * 24 * 3600.0
    for n in range(600):
        append(writer, n, n + 1)
        clock.now += 1
    assert [p.rows for p in verify(rank_directory.parent).ranks[0].parts] == [256, 256]
    writer.close({})


def test_a_stream_is_synced_as_often_as_parts_were_sealed_at_first(rank_directory, monkeypatch):
    clock, synced = Clock(), []
    writer = RankWriter(rank_directory, rotate_seconds=30, clock=clock)
    clock.now = 24 * 3600.0
    append(writer, 0, 1)
    monkeypatch.setattr("os.fsync", synced.append)
    for n in range(1, 13):
        clock.now += 10
        append(writer, n, n + 1)
    assert names(rank_directory) == ["tensors-000001.arrows.open"]
    assert len(synced) == 4
    writer.close({})


def test_rotation_by_size(rank_directory):
    writer = RankWriter(rank_directory, rotate_bytes=1)
    append(writer, 0, 2)
    append(writer, 2, 4)
    assert names(rank_directory, ".parquet") == ["tensors-000001.parquet", "tensors-000002.parquet"]
    writer.close({})


def test_tables_rotate_on_their_own(rank_directory):
    clock = Clock()
    writer = RankWriter(rank_directory, rotate_seconds=10, clock=clock)
    append(writer, 0, 1, "steps")
    clock.now = 9
    append(writer, 0, 1)
    clock.now = 10
    append(writer, 1, 2, "steps")
    assert names(rank_directory, ".parquet") == ["steps-000001.parquet"]
    assert names(rank_directory, ".open") == ["tensors-000001.arrows.open"]
    writer.close({})


def test_open_rows_are_readable_while_written(rank_directory):
    writer = RankWriter(rank_directory)
    run = open_run(rank_directory.parent)
    for n in range(3):
        append(writer, n, n + 1)
        assert len(run.tensors()) == n + 1
    assert not run.ranks[0].complete
    assert verify(run.path).ranks[0].live
    writer.close({})


def test_numpy_arrow_and_lists_give_the_same_rows(rank_directory):
    writer = RankWriter(rank_directory)
    rows = columns_of("tensors", [{"step": 0}, {"step": 1}])
    rows["sum"] = [1.0, float("nan")]
    rows["exp_hist"] = [[1, 2], [3, 4]]
    arrays = dict(rows, step=np.array([0, 1], np.int32), sum=np.array([1, np.nan], np.float32))
    arrays.update(exp_hist=np.array([[1, 2], [3, 4]]), module=pa.array(["", ""]).dictionary_encode())
    arrow = dict(rows, sum=pa.array([1.0, float("nan")]), exp_hist=pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())))
    for columns in (rows, arrays, arrow):
        writer.append("tensors", columns, 2)
    writer.close({})
    table = open_run(rank_directory.parent).dataset("tensors").read_all()
    first, second, third = (str(table.slice(2 * n, 2).to_pylist()) for n in range(3))
    assert first == second == third
    assert "nan" in first


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("tensor", {}, "no table"),
        ("tensors", {"amx": [1.0]}, "no column 'amx'"),
        ("tensors", {"amax": [1.0, 2.0]}, "2 values for 1 rows"),
        ("tensors", {"numel": None}, "numel may not be null"),
        ("tensors", {"numel": ["x"]}, "does not hold int64"),
        ("tensors", {"fingerprint": [-1]}, "does not hold uint64"),
        ("tensors", {"exp_hist": [["x"]]}, "does not hold list"),
        ("tensors", {"name": ["x" * 1_100_000]}, "more than"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_written(rank_directory, table, change, message):
    writer = RankWriter(rank_directory)
    with pytest.raises(ValueError, match=message):
        writer.append(table, {**columns_of("tensors", [{}]), **change}, 1)
    assert names(rank_directory) == []
    writer.abandon()


def test_file_names_that_are_not_utf8(rank_directory):
    writer = RankWriter(rank_directory)
    writer.append("events", columns_of("events", [{"file": "caf\udce9.py", "code": None}]), 1)
    writer.close({})
    assert open_run(rank_directory.parent).events()["file"].tolist() == ["caf\\udce9.py"]


def test_budget_stops_tensors_first_and_keeps_what_is_there(rank_directory):
    writer = RankWriter(rank_directory, max_bytes=400_000, rotate_bytes=50_000)
    columns = training_columns(50, 1, blocks=True)
    written = 50 * until_full(lambda: writer.append("tensors", columns, 50))
    append(writer, 0, 1, "steps")
    until_full(lambda: append(writer, 0, 1, "events"))
    writer.close({"reason": "max-disk"})
    run = open_run(rank_directory.parent)
    assert written > 1000
    assert len(run.tensors(["step"])) == written
    assert len(run.steps()) == 1
    assert sum(p.stat().st_size for p in rank_directory.iterdir()) < 450_000


def test_a_small_budget_holds_as_much_as_one_of_sealed_parts(rank_directory):
    """What waits in a stream takes about eight times its room: it is sealed before the budget is called used up."""
    writer = RankWriter(rank_directory, max_bytes=400_000)
    columns = training_columns(50, 1, blocks=True)
    written = 50 * until_full(lambda: writer.append("tensors", columns, 50))
    append(writer, 0, 1, "steps")
    assert sum(p.stat().st_size for p in rank_directory.iterdir()) < 450_000
    writer.close({})
    assert len(open_run(rank_directory.parent).tensors(["step"])) == written > 1000


def test_on_a_full_disk_the_end_is_stated_and_the_streams_stay(rank_directory, monkeypatch):
    writer = RankWriter(rank_directory)
    [reserve] = rank_directory.iterdir()
    append(writer, 0, 4)
    append(writer, 0, 1, "events")
    seen = []

    def full(_directory, table, *_):
        seen.append((table, reserve.exists()))
        raise OSError(errno.ENOSPC, "No space left on device")

    assert reserve.stat().st_blocks * 512 >= 4096, "it takes real room"
    monkeypatch.setattr(writer_module, "seal_stream", full)
    with pytest.raises(OSError, match="No space left"):
        writer.close({"reason": "disk"})
    assert seen == [("events", False)], "the smallest stream comes first, and the room is given up before"
    run = open_run(rank_directory.parent)
    assert run.ranks[0].end == {"reason": "disk"} and len(run.tensors(["step"])) == 4


def test_a_part_that_does_not_fit_is_an_os_error(rank_directory, monkeypatch):
    """Room for the footer, but not for the rows: pyarrow's writer then fails in its own way when it is closed."""

    class Full(io.BufferedWriter):
        refused = False

        def write(self, data):
            if not self.refused and len(data) > 256:
                self.refused = True
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    real = pa.PythonFile
    monkeypatch.setattr(pa, "PythonFile", lambda file, mode: real(Full(file.raw), mode=mode))
    writer = RankWriter(rank_directory)
    writer.append("tensors", training_columns(500, 1, blocks=True), 500)
    with pytest.raises(OSError, match="No space left"):
        writer.close({"reason": "disk"})
    assert open_run(rank_directory.parent).ranks[0].end == {"reason": "disk"}


def test_close_twice_and_append_after_it(rank_directory):
    writer = RankWriter(rank_directory)
    writer.close({"n": 1})
    writer.close({"n": 2})
    with pytest.raises(ValueError, match="closed"):
        append(writer, 0, 1)
    assert open_run(rank_directory.parent).ranks[0].end == {"n": 1}


def test_second_writer_of_a_directory_is_refused(rank_directory):
    writer = RankWriter(rank_directory)
    with pytest.raises(BlockingIOError):
        RankWriter(rank_directory)
    writer.close({})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 minds Arrow's threads
def test_a_forked_child_writes_nothing(rank_directory):
    writer = RankWriter(rank_directory)
    append(writer, 0, 1)
    child = os.fork()
    if child == 0:
        try:
            append(writer, 1, 2)
        except ValueError:
            writer.close({"from": "child"})
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verify(rank_directory.parent).ranks[0].live
    append(writer, 1, 2)
    writer.close({"from": "parent"})
    run = open_run(rank_directory.parent)
    assert run.tensors()["step"].tolist() == [0, 1]
    assert run.ranks[0].end == {"from": "parent"}


def test_seal_leaves_a_living_writer_alone_and_is_idempotent(rank_directory):
    run = rank_directory.parent
    writer = RankWriter(rank_directory)
    append(writer, 0, 3)
    assert seal(run) == []
    assert names(rank_directory, ".open") == ["tensors-000001.arrows.open"]
    writer.abandon()
    assert seal(run) == ["rank-00000/tensors-000001.parquet"]
    assert seal(run) == []
    assert open_run(run).tensors()["step"].tolist() == [0, 1, 2]
    assert verify(run).ok


def test_sealing_under_a_living_writer_loses_nothing(rank_directory, monkeypatch):
    monkeypatch.setattr("precdoctor.runlog.sealing.is_locked", lambda _: False)  # a file system without locks
    writer = RankWriter(rank_directory)
    append(writer, 0, 3)
    assert seal(rank_directory.parent) == ["rank-00000/tensors-000001.parquet"]
    append(writer, 3, 5)
    writer.close({})
    assert open_run(rank_directory.parent).tensors()["step"].tolist() == [0, 1, 2, 3, 4]
    assert verify(rank_directory.parent).ok


def test_seal_after_dying_between_rename_and_unlink(rank_directory):
    run = rank_directory.parent
    writer = RankWriter(rank_directory)
    append(writer, 0, 3)
    writer.abandon()
    stream = (rank_directory / "tensors-000001.arrows.open").read_bytes()
    seal(run)
    (rank_directory / "tensors-000001.arrows.open").write_bytes(stream)
    (rank_directory / "parts.jsonl").unlink()
    (rank_directory / ".tensors-000002.parquet.1-a.tmp").touch()
    assert open_run(run).tensors()["step"].tolist() == [0, 1, 2]
    seal(run)
    assert open_run(run).tensors()["step"].tolist() == [0, 1, 2]
    assert names(rank_directory) == ["parts.jsonl", "tensors-000001.parquet"]
    assert verify(run).ok


@pytest.mark.parametrize(("blocks", "limit"), [(False, 120), (True, 200)])
def test_bytes_per_row(rank_directory, blocks, limit):
    writer = RankWriter(rank_directory, rotate_seconds=1e9)
    columns = training_columns(300, 50, blocks=blocks)
    for step in range(50):
        writer.append("tensors", {n: v[step * 300 : (step + 1) * 300] for n, v in columns.items()}, 300)
    writer.close({})
    size = sum(path.stat().st_size for path in rank_directory.iterdir())
    assert size / (300 * 50) <= limit


def test_any_parquet_reader_sees_plain_columns(rank_directory):
    writer = RankWriter(rank_directory)
    append(writer, 0, 2)
    writer.close({})
    table = pq.read_table(rank_directory / "tensors-000001.parquet")
    assert table.schema.field("module").type == pa.string()
    assert table.schema.field("fingerprint").type == pa.uint64()
    assert not table.schema.field("step").nullable


def test_imports_neither_torch_nor_pandas():
    code = "import sys, precdoctor.runlog.writer, precdoctor.runlog.reader; print({'torch', 'pandas'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_the_package_is_cheap_to_import():
    code = "import sys, precdoctor, precdoctor.runlog; print({'pyarrow', 'numpy', 'torch'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_a_large_append_is_cut_into_pieces_readers_take(rank_directory):
    writer = RankWriter(rank_directory)
    events = [{"data": str(n) + "x" * 900_000} for n in range(80)]
    writer.append("events", columns_of("events", events), len(events))
    writer.close({})
    read = [
        text[:2] for batch in open_run(rank_directory.parent).batches("events") for text in batch["data"].to_pylist()
    ]
    assert read == [event["data"][:2] for event in events]
    assert verify(rank_directory.parent).ok


def test_no_file_of_a_log_takes_the_place_of_a_closed_stream(tmp_path):
    """A native library that prints to a closed stdout would write into the log."""
    code = """if True:
        import os, sys
        from pathlib import Path
        from precdoctor.runlog.writer import RankWriter
        from tests.support.runs import columns_of
        os.close(0), os.close(1)
        writer = RankWriter(Path(sys.argv[1]))
        writer.append("steps", columns_of("steps", [{}]), 1)
        for number in (0, 1):
            try:
                os.write(number, b"into the log")
            except OSError:
                continue
            sys.exit(f"descriptor {number} is a file of ours")
        writer.close({})
    """
    command = [sys.executable, "-c", code, create_rank_directory(tmp_path, 0)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
