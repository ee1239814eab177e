import errno
import json
import os
import stat
from pathlib import Path

import pytest

from precdoctor.errors import CorruptRunError, NewerSchemaError, RunExistsError, RunNotFoundError, UsageError
from precdoctor.runlog import create_rank_directory, create_run, newest_run, open_run
from precdoctor.runlog.atomic import dump_json, temporary_name, write_json_atomically
from precdoctor.runlog.files import RUN_FILE
from precdoctor.runlog.layout import add_run_facts, bytes_in, rank_directories
from precdoctor.runlog.lock import DirectoryLock, is_locked
from tests.support.runs import write_run


def test_run_json_holds_info_and_schema_version(tmp_path):
    create_run(tmp_path / "a/b", {"command": ["train.py"]})
    info = open_run(tmp_path / "a/b").info
    assert info["command"] == ["train.py"]
    assert info["schema_version"] == 1
    assert info["tool"]["name"] == "precdoctor"


def test_an_empty_directory_is_taken(tmp_path):
    create_run(tmp_path, {})
    assert open_run(tmp_path).ranks == []


def test_run_json_is_never_seen_half_written(tmp_path, monkeypatch):
    """A launch may be killed at any call: before its document has a name, or after."""
    names = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _handle: names.append({path.name for path in tmp_path.iterdir()}))
        create_run(tmp_path, {})
    assert "run.json" not in names[0] and {path.name for path in tmp_path.iterdir()} == {"run.json"}


@pytest.mark.parametrize("force", [False, True])
def test_what_a_killed_launch_left_is_no_obstacle(tmp_path, force):
    for name in ("run.json", "halt.json"):
        temporary_name(tmp_path / name).write_bytes(b"")
    create_run(tmp_path, {"command": ["train.py"]}, force=force)
    assert open_run(tmp_path).info["command"] == ["train.py"]


@pytest.mark.parametrize("hard_links", [True, False])
def test_of_two_launches_in_an_empty_directory_one_gets_it(tmp_path, monkeypatch, hard_links):
    """The second finds the directory empty, and the first names its document before the second does."""

    def meanwhile(source, target):
        if not Path(target).exists():
            monkeypatch.setattr(os, "link", link)
            create_run(tmp_path, {"command": ["first.py"]})
        link(source, target)

    link = os.link if hard_links else no_links
    monkeypatch.setattr(os, "link", meanwhile)
    with pytest.raises(RunExistsError, match="another run"):
        create_run(tmp_path, {"command": ["second.py"]})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert open_run(tmp_path).info["command"] == ["first.py"]


def no_links(_source, _target):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("force", [False, True])
def test_other_peoples_files_are_never_removed(tmp_path, force):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunExistsError):
        create_run(tmp_path, {}, force=force)
    assert (tmp_path / "thesis.tex").exists()


def test_a_foreign_file_inside_a_run_protects_it(tmp_path):
    write_run(tmp_path / "run", [{}])
    (tmp_path / "run/notes.txt").write_text("x")
    with pytest.raises(RunExistsError, match=r"notes\.txt"):
        create_run(tmp_path / "run", {}, force=True)
    assert len(open_run(tmp_path / "run").tensors()) == 1


def test_a_run_json_of_another_tool_is_not_ours(tmp_path):
    (tmp_path / "run.json").write_text('{"schema_version": 1}')
    with pytest.raises(RunExistsError, match="not a precdoctor run"):
        create_run(tmp_path, {}, force=True)


def test_force_replaces_a_run(tmp_path):
    write_run(tmp_path / "run", [{}])
    with pytest.raises(RunExistsError, match="--force"):
        create_run(tmp_path / "run", {})
    create_run(tmp_path / "run", {"again": True}, force=True)
    assert open_run(tmp_path / "run").info["again"] is True
    assert open_run(tmp_path / "run").ranks == []


def test_force_does_not_follow_links(tmp_path):
    write_run(tmp_path / "run", [{}])
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(RunExistsError):
        create_run(tmp_path / "link", {}, force=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").touch()
    (tmp_path / "run/rank-00001").symlink_to(tmp_path / "outside")
    create_run(tmp_path / "run", {}, force=True)
    assert (tmp_path / "outside/file").exists()


def test_force_leaves_a_run_that_is_being_recorded(tmp_path):
    write_run(tmp_path / "run", [{}])
    lock = DirectoryLock(tmp_path / "run/rank-00000")
    assert is_locked(tmp_path / "run/rank-00000")
    with pytest.raises(RunExistsError, match="being recorded"):
        create_run(tmp_path / "run", {}, force=True)
    lock.release()
    create_run(tmp_path / "run", {}, force=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 minds Arrow's threads
def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = DirectoryLock(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # outlives the parent's lock
        os._exit(0)
    os.close(reader)
    assert is_locked(tmp_path)
    lock.release()
    assert not is_locked(tmp_path)
    os.close(writer)
    os.waitpid(child, 0)


def test_a_path_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot create"):
        create_run(tmp_path / "file/run", {})
    with pytest.raises(RunExistsError):
        create_run(tmp_path / "file", {}, force=True)


def test_second_process_of_a_rank_gets_its_own_directory(tmp_path):
    names = [create_rank_directory(tmp_path, 3).name for _ in range(3)]
    assert names == ["rank-00003", "rank-00003.1", "rank-00003.2"]
    assert [(d.rank, d.attempt) for d in rank_directories(tmp_path)] == [(3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize("rank", [-1, 100_000])
def test_rank_out_of_range(tmp_path, rank):
    with pytest.raises(ValueError):
        create_rank_directory(tmp_path, rank)


def test_newest_run(tmp_path):
    with pytest.raises(RunNotFoundError, match="precdoctor record"):
        newest_run(tmp_path)
    with pytest.raises(RunNotFoundError):
        newest_run(tmp_path / "absent")
    for n, name in enumerate(["c", "a", "b"]):
        create_run(tmp_path / name, {})
        os.utime(tmp_path / name / "run.json", ns=(n, n))
    (tmp_path / "zz").mkdir()
    assert newest_run(tmp_path) == tmp_path / "b"


def test_what_is_not_a_run_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("absent", "file", "empty", "empty/run.json"):
        with pytest.raises(RunNotFoundError):
            open_run(tmp_path / name)
    create_run(tmp_path / "train-1", {})
    with pytest.raises(RunNotFoundError, match="did you mean .*train-1"):
        open_run(tmp_path / "tran-1")


def test_newer_schema_is_refused_with_the_way_out(tmp_path):
    create_run(tmp_path / "run", {})
    (tmp_path / "run/run.json").write_text('{"schema_version": 2}')
    with pytest.raises(NewerSchemaError, match="with that version or a newer one"):
        open_run(tmp_path / "run")


def test_a_newer_process_in_a_run_of_this_version_is_refused(tmp_path):
    """The command may run in an environment with another precdoctor than the shell's."""
    run = write_run(tmp_path / "run", steps=[{"step": 0}])
    (run / "rank-00000/rank.json").write_text('{"schema_version": 2}')
    with pytest.raises(NewerSchemaError, match=r"rank-00000 was written by .* with that version or a newer one"):
        _ = open_run(run).ranks


@pytest.mark.parametrize(
    "text",
    [
        *["", "{", "[]", "null", "{}", '{"schema_version": "1"}', '{"schema_version": true}', '{"schema_version": 0}'],
        *["[" * 100_000, "\xff", '{"schema_version": ' + "9" * 5000 + "}"],
    ],
)
def test_damaged_run_json(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptRunError):
        open_run(tmp_path)


def test_atomic_json_keeps_the_old_file_when_writing_fails(tmp_path):
    write_json_atomically(tmp_path / "x.json", {"a": 1})
    loop: list = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        write_json_atomically(tmp_path / "x.json", {"a": loop})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) & 0o400


def test_json_has_no_bare_nan():
    assert json.loads(dump_json({"a": float("nan"), "b": (float("-inf"), {1: float("inf")})})) == {
        "a": "NaN",
        "b": ["-Infinity", {"1": "Infinity"}],
    }


def test_what_is_known_later_is_added_without_changing_the_order_of_runs(tmp_path):
    for name in ("first", "second"):
        create_run(tmp_path / name, {"command": ["train.py"]})
    os.utime(tmp_path / "first" / RUN_FILE, (1, 1))
    add_run_facts(tmp_path / "first", {"exit_status": 3})
    info = open_run(tmp_path / "first").info
    assert (info["command"], info["exit_status"], info["schema_version"]) == (["train.py"], 3, 1)
    assert newest_run(tmp_path) == tmp_path / "second"
    assert [p.name for p in (tmp_path / "first").iterdir()] == [RUN_FILE]


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_nothing_is_added_to_what_is_not_there_or_damaged(tmp_path, content):
    if content is not None:
        (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises((OSError, CorruptRunError)):
        add_run_facts(tmp_path, {"exit_status": 3})
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if content is None else [content])


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o755)])
def test_a_run_directory_is_its_owners_alone_unless_shared(tmp_path, shared, mode):
    before = os.umask(0o022)
    try:
        create_run(tmp_path / "runs" / "a", {}, shared=shared)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "runs" / "a").stat().st_mode) == mode


def test_files_that_vanish_while_they_are_counted_have_no_size(tmp_path, monkeypatch):
    """A running process seals its streams meanwhile, and somebody may remove the run."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(10))
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").mkdir()
    assert bytes_in([tmp_path, tmp_path / "gone"]) == 20
    lstat = Path.lstat

    def sealed_meanwhile(path):
        if path.name == "a":
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", sealed_meanwhile)
    assert bytes_in([tmp_path]) == 10
