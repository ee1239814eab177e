"""Cut and mutated logs: the rows that were written, or one of our errors; nothing else, and nothing silently."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precdoctor.cli import main
from precdoctor.errors import CorruptRunError, RunNotFoundError, RunUnreadableError
from precdoctor.runlog import open_run, seal
from precdoctor.runlog import parts as parts_module
from precdoctor.runlog.lock import DirectoryLock
from precdoctor.runlog.schema import TABLES
from precdoctor.runlog.sealing import seal_stream
from precdoctor.runlog.stream import read_batches, scan
from precdoctor.runlog.survey import read_manifest
from precdoctor.runlog.verify import verify
from tests.support.rows import awkward_rows
from tests.support.runs import write_run

EVENTS = [{"step": n, "data": f'{{"n": {n}}}', "module": f"layers.{n}"} for n in range(12)]


def rows_of(path, table="events"):
    return open_run(path).dataset(table).read_all().drop_columns(["attempt"]).to_pylist()


def rewrite(path, content):
    path.unlink()
    path.write_bytes(content)


@pytest.fixture(scope="module")
def three_batches(tmp_path_factory):
    """An open stream of events: 12 rows in 3 batches."""
    path = tmp_path_factory.mktemp("runs") / "run"
    write_run(path, events=EVENTS, end=False, batch_rows=4)
    return path


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    return write_run(path, **{table: awkward_rows(table) for table in TABLES})


def test_a_stream_cut_anywhere_gives_its_whole_batches(three_batches):
    stream = three_batches / "rank-00000/events-000001.arrows.open"
    content = stream.read_bytes()
    seen = set()
    for length in range(len(content)):
        found = scan(content[:length], "cut")
        rows = sum(batch.num_rows for batch in read_batches(content[:length], found, "cut"))
        assert rows == 4 * found.batches
        assert found.torn == (found.good_bytes < length)
        seen.add(rows)
    assert seen == {0, 4, 8}
    assert scan(content, "whole").batches == 3


def test_a_torn_stream_is_read_up_to_the_tear_and_reported(three_batches, tmp_path):
    run = shutil.copytree(three_batches, tmp_path / "run")
    stream = run / "rank-00000/events-000001.arrows.open"
    whole = rows_of(run)
    rewrite(stream, stream.read_bytes()[:-1])
    assert rows_of(run) == whole[:8]
    report = verify(run)
    assert report.ok
    assert report.ranks[0].streams[0].torn
    assert report.ranks[0].streams[0].batches == 2
    assert not report.ranks[0].clean_close


def test_zeros_behind_the_last_write_are_a_tear(three_batches, tmp_path):
    run = shutil.copytree(three_batches, tmp_path / "run")
    stream = run / "rank-00000/events-000001.arrows.open"
    rewrite(stream, stream.read_bytes() + bytes(4096))
    assert len(rows_of(run)) == 12
    assert verify(run).ranks[0].streams[0].torn


def test_a_part_cut_anywhere_is_refused(sealed, tmp_path):
    run = shutil.copytree(sealed, tmp_path / "run")
    part = run / "rank-00000/events-000001.parquet"
    content = part.read_bytes()
    for length in {*range(0, len(content), 5), *range(len(content) - 64, len(content))}:
        rewrite(part, content[:length])
        with pytest.raises(CorruptRunError, match=r"events-000001\.parquet.*log verify"):
            rows_of(run)


def test_a_manifest_cut_anywhere_is_noticed(sealed, tmp_path):
    run = shutil.copytree(sealed, tmp_path / "run")
    manifest = run / "rank-00000/parts.jsonl"
    content = manifest.read_bytes()
    for length in range(0, len(content), 5):
        rewrite(manifest, content[:length])
        if b"events-000001.parquet" in content[: content[:length].rfind(b"\n") + 1]:
            assert rows_of(run) == awkward_rows("events")
        else:
            with pytest.raises(CorruptRunError, match="does not list it"):
                rows_of(run)
        assert not verify(run).ok


EDITS = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 255)), min_size=1, max_size=8)
QUIET = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def mutate(content, edits):
    out = bytearray(content)
    for at, flip in edits:
        out[at % len(out)] ^= flip
    return bytes(out)


@pytest.mark.parametrize(
    ("table", "checksum_agrees"),
    [pytest.param("events", False, marks=pytest.mark.slow), *((table, True) for table in TABLES)],
)
def test_mutated_parts(sealed, tmp_path, monkeypatch, table, checksum_agrees):
    """With a checksum that agrees (a log made on purpose) anything may be read; never another error, never a crash."""
    run = shutil.copytree(sealed, tmp_path / "run")
    part = run / f"rank-00000/{table}-000001.parquet"
    content, rows = part.read_bytes(), awkward_rows(table)
    if checksum_agrees:
        listed = read_manifest(part.parent)[part.name].blake2b
        monkeypatch.setattr(parts_module, "digest_of", lambda _: listed)

    @QUIET
    @given(EDITS)
    def check(edits):
        rewrite(part, mutate(content, edits))
        refusal = None
        try:
            read = rows_of(run, table)
        except CorruptRunError as error:
            refusal = str(error)
        if refusal is None:
            assert checksum_agrees or read == rows
        else:
            assert part.name in refusal
            assert "\n" not in refusal
        assert checksum_agrees or verify(run).ok == (part.read_bytes() == content)

    check()


def test_mutated_streams(three_batches, tmp_path):
    run = shutil.copytree(three_batches, tmp_path / "run")
    stream = run / "rank-00000/events-000001.arrows.open"
    content, rows = stream.read_bytes(), rows_of(run)

    @QUIET
    @given(EDITS)
    def check(edits):
        rewrite(stream, mutate(content, edits))
        try:
            read = rows_of(run)
        except CorruptRunError:
            assert not verify(run).ok
            return
        # A length that now reaches beyond the end looks like a tear of the last batch, and is reported as one.
        assert read == rows or (read == rows[:8] and verify(run).ranks[0].streams[0].torn)

    check()


@pytest.mark.parametrize(
    "name",
    [
        "rank-00000/parts.jsonl",
        "rank-00000/rank.json",
        "run.json",
        pytest.param("rank-00000/end.json", marks=pytest.mark.slow),
    ],
)
def test_mutated_json(sealed, tmp_path, name):
    run = shutil.copytree(sealed, tmp_path / "run")
    content = (run / name).read_bytes()

    @settings(QUIET, max_examples=60)
    @given(EDITS)
    def check(edits):
        rewrite(run / name, mutate(content, edits))
        try:
            verify(run)
            rank = open_run(run).ranks[0]
            rows = rows_of(run)
        except (RunUnreadableError, RunNotFoundError):
            return
        assert isinstance(rank.facts, dict)
        assert rows == awkward_rows("events")

    check()


def test_a_missing_part_is_not_passed_over(sealed, tmp_path):
    run = shutil.copytree(sealed, tmp_path / "run")
    (run / "rank-00000/tensors-000001.parquet").unlink()
    with pytest.raises(CorruptRunError, match=r"tensors-000001\.parquet is missing"):
        rows_of(run, "tensors")
    assert rows_of(run, "events") == awkward_rows("events")
    report = verify(run)
    assert not report.ok
    assert [p.status for p in report.ranks[0].parts] == ["ok", "ok", "ok", "missing"]
    assert "tensors-000001.parquet is listed and missing" in open_run(run).ranks[0].problems


def test_a_gap_in_the_numbers_is_seen(tmp_path):
    run = write_run(tmp_path / "run", [{"step": n} for n in range(4)], batch_rows=2, rotate_bytes=1)
    rank = run / "rank-00000"
    (rank / "tensors-000001.parquet").unlink()
    rewrite(rank / "parts.jsonl", b"".join((rank / "parts.jsonl").read_bytes().splitlines(keepends=True)[1:]))
    report = verify(run).ranks[0]
    assert report.gaps == ["tensors-000001.parquet"]
    assert [part.status for part in report.parts] == ["ok"]
    assert not report.ok


def test_a_part_nobody_listed_is_not_trusted(sealed, tmp_path):
    run = shutil.copytree(sealed, tmp_path / "run")
    (run / "rank-00000/parts.jsonl").unlink()
    with pytest.raises(CorruptRunError, match="does not list it"):
        rows_of(run)
    assert [part.status for part in verify(run).ranks[0].parts] == ["unlisted"] * 4
    assert "events-000001.parquet is not listed" in open_run(run).ranks[0].problems


def test_a_manifest_line_cut_off_by_the_end_of_the_process(three_batches, tmp_path):
    """Its part has its stream still; sealing again lists it once."""
    run = shutil.copytree(three_batches, tmp_path / "run")
    rank = run / "rank-00000"
    stream = (rank / "events-000001.arrows.open").read_bytes()
    rows = rows_of(run)
    seal(run)
    (rank / "events-000001.arrows.open").write_bytes(stream)
    rewrite(rank / "parts.jsonl", (rank / "parts.jsonl").read_bytes()[:30])
    assert rows_of(run) == rows
    assert seal(run) == ["rank-00000/events-000001.parquet"]
    assert rows_of(run) == rows
    assert verify(run).ok


def test_drops_are_counted(tmp_path):
    drops = [{"event": "drop", "data": text} for text in ('{"reason": "queue", "rows": 7}', "?", None)]
    (report,) = verify(write_run(tmp_path / "run", events=drops)).ranks
    assert report.dropped == {"queue": 7, "unknown": 2}
    assert report.ok
    assert report.rows == 3


def test_verify_gives_the_step_range(tmp_path):
    run = write_run(tmp_path / "run", [{"step": n} for n in (3, 9)], [{"step": 2}], [{"step": None}], end=False)
    (report,) = verify(run).ranks
    assert report.step_range == (2, 9)
    assert not report.clean_close
    assert {stream.batches for stream in report.streams} == {1}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a killed process leaves: streams of three tables, and a second process beside it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    steps = [{"step": n} for n in range(12)]
    return write_run(path, steps, steps, EVENTS, end=False, batch_rows=4, ranks=2)


def test_streams_as_a_killed_process_left_them_are_no_problem(killed):
    assert verify(killed).problems == []


def _cut(directory):
    stream = directory / "tensors-000001.arrows.open"
    content = stream.read_bytes()
    ends = list(scan(content, "whole").ends)
    rewrite(stream, content[: ends[-2]])
    return "tensors-000001.arrows.open was cut or exchanged"


def _cut_in_a_frame(directory):
    stream = directory / "steps-000001.arrows.open"
    rewrite(stream, stream.read_bytes()[:-1])
    return "steps-000001.arrows.open was cut or exchanged"


def _empty(directory):
    rewrite(directory / "steps-000001.arrows.open", b"")
    return "steps-000001.arrows.open was cut or exchanged"


def _removed(directory):
    (directory / "tensors-000001.arrows.open").unlink()
    return "tensors-000001.arrows.open was written and is missing"


def _of_another_process(directory):
    shutil.copy(directory.parent / "rank-00001/steps-000001.arrows.open", directory / "steps-000001.arrows.open")
    return "steps-000001.arrows.open was cut or exchanged"


def _written_anew(directory):
    other = directory.parents[1] / "other"
    write_run(other, [{"step": n, "amax": 1.0} for n in range(12)], end=False, batch_rows=4)
    shutil.copy(other / "rank-00000/tensors-000001.arrows.open", directory / "tensors-000001.arrows.open")
    return "tensors-000001.arrows.open was cut or exchanged"


def _copied(directory):
    shutil.copy(directory / "tensors-000001.arrows.open", directory / "tensors-000002.arrows.open")
    return "tensors-000002.arrows.open is a copy of tensors-000001"


@pytest.mark.parametrize(
    "change", [_cut, _cut_in_a_frame, _empty, _removed, _of_another_process, _written_anew, _copied]
)
def test_a_stream_that_was_changed_after_a_kill_is_reported(killed, tmp_path, change, capsys):
    run = shutil.copytree(killed, tmp_path / "run")
    said = change(run / "rank-00000")
    assert any(said in problem for problem in verify(run).problems), verify(run).problems
    assert main(["log", "verify", str(run)]) == 3
    assert said in " ".join(capsys.readouterr().out.split())


def test_streams_of_a_living_process_are_not_held_against_each_other(killed, tmp_path):
    run = shutil.copytree(killed, tmp_path / "run")
    _cut(run / "rank-00000")
    lock = DirectoryLock(run / "rank-00000")
    try:
        assert verify(run).problems == [], "it writes on while it is read"
    finally:
        lock.release()


def test_a_stream_that_was_sealed_is_not_missed(killed, tmp_path):
    run = shutil.copytree(killed, tmp_path / "run")
    stream = run / "rank-00000/tensors-000001.arrows.open"
    seal_stream(run / "rank-00000", "tensors", 1, stream.read_bytes())
    stream.unlink()
    assert verify(run).problems == []
