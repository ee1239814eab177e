"""Runs in object stores: copied, read, and nothing else done with them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pytest

from precdoctor.diagnosis.engine import diagnose
from precdoctor.errors import RunNotFoundError, UsageError
from precdoctor.reporting.json_report import document
from precdoctor.runlog import open_run
from precdoctor.runlog.remote import as_url, local_path, without_credentials
from tests.support.training import Training


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = Training(dtype="float16").poison(7, "output", "head", nan=1).write(tmp_path / "run").path
    (path / "notes.txt").write_text("not of the log")
    (path / "rank-00000" / "secret.key").write_text("nor this")
    return path


@pytest.fixture
def bucket(run: Path) -> Iterator[str]:
    """The URL of the run on an S3 server of this machine."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    options = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    store, _ = pyarrow.fs.FileSystem.from_uri(f"s3://user:pass@bucket?{options}&allow_bucket_creation=true")
    store.create_dir("bucket")
    pyarrow.fs.copy_files(str(run), "bucket/runs/a", destination_filesystem=store, use_threads=False)
    yield f"s3://user:pass@bucket/runs/a?{options}"
    server.stop()


def test_a_run_on_s3_is_diagnosed_like_the_directory(bucket: str, run: Path) -> None:
    found, expected = document(diagnose(bucket), 0), document(diagnose(run), 0)
    assert found["run"].pop("path") == "s3://bucket/runs/a"
    assert expected["run"].pop("path") == str(run)
    assert found == expected


def test_only_the_files_of_a_run_are_copied(bucket: str) -> None:
    copied = open_run(bucket).path
    names = {str(p.relative_to(copied)) for p in copied.rglob("*") if p.is_file()}
    assert {"run.json", "rank-00000/rank.json", "rank-00000/parts.jsonl"} <= names
    assert not names & {"notes.txt", "rank-00000/secret.key"}
    assert copied.stat().st_mode & 0o077 == 0


def test_a_store_of_fsspec_is_read(run: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(run), "/runs/memory", recursive=True)
    opened = open_run("memory://runs/memory")
    assert (opened.origin, len(opened.steps())) == ("memory://runs/memory", len(open_run(run).steps()))
    assert opened.is_copy and not open_run(run).is_copy


def test_what_is_no_run_is_said_without_credentials(bucket: str) -> None:
    with pytest.raises(RunNotFoundError, match="^s3://bucket/runs/b is not a run directory"):
        open_run(bucket.replace("runs/a", "runs/b"))
    with pytest.raises(UsageError, match="no file system is known|cannot be opened"):
        open_run("nosuch://bucket/run")


def test_workers_that_cannot_see_the_copy_are_not_asked(bucket: str) -> None:
    opened = open_run(bucket)
    opened.engine = "dask:tcp://127.0.0.1:1"
    with pytest.raises(UsageError, match="cannot see the copy of s3://bucket/runs/a"):
        diagnose(opened)


def test_urls_survive_the_command_line_and_paths_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_url(Path("s3://bucket/run")) == "s3://bucket/run"
    assert as_url("gs://b/r") == "gs://b/r"
    assert as_url("file:///tmp/run") == "file://tmp/run"
    assert local_path("file://tmp/run") == Path("/tmp/run")
    assert [as_url(p) for p in ("runs/a", "/runs/a", "C:x", "a:b/c")] == [None] * 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert as_url(Path("s3://bucket")) is None, "a directory of that name"
    assert without_credentials("s3://key:secret@bucket/run?endpoint_override=x") == "s3://bucket/run"
