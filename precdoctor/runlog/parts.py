"""Reads one part of a log, taken as hostile: checksum and page headers are checked before Arrow decodes it, the columns
and their values afterwards.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precdoctor.errors import RunUnreadableError
from precdoctor.numerics import EXP_MAX, EXP_MIN
from precdoctor.runlog.filters import ATTEMPT, Query
from precdoctor.runlog.layout import RankDirectory, read_regular
from precdoctor.runlog.pages import RowGroup, check_pages, read_footer
from precdoctor.runlog.part_cache import Group, PartCache, Sound, stamp_of
from precdoctor.runlog.schema import KINDS, OP_PHASES, PHASES, TABLES
from precdoctor.runlog.sealing import Part, digest_of
from precdoctor.runlog.stream import MAX_STREAM_BYTES, read_batches, scan, stored_type
from precdoctor.runlog.survey import PartFile, Survey, read_manifest, readable
from precdoctor.runlog.writer import MAX_STRING_BYTES

MAX_PART_BYTES: Final = 512 << 20
#: Longest list in a row: a histogram has 321 bins, a shape at most 64 dimensions.
MAX_LIST: Final = 1 << 9
#: Longest list in the column ``lrs``: one learning rate per parameter group, and some scripts make a group for each
#: parameter.
MAX_RATES: Final = 1 << 16
#: Longest name in a row; the recorder cuts names at 1000 characters. Long names are costly: rules read them many times.
MAX_NAME_BYTES: Final = 1 << 13
#: Most text of one column in one batch of rows, once its dictionary is decoded.
MAX_TEXT_BYTES: Final = 256 << 20
#: Rows decoded at a time; with block histograms a row takes about 2 kB in memory.
BATCH_ROWS: Final = 1 << 14
#: Values decoded at a time, if all rows have lists of equal length: 64 MiB.
BATCH_VALUES: Final = 1 << 23
#: Most memory that small batches may take together when they are joined.
_JOINED_BYTES: Final = 1 << 20
#: Up to this many rows are decoded without threads.
_FEW_ROWS: Final = 1 << 10
_THRIFT_LIMIT: Final = 16 << 20
#: Range of counts and nanoseconds (those that FP64 holds exactly), and of step numbers (64 bits).
_COUNTS, _STEPS = (0, 1 << 53), (0, (1 << 63) - 1)
_BINS: Final = (EXP_MIN, EXP_MAX)
_MAGNITUDES: Final = (0.0, sys.float_info.max)
#: Smallest and largest value that a column can hold; nulls are always allowed.
DOMAINS: Final[dict[str, tuple[float, float]]] = {
    **dict.fromkeys(("step", "micro_step", "first_bad_micro_step", "micro_steps"), _STEPS),
    **dict.fromkeys(("call", "shape"), _COUNTS),
    "numel": (1, _COUNTS[1]),
    **dict.fromkeys(("index", "position", "producer"), _COUNTS),
    **dict.fromkeys(("nan", "pos_inf", "neg_inf", "zero", "subnormal", "at_max", "non_finite"), _COUNTS),
    **dict.fromkeys(("saturated", "flushed", "unchanged", "recorder_ns", "wait_ns", "device_ns"), _COUNTS),
    **dict.fromkeys(("exp_hist", "rel_hist"), _COUNTS),
    **{f"block{size}{suffix}": _COUNTS for size in (16, 32, 128) for suffix in ("_hist", "_amax_hist")},
    **{f"block{size}_amax_lo": _BINS for size in (16, 32, 128)},
    "exp_lo": _BINS,
    **dict.fromkeys(("amax", "amin_nonzero", "lost_update_fraction"), _MAGNITUDES),
    "sum_sq": (0.0, math.inf),  # infinite if FP64 values exceed 1e154
}
#: By table: the only words that a column may hold.
WORDS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "tensors": {"kind": KINDS, "phase": PHASES},
    "ops": {"phase": OP_PHASES},
}
#: The columns of each table that hold text.
_TEXTS: Final = {table: [f.name for f in TABLES[table] if stored_type(f.type) == pa.string()] for table in TABLES}


def sealed_rows(
    part: PartFile, listed: Part | None, query: Query, rank: RankDirectory, cache: PartCache, rest: tuple[str, ...] = ()
) -> Iterator[pa.RecordBatch]:
    """The columns of a sealed part that ``query`` needs, plus ``attempt``, with all rows of the row groups it may ask
    for.

    Args:
        listed: the part's line in parts.jsonl; None raises CorruptRunError.
        cache: which parts of the run passed their checks in earlier queries.
        rest: columns of the other row groups, in the order of the schema; empty: skip those row groups.

    Raises:
        CorruptRunError: the part was changed after its sealing, or holds values that precdoctor never writes.
        RunUnreadableError: the operating system refuses to read it.
    """
    with readable(part.name):
        if listed is None:
            raise ValueError("parts.jsonl does not list it")
        stamp = stamp_of(part.path)
        sound = cache.groups.get(stamp)
        if sound is not None and not rest and not _matching(sound, query):
            return
        content = read_regular(part.path, MAX_PART_BYTES)
        if sound is None or len(content) != stamp[-1]:
            sound = _check_part(listed, content, query.table)
            cache.groups[stamp] = sound
        wanted = set(_matching(sound, query))
        for asked, groups in itertools.groupby(range(len(sound)), lambda n: n in wanted):
            names = query.needed if asked else rest
            if names:
                for batch in _decoded_batches(content, sound, list(groups), query.table, names):
                    yield _with_attempt(_checked_batch(batch, query.table, names, rank), rank)


# The functions below raise ValueError, with what is wrong, for a part that cannot be trusted.


def _check_part(listed: Part, content: bytes, table: str) -> Sound:
    """Check the part's bytes against ``listed`` and its footer and pages against the limits; return its row groups."""
    if digest_of(content) != listed.blake2b:
        raise ValueError("its checksum is not the one in parts.jsonl")
    groups = read_footer(content)
    if sum(group.rows for group in groups) != listed.rows:
        raise ValueError(f"parts.jsonl lists {listed.rows} rows, and it holds another number")
    for group in groups:
        check_pages(content, group, TABLES[table].names)
    return tuple(map(_summary, groups))


def _summary(group: RowGroup) -> Group:
    steps = next((chunk.bounds for chunk in group.chunks if chunk.name == "step"), None)
    return Group(group.rows, group.values, steps)


def _matching(sound: Sound, query: Query) -> list[int]:
    """The numbers of the row groups that may hold rows of ``query``."""
    return [n for n, group in enumerate(sound) if group.steps is None or query.may_match(*group.steps)]


def _decoded_batches(
    content: bytes, sound: Sound, wanted: Sequence[int], table: str, names: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """The columns ``names`` of the row groups ``wanted``, with the types of the file, some thousand rows at a time."""
    row_count = 0
    with _open_parquet(content, table) as file:
        columns = _columns_present(file.schema_arrow, table, names)
        for several in _of_like_size(sound, wanted):
            widest = max(sound[n].values / max(sound[n].rows, 1) for n in several)
            rows = max(1, min(BATCH_ROWS, int(BATCH_VALUES / max(widest, 1))))
            # For few rows, starting threads takes longer than decoding.
            threads = pa.cpu_count() > 1 and sum(sound[n].rows for n in several) > _FEW_ROWS
            for batch in file.iter_batches(rows, row_groups=several, columns=columns, use_threads=threads):
                row_count += batch.num_rows
                yield batch
    if row_count != sum(sound[n].rows for n in wanted):
        raise ValueError(f"it holds {row_count} rows and claims another number")


def _of_like_size(sound: Sound, wanted: Sequence[int]) -> Iterator[list[int]]:
    """``wanted`` in runs of row groups that can share one batch size: narrow ones together, each wide one alone."""
    narrow = [BATCH_ROWS * sound[n].values <= BATCH_VALUES * sound[n].rows for n in wanted]
    for _, run in itertools.groupby(range(len(wanted)), lambda k: -1 if narrow[k] else k):
        yield [wanted[k] for k in run]


def open_rows(part: PartFile, query: Query, rank: RankDirectory) -> Iterator[pa.RecordBatch]:
    """The columns that ``query`` needs, plus ``attempt``, from the whole batches of an open stream; a torn tail is
    skipped.

    Raises:
        CorruptRunError: a whole batch is damaged.
        FileNotFoundError: the stream was sealed in the meantime.
        RunUnreadableError: the operating system refuses to read it.
    """
    try:
        content = read_regular(part.path, MAX_STREAM_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunUnreadableError(f"cannot read {part.name}: {error.strerror or error}") from error
    with readable(part.name):
        scanned = scan(content, part.name)
        for batch in joined(read_batches(content, scanned, part.name)):
            columns = _columns_present(batch.schema, query.table, query.needed)
            checked = _checked_batch(batch.select(columns), query.table, query.needed, rank)
            yield _with_attempt(checked, rank)


def part_rows(
    part: PartFile, content: Survey, query: Query, rank: RankDirectory, cache: PartCache, rest: tuple[str, ...] = ()
) -> Iterator[pa.RecordBatch]:
    """The rows of a part as a survey of its directory found it; one that was sealed since is read as sealed.

    Arguments and errors are those of :func:`sealed_rows`.
    """
    listed = content.listed
    if not part.sealed:
        try:
            yield from open_rows(part, query, rank)
        except FileNotFoundError:
            with readable(rank.path.name):
                listed = read_manifest(rank.path)
        else:
            return
    sealed = part.as_sealed()
    yield from sealed_rows(sealed, listed.get(sealed.path.name), query, rank, cache, rest)


def _with_attempt(batch: pa.RecordBatch, rank: RankDirectory) -> pa.RecordBatch:
    """``batch`` with the column ``attempt``, which is not stored but taken from the directory's name."""
    attempt = pa.repeat(pa.scalar(rank.attempt, ATTEMPT.type), batch.num_rows)
    return batch.append_column(ATTEMPT, attempt)


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of ``batches`` in batches of some thousands. A stream has a batch per step, the log of a day thousands
    of parts, and every reader pays per batch.
    """
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        more = batch.get_total_buffer_size()
        full = rows + batch.num_rows > BATCH_ROWS or size + more > _JOINED_BYTES
        if pending and (full or pending[0].num_columns != batch.num_columns):
            yield _join_batches(pending)
            pending, rows, size = [], 0, 0
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + more
    if pending:
        yield _join_batches(pending)


def _join_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Join batches, which together hold at least one row, into one."""
    if len(batches) == 1:
        return batches[0]
    (batch,) = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks().to_batches()
    return batch


def _open_parquet(content: bytes, table: str) -> pq.ParquetFile:
    """A Parquet file with every guard Arrow has: page checksums, limits on the footer, strings as dictionaries."""
    try:
        return _parquet_file(content, _TEXTS[table])
    except KeyError:  # a text column is absent: an older version wrote the part
        with _parquet_file(content, []) as file:
            texts = [f.name for f in file.schema_arrow if f.type == pa.string()]
        return _parquet_file(content, texts)


def _parquet_file(content: bytes, texts: list[str]) -> pq.ParquetFile:
    return pq.ParquetFile(
        pa.BufferReader(content),
        read_dictionary=texts,
        page_checksum_verification=True,
        pre_buffer=False,
        thrift_string_size_limit=_THRIFT_LIMIT,
        thrift_container_size_limit=_THRIFT_LIMIT,
    )


@lru_cache(maxsize=32)
def _columns_present(schema: pa.Schema, table: str, names: tuple[str, ...]) -> list[str]:
    """The columns of ``names`` that the part has, each once and of the right type; those not nullable must be there."""
    present = []
    for column in names:
        field = TABLES[table].field(column)
        places = schema.get_all_field_indices(column)
        if len(places) > 1:
            raise ValueError(f"two columns are named {column!r}")
        if places:
            if stored_type(schema.field(places[0]).type) != stored_type(field.type):
                raise ValueError(f"column {column!r} is {schema.field(places[0]).type}, not {field.type}")
            present.append(column)
        elif not field.nullable:
            raise ValueError(f"it has no column {column!r}")
    return present


@lru_cache(maxsize=32)
def _schema_of(table: str, names: tuple[str, ...]) -> pa.Schema:
    return pa.schema([TABLES[table].field(column) for column in names])


def _checked_batch(batch: pa.RecordBatch, table: str, names: tuple[str, ...], rank: RankDirectory) -> pa.RecordBatch:
    """The columns ``names`` of a decoded batch, checked and cast to the type of the schema; absent ones are null."""
    batch.validate(full=True)
    schema = _schema_of(table, names)
    have = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns = {}
    for field in schema:
        column = field.name
        array = columns[column] = (
            _as_type(have[column], field.type) if column in have else pa.nulls(batch.num_rows, field.type)
        )
        if not field.nullable and array.null_count:
            raise ValueError(f"column {column!r} holds nulls")
    if "rank" in columns and not pc.all(pc.equal(columns["rank"], rank.rank), min_count=0).as_py():
        raise ValueError(f"it holds rows of another rank than {rank.rank}")
    _check_lengths(columns)
    _check_domains(columns, WORDS.get(table, {}))
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    elif not pa.types.is_dictionary(kind) and pa.types.is_dictionary(array.type):
        if (pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0) > MAX_TEXT_BYTES:
            raise ValueError("its strings unfold to more than any log holds")
        array = array.dictionary_decode()
    return array if array.type == kind else array.cast(kind)


def _check_lengths(columns: dict[str, pa.Array]) -> None:
    """Raise ValueError if a list or a text is too long. Columns with the same limit are checked together."""
    together: dict[int, list[tuple[str, pa.Array]]] = {}
    for column, array in columns.items():
        if pa.types.is_list(array.type):
            limit, lengths = MAX_RATES if column == "lrs" else MAX_LIST, pc.list_value_length(array)
        elif pa.types.is_dictionary(array.type):
            limit, lengths = MAX_NAME_BYTES, pc.binary_length(array.dictionary)
        elif pa.types.is_string(array.type):
            limit, lengths = MAX_STRING_BYTES, pc.binary_length(array)
        else:
            continue
        together.setdefault(limit, []).append((column, lengths))
    for limit, several in together.items():
        _check_range(several, 0, limit, "a value of length ")


def _check_domains(columns: dict[str, pa.Array], words: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ValueError if a value cannot have been measured: a negative count, an infinite amax, an unknown kind.

    NaN is refused in these columns: extremes are over finite elements, and null if there are none.
    """
    together: dict[tuple[pa.DataType, tuple[float, float]], list[tuple[str, pa.Array]]] = {}
    for column, array in columns.items():
        if column in words and set(array.dictionary.to_pylist()).difference(words[column]):
            strange = {*pc.unique(array).dictionary_decode().drop_null().to_pylist()}.difference(words[column])
            if strange:
                raise ValueError(f"column {column!r} holds {min(strange)!r}")
        if column in DOMAINS:
            values = array.flatten() if pa.types.is_list(array.type) else array
            together.setdefault((values.type, DOMAINS[column]), []).append((column, values))
    for (kind, (low, high)), several in together.items():
        if pa.types.is_floating(kind):
            for column, values in several:
                if pc.any(pc.is_nan(values)).as_py():
                    raise ValueError(f"column {column!r} holds NaN")
        _check_range(several, low, high)


def _check_range(columns: list[tuple[str, pa.Array]], low: float, high: float, what: str = "") -> None:
    """Raise ValueError if a value lies outside [low, high]; the columns have one type and are checked at once."""
    extremes = pc.min_max(pa.chunked_array([values for _, values in columns])).as_py()
    if extremes["min"] is None or (low <= extremes["min"] and extremes["max"] <= high):
        return
    if len(columns) > 1:
        for column in columns:
            _check_range([column], low, high, what)
    raise ValueError(
        f"column {columns[0][0]!r} holds {what or format(extremes['min'], 'g') + ' to '}{extremes['max']:g}"
    )
