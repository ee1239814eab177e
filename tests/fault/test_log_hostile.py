"""Logs made to hurt: each ends in one of our errors, and costs no memory to speak of."""

import json
import os
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precdoctor.errors import CorruptRunError, RunNotFoundError, RunUnreadableError
from precdoctor.runlog import create_run, open_run, seal
from precdoctor.runlog import layout as layout_module
from precdoctor.runlog import pages as pages_module
from precdoctor.runlog import parts as parts_module
from precdoctor.runlog.sealing import digest_of
from precdoctor.runlog.stream import MAX_BATCH_BYTES, StreamEncoder, stored_schema
from precdoctor.runlog.verify import verify
from precdoctor.runlog.writer import build_batch
from tests.support.memory import memory_used_by
from tests.support.runs import columns_of, write_run

OPTIONS = {"compression": "zstd", "write_page_checksum": True, "store_schema": False}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [{"step": 0}, {"step": 1}])


def put(run, table, part="tensors-000001.parquet", **options):
    """Exchange a part, with a manifest that agrees."""
    path = run / "rank-00000" / part
    pq.write_table(table, path, **{**OPTIONS, **options})
    line = {
        "name": part,
        "rows": table.num_rows,
        "first_step": 0,
        "last_step": 0,
        "blake2b": digest_of(path.read_bytes()),
    }
    (run / "rank-00000/parts.jsonl").write_text(json.dumps(line) + "\n")


def rows(count=1, **columns):
    """A table of tensors with some columns exchanged for whatever they are given as."""
    table = pa.Table.from_batches([build_batch("tensors", columns_of("tensors", [{}] * count), count)])
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table


def refused(run, match, columns=None):
    with pytest.raises(CorruptRunError, match=match) as caught:
        open_run(run).tensors(columns)
    assert "\n" not in str(caught.value)
    assert not verify(run).ok


def test_what_the_tests_put_there_is_read(run):
    put(run, rows(3))
    assert len(open_run(run).tensors()) == 3


def test_unknown_columns_are_ignored_and_absent_nullable_ones_are_null(run):
    table = rows(2).append_column("invented", pa.array([{"a": 1}, None])).drop_columns(["amax", "phase"])
    put(run, table)
    frame = open_run(run).tensors()
    assert "invented" not in frame
    assert frame["amax"].isna().all()
    assert frame["phase"].isna().all()


def test_an_absent_required_column(run):
    put(run, rows().drop_columns(["numel"]))
    refused(run, "no column 'numel'")
    assert len(open_run(run).tensors(["step"])) == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("step", pa.array([0.0])),
        ("step", pa.array([0], pa.int32())),
        ("numel", pa.array(["1"])),
        ("module", pa.array([b"x"])),
        ("exp_hist", pa.array([[1.0]])),
        ("exp_hist", pa.array([[[1]]])),
        ("exp_hist", pa.array([1])),
        ("shape", pa.array([{"list": 1}])),
        ("amax", pa.array([1.0], pa.float32())),
    ],
)
def test_wrong_types(run, name, values):
    put(run, rows(**{name: values}))
    refused(run, f"column '{name}' is")


def test_nulls_in_a_required_column(run):
    put(run, rows(numel=pa.array([None], pa.int64())))
    refused(run, "'numel' holds nulls")


def test_a_column_twice(run):
    put(run, pa.Table.from_arrays([*rows().columns, pa.array([7])], names=[*rows().schema.names, "step"]))
    refused(run, "two columns are named 'step'")


def test_rows_of_another_rank(run):
    put(run, rows(rank=pa.array([3], pa.int32())))
    refused(run, "another rank")


def test_text_that_is_not_utf8(run):
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(struct.pack("<ii", 0, 1)), pa.py_buffer(b"\xff")])
    put(run, rows(module=bad))
    refused(run, "damaged")


def test_a_string_longer_than_any(run):
    put(run, rows(module=pa.array(["x" * (parts_module.MAX_NAME_BYTES + 1)])))
    refused(run, "a value of length")


def test_a_list_longer_than_any(run):
    put(run, rows(exp_hist=pa.array([[0] * (parts_module.MAX_LIST + 1)])))
    refused(run, "a value of length")


def test_more_rows_than_listed(run):
    put(run, rows(2))
    manifest = run / "rank-00000/parts.jsonl"
    manifest.write_text(manifest.read_text().replace('"rows": 2', '"rows": 3'))
    refused(run, "parts.jsonl lists 3 rows")


def test_a_list_that_unfolds(run, monkeypatch):
    """Zeros in one row: many megabytes in memory, next to nothing on disk."""
    monkeypatch.setattr(pages_module, "MAX_CHUNK_VALUES", 1 << 20)
    zeros = pa.repeat(pa.scalar(0, pa.int64()), 1 << 22)
    put(run, rows(exp_hist=pa.ListArray.from_arrays(pa.array([0, 1 << 22], pa.int32()), zeros)))
    assert (run / "rank-00000/tensors-000001.parquet").stat().st_size < 1 << 15
    assert memory_used_by(lambda: refused(run, "claims 4194304 values")) < 1 << 20


def zeros(count, width):
    """So many lists of so many zeros, next to nothing on disk."""
    values = pa.repeat(pa.scalar(0, pa.int64()), count * width)
    return pa.ListArray.from_arrays(pa.array(range(0, (count + 1) * width, width), pa.int32()), values)


def test_columns_that_unfold_together(run, monkeypatch):
    monkeypatch.setattr(pages_module, "MAX_GROUP_VALUES", 1 << 20)
    put(run, rows(2000, exp_hist=zeros(2000, 300), rel_hist=zeros(2000, 300)))
    assert memory_used_by(lambda: refused(run, r"a row group claims 1\d{6} values")) < 4 << 20


def test_rows_with_long_lists_are_decoded_few_at_a_time(run, monkeypatch):
    monkeypatch.setattr(parts_module, "BATCH_VALUES", 1 << 16)
    put(run, rows(4000, exp_hist=zeros(4000, 500)))
    sizes = [batch.nbytes for batch in open_run(run).batches("tensors", ["exp_hist"])]
    assert len(sizes) > 10 and max(sizes) < 2 * 8 * (1 << 16)


def test_a_page_that_unpacks_to_more_than_the_limit(run, monkeypatch):
    monkeypatch.setattr(pages_module, "MAX_PAGE_BYTES", 1 << 20)
    put(run, rows(module=pa.array(["x" * (1 << 23)])), use_dictionary=False)
    assert memory_used_by(lambda: refused(run, "claims to unpack")) < 1 << 20


def test_strings_that_share_prefixes_endlessly(run):
    put(run, rows(module=pa.array(["x"])), use_dictionary=False, column_encoding={"module": "DELTA_BYTE_ARRAY"})
    refused(run, "encoding 7")


def test_one_long_string_in_very_many_rows(tmp_path):
    """A dictionary keeps it once; a plain column would repeat it."""
    run = write_run(tmp_path / "run", events=[{}])
    count = 2000
    table = pa.Table.from_batches([build_batch("events", columns_of("events", [{}] * count), count)])
    data = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 1_000_000]))
    put(run, table.set_column(table.schema.get_field_index("data"), "data", data), "events-000001.parquet")

    def read():
        with pytest.raises(CorruptRunError, match="unfold"):
            open_run(run).events()

    assert memory_used_by(read) < 16 << 20


def test_pages_without_checksums(run):
    put(run, rows(), write_page_checksum=False)
    refused(run, "without a checksum")


def test_a_page_header_with_a_list_of_2_to_the_60_numbers():
    written = pa.BufferOutputStream()
    pq.write_table(rows(64), written, **OPTIONS)
    content = bytearray(written.getvalue().to_pybytes())
    group = pages_module.read_footer(bytes(content))[0]
    start = group.chunks[0].start
    content[start : start + 11] = b"\x19\xf7" + b"\xff" * 8 + b"\x0f"  # a list of doubles
    with pytest.raises(ValueError, match="does not end"):
        pages_module.check_pages(bytes(content), group, ["step"])


def test_a_stream_that_claims_to_decompress_to_terabytes(tmp_path):
    run = write_run(tmp_path / "run", [{"exp_hist": [7] * 300, "step": 1}], end=False)
    stream = next((run / "rank-00000").glob("*.open"))
    content = bytearray(stream.read_bytes())
    at = content.index(b"\x04\x22\x4d\x18") - 8  # the length that stands before the first LZ4 frame
    content[at : at + 8] = struct.pack("<q", MAX_BATCH_BYTES)
    stream.write_bytes(content)
    assert memory_used_by(lambda: refused(run, "claims to decompress")) < 1 << 20


def test_a_stream_of_another_schema(tmp_path):
    run = write_run(tmp_path / "run", [{}], end=False)
    schema = pa.schema([("step", pa.string())])
    frame = StreamEncoder(schema).encode(pa.RecordBatch.from_arrays([pa.array(["x"])], schema=schema))
    next((run / "rank-00000").glob("*.open")).write_bytes(frame)
    refused(run, "column 'step' is string")
    assert seal(run) == []


def test_a_stream_of_another_table(tmp_path):
    run = write_run(tmp_path / "run", [{}], end=False)
    encoder = StreamEncoder(stored_schema("events"))
    frame = encoder.encode(build_batch("events", columns_of("events", [{}]), 1))
    next((run / "rank-00000").glob("*.open")).write_bytes(frame)
    refused(run, "column")


@pytest.mark.parametrize("name", ["../../outside.parquet", "/etc/passwd", "tensors-1.parquet", "x\0", ""])
def test_a_manifest_that_names_other_files(run, name):
    manifest = run / "rank-00000/parts.jsonl"
    line = {"name": name, "rows": 1, "first_step": 0, "last_step": 0, "blake2b": ""}
    manifest.write_text(json.dumps(line) + "\n")
    refused(run, "lists no part")


@pytest.mark.parametrize("name", ["run.json", "rank-00000/rank.json", "rank-00000/parts.jsonl", "attach.jsonl"])
def test_links_are_not_followed(run, tmp_path, name):
    (tmp_path / "secret").write_text('{"schema_version": 1}\n')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")

    def read_all():
        opened = open_run(run)
        return opened.attach_lines(), opened.ranks

    with pytest.raises((RunUnreadableError, RunNotFoundError)):
        read_all()


def test_linked_parts_and_rank_directories_are_no_part_of_the_run(run, tmp_path):
    part = run / "rank-00000/tensors-000001.parquet"
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    refused(run, "is missing")
    (run / "rank-00007").symlink_to(run / "rank-00000")
    assert [rank.rank for rank in open_run(run).ranks] == [0]


def test_pipes_do_not_block(run):
    (run / "rank-00000/rank.json").unlink()
    os.mkfifo(run / "rank-00000/rank.json")
    with pytest.raises(CorruptRunError, match="not a regular file"):
        assert open_run(run).ranks


def test_huge_json(run, monkeypatch):
    monkeypatch.setattr(layout_module, "MAX_JSON_BYTES", 1000)
    (run / "rank-00000/rank.json").write_text('{"a": "' + "x" * 1000 + '"}')
    with pytest.raises(CorruptRunError, match="at most 1000"):
        assert open_run(run).ranks


def test_an_unreadable_file_is_not_called_damaged(run, monkeypatch):
    def refuse(path, limit):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(parts_module, "read_regular", refuse)
    with pytest.raises(RunUnreadableError, match="cannot read .*Permission denied") as caught:
        open_run(run).tensors()
    assert not isinstance(caught.value, CorruptRunError)


def test_files_of_others_in_a_run_are_ignored(run):
    for name in ("tensors-1.parquet", "tensors-000009.parquet.bak", "weights-000001.parquet", "x.pt"):
        (run / "rank-00000" / name).write_bytes(b"\x80\x04.")
    (run / "rank-1").mkdir()
    assert len(open_run(run).tensors()) == 2
    assert verify(run).ok


def test_a_run_without_ranks(tmp_path):
    create_run(tmp_path / "run", {})
    assert open_run(tmp_path / "run").events().empty
    assert verify(tmp_path / "run").ok
