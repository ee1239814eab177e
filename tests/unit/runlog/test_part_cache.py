"""A part is checked once for many queries: never a wrong row for it."""

import os

import pytest

from precdoctor.errors import CorruptRunError
from precdoctor.runlog import open_run, parts, survey
from tests.support.runs import write_run


@pytest.fixture
def directory(tmp_path):
    return write_run(tmp_path / "run", [{"step": s, "module": m, "amax": float(s)} for s in range(3) for m in "ab"])


def test_a_part_that_was_exchanged_is_looked_at_again(directory):
    run = open_run(directory)
    for _ in range(3):
        assert len(run.tensors(["amax"])) == 6
    (part,) = directory.glob("rank-00000/tensors-*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    os.utime(part, ns=(0, 0))
    with pytest.raises(CorruptRunError, match="checksum"):
        run.tensors(["amax"])


def test_a_part_that_is_gone_is_missed(directory):
    run = open_run(directory)
    for _ in range(3):
        run.tensors(["amax"])
    (part,) = directory.glob("rank-00000/tensors-*.parquet")
    part.unlink()
    with pytest.raises(CorruptRunError, match="missing"):
        run.tensors(["amax"])


@pytest.fixture
def of_a_day(tmp_path):
    """A log of many small parts, as a long run leaves it."""
    rows = [{"step": s, "module": f"layers.{s % 3}", "amax": float(s)} for s in range(24)]
    return write_run(tmp_path / "day", rows, batch_rows=1, rotate_bytes=1)


def test_a_footer_is_read_once_however_many_queries(of_a_day, monkeypatch):
    footers, read = [], parts.read_footer
    monkeypatch.setattr(parts, "read_footer", lambda content: footers.append(1) or read(content))
    run = open_run(of_a_day)
    for name in ("amax", "nan", "zero"):
        assert len(run.tensors([name])) == 24
    assert len(footers) == len(list(of_a_day.glob("rank-00000/tensors-*.parquet"))) > 20


def test_a_part_that_cannot_hold_the_step_is_opened_once(of_a_day, monkeypatch):
    opened, read = [], parts.read_regular
    monkeypatch.setattr(parts, "read_regular", lambda path, limit: opened.append(path.name) or read(path, limit))
    run = open_run(of_a_day)
    run.tensors(["amax"], [("step", "==", 3)])
    opened.clear()
    assert run.tensors(["amax"], [("step", "==", 3)])["amax"].tolist() == [3.0]
    assert opened == ["tensors-000004.parquet"]


def test_small_parts_are_given_together_and_in_order(of_a_day):
    (batch,) = open_run(of_a_day).batches("tensors", ["step", "module"])
    assert batch["step"].to_pylist() == list(range(24))
    assert batch["module"].to_pylist() == [f"layers.{s % 3}" for s in range(24)]


def test_the_list_of_parts_is_read_again_once_it_has_grown(of_a_day, monkeypatch):
    lists, read = [], survey.read_manifest
    monkeypatch.setattr(survey, "read_manifest", lambda directory: lists.append(1) or read(directory))
    run = open_run(of_a_day)
    for _ in range(3):
        run.steps()
    assert len(lists) == 1
    with (of_a_day / "rank-00000/parts.jsonl").open("a") as file:
        file.write('{"name": "tensors-000099.parquet", "rows": 1, "first_step": 0, "last_step": 0, "blake2b": ""}\n')
    with pytest.raises(CorruptRunError, match="tensors-000099.parquet is missing"):
        run.tensors()
