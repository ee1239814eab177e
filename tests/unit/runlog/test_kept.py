"""A part is decoded once for many queries: never a wrong row for it, and never more than there is room for."""

import os

import pytest

from precdoctor.errors import CorruptRunError
from precdoctor.runlog import open_run, parts
from precdoctor.runlog.kept import Kept
from tests.support.runs import write_run


@pytest.fixture
def directory(tmp_path):
    return write_run(tmp_path / "run", [{"step": s, "module": m, "amax": float(s)} for s in range(3) for m in "ab"])


@pytest.fixture
def decoded(monkeypatch):
    """Counts the times a part is given to Arrow."""
    calls, decode = [], parts._open_parquet
    monkeypatch.setattr(parts, "_open_parquet", lambda content: calls.append(len(content)) or decode(content))
    return calls


def test_a_part_asked_for_again_is_decoded_once_more_and_then_no_more(directory, decoded):
    run = open_run(directory)
    for _ in range(4):
        assert run.tensors(["module", "amax"], [("step", "==", 2)]).to_numpy().tolist() == [["a", 2.0], ["b", 2.0]]
    assert len(decoded) == 2
    assert run.tensors(["zero"], [("module", "==", "a")])["zero"].tolist() == [0, 0, 0]
    assert len(decoded) == 3  # a column nobody asked for before
    assert len(run.tensors(["zero", "amax"])) == 6
    assert len(decoded) == 3


def test_without_room_a_part_is_decoded_every_time(directory, decoded):
    run = open_run(directory)
    run._kept = Kept(max_bytes=0)
    for _ in range(3):
        assert len(run.tensors(["amax"])) == 6
    assert len(decoded) == 3


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
