"""The process dies, the disk fills, somebody else is there: what was handed over stays readable."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from precdoctor.runlog import RankWriter, create_rank_directory, create_run, open_run, seal
from precdoctor.runlog.verify import verify
from tests.support.runs import columns_of

CHILD = """
    import os, sys
    from pathlib import Path
    from precdoctor.runlog import RankWriter, create_rank_directory
    from tests.support.runs import columns_of
    writer = RankWriter(create_rank_directory(Path(sys.argv[1]), 0), rotate_bytes=int(sys.argv[2]))
    for step in range(100_000):
        rows = [{"step": step, "module": str(n), "exp_hist": [step, n]} for n in range(5)]
        writer.append("tensors", columns_of("tensors", rows), len(rows))
        print(step, flush=True)
"""


def start_child(run, rotate_bytes):
    code = textwrap.dedent(CHILD)
    return subprocess.Popen([sys.executable, "-c", code, str(run), str(rotate_bytes)], stdout=subprocess.PIPE)


def append(writer, step):
    writer.append("tensors", columns_of("tensors", [{"step": step}]), 1)


def steps(run):
    return open_run(run).tensors()["step"].tolist()


@pytest.fixture
def run(tmp_path):
    create_run(tmp_path / "run", {})
    return tmp_path / "run"


@pytest.mark.parametrize(("lines", "rotate_bytes"), [(1, 1 << 30), (40, 1 << 30), (40, 20_000)])
def test_sigkill_loses_nothing_that_was_appended(run, lines, rotate_bytes):
    with start_child(run, rotate_bytes) as child:
        acknowledged = [int(child.stdout.readline()) for _ in range(lines)][-1]
        os.kill(child.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, child.stdout.read().split())])
    before = open_run(run).tensors()
    assert not open_run(run).ranks[0].complete
    assert not verify(run).ranks[0].live
    seal(run)
    assert not list((run / "rank-00000").glob("*.open"))
    after = open_run(run).tensors()
    assert after.equals(before)
    written = after["step"].max()
    assert written >= acknowledged
    assert after["step"].tolist() == [step for step in range(written + 1) for _ in range(5)]
    assert verify(run).ok
    assert not [path for path in (run / "rank-00000").iterdir() if path.name.startswith(".")]


def test_two_processes_on_one_rank_keep_apart(run):
    with start_child(run, 1 << 30) as a, start_child(run, 1 << 30) as b:
        for child in (a, b):
            child.stdout.readline()
        assert [r.live for r in verify(run).ranks] == [True, True]
        assert seal(run) == []
        for child in (a, b):
            os.kill(child.pid, signal.SIGKILL)
            child.stdout.read()
    seal(run)
    for attempt in (0, 1):
        mine = open_run(run).tensors(["step"], [("attempt", "==", attempt)])["step"]
        assert mine.tolist() == [step for step in range(mine.max() + 1) for _ in range(5)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 minds Arrow's threads
def test_file_size_limit(run):
    """RLIMIT_FSIZE ends a write in the middle, as a full disk does."""
    directory = create_rank_directory(run, 0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
            writer = RankWriter(directory)
            for step in range(1000):
                try:
                    append(writer, step)
                except OSError as error:
                    status = 0 if error.errno == errno.EFBIG and step > 3 else 2
                    break
            append(writer, step)  # in a new stream
            writer.close({})
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    read = steps(run)
    assert read == list(range(len(read)))
    assert len(read) > 3
    assert verify(run).ok
    assert open_run(run).ranks[0].complete


def test_a_write_cut_short_by_a_full_disk(run, monkeypatch):
    writer = RankWriter(create_rank_directory(run, 0))
    append(writer, 0)
    whole = os.pwrite
    calls = []

    def full(handle, data, at):
        calls.append(at)
        if len(calls) == 1:
            return whole(handle, data[:100], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            append(writer, 1)
    assert steps(run) == [0]
    append(writer, 2)
    writer.close({})
    assert steps(run) == [0, 2]
    assert verify(run).ok


def test_a_full_disk_while_sealing_keeps_the_stream(run, monkeypatch):
    writer = RankWriter(create_rank_directory(run, 0), rotate_bytes=1)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for step in range(2):
            with pytest.raises(OSError, match="No space left"):
                append(writer, step)
    assert steps(run) == [0, 1]
    append(writer, 2)
    writer.close({})
    assert steps(run) == [0, 1, 2]
    assert not list((run / "rank-00000").glob("*.open"))
    assert verify(run).ok


def test_close_on_a_full_disk_leaves_everything_for_seal(run, monkeypatch):
    writer = RankWriter(create_rank_directory(run, 0))
    append(writer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            writer.close({})
        with pytest.raises(OSError, match="full"):
            seal(run)
    assert steps(run) == [0]
    assert not open_run(run).ranks[0].complete
    assert seal(run) == ["rank-00000/tensors-000001.parquet"]
    assert steps(run) == [0]


def test_a_vanished_directory_is_an_oserror(run):
    directory = create_rank_directory(run, 0)
    writer = RankWriter(directory, rotate_bytes=1)
    append(writer, 0)
    shutil.rmtree(run)
    with pytest.raises(OSError):
        append(writer, 1)
    with pytest.raises(OSError):
        writer.write_facts({})
    with pytest.raises(OSError):
        writer.close({})
    with pytest.raises(OSError):
        create_rank_directory(run, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only directories")
def test_a_read_only_directory_is_an_oserror(run):
    writer = RankWriter(create_rank_directory(run, 0))
    (run / "rank-00000").chmod(0o555)
    try:
        with pytest.raises(OSError):
            append(writer, 0)
        with pytest.raises(OSError):
            writer.close({})
    finally:
        (run / "rank-00000").chmod(0o755)
