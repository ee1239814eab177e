"""Queries on a table: columns by name, rows by filter, checked against the schema before any data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.errors import UsageError, did_you_mean
from precdoctor.numerics.arrays import Ints
from precdoctor.runlog.schema import TABLES
from precdoctor.runlog.stream import stored_type

#: ``[("step", ">=", 3), ("kind", "in", ["output"])]`` (all must hold), a list of such lists (any must), or a pyarrow
#: expression.
Filters: TypeAlias = Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]] | pc.Expression

#: Number of the process among those of its rank, from 0; not stored, but taken from the directory's name.
ATTEMPT: Final = pa.field("attempt", pa.int32(), nullable=False)

_OPERATORS: Final[dict[str, Callable[[pa.Array, Any], pa.Array]]] = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "in": lambda column, values: pc.is_in(column, value_set=values),
    "not in": lambda column, values: pc.invert(pc.is_in(column, value_set=values)),
}
#: A condition on a row: (column, operator, value); the value of "in" is an Arrow array.
_Term: TypeAlias = tuple[str, str, Any]


@cache
def table_schema(table: str) -> pa.Schema:
    """The columns that a reader returns for ``table``: those of the schema, then ``attempt``.

    Raises:
        UsageError: there is no such table.
    """
    if table not in TABLES:
        raise UsageError(f"a run has no table {table!r}{_nearest(table, TABLES)}")
    return TABLES[table].append(ATTEMPT)


@dataclass(frozen=True)
class Query:
    """A checked request for columns, in this order, and rows of a table; made by :func:`query`."""

    table: str
    columns: tuple[str, ...]
    #: Alternatives, each a conjunction of terms, or an expression; None: every row.
    predicate: tuple[tuple[_Term, ...], ...] | pc.Expression | None

    @property
    def _alternatives(self) -> tuple[tuple[_Term, ...], ...]:
        return self.predicate if isinstance(self.predicate, tuple) else ()

    @cached_property
    def _steps(self) -> list[list[tuple[str, Any]]]:
        """For each alternative its terms on ``step``, as (operator, value)."""
        return [
            [(op, v.to_pylist() if isinstance(v, pa.Array) else v) for name, op, v in terms if name == "step"]
            for terms in self._alternatives
        ]

    @cached_property
    def rank(self) -> int | None:
        """The one ``rank`` that every alternative requires; None: no such value."""
        return _common_value(self._alternatives, "rank")

    @cached_property
    def attempt(self) -> int | None:
        """As :attr:`rank`."""
        return _common_value(self._alternatives, "attempt")

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of the batches that :meth:`select` returns."""
        full = table_schema(self.table)
        return pa.schema([full.field(name) for name in self.columns])

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Columns to read: ``columns``, those of the predicate, and ``step`` and ``rank``, which every check needs."""
        read = {name for terms in self._alternatives for name, _, _ in terms}
        if isinstance(self.predicate, pc.Expression):
            empty = table_schema(self.table).empty_table()
            read = {name for name in _names(self.table) if _refers_to(self.predicate, empty, name)}
        names = {*self.columns, *read, "step", "rank"} - {ATTEMPT.name}
        return tuple(name for name in _names(self.table) if name in names)

    def may_match(self, first: int, last: int) -> bool:
        """Return False if no row with a step in [first, last] can satisfy the predicate; True if one might."""
        return not self._steps or any(all(_may_satisfy(op, v, first, last) for op, v in terms) for terms in self._steps)

    def matching(self, batch: pa.RecordBatch) -> Ints:
        """The numbers of the rows that satisfy the predicate, ascending; ``batch`` as for :meth:`select`."""
        if isinstance(self.predicate, pc.Expression):
            raise TypeError("rows are numbered for a list of terms only")
        if self.predicate is None:
            return np.arange(batch.num_rows)
        return np.flatnonzero(_matches(batch, self.predicate).fill_null(False).to_numpy(zero_copy_only=False))

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows and columns of the query, from a batch with the columns ``needed`` and ``attempt``."""
        if isinstance(self.predicate, pc.Expression):
            batches = pa.Table.from_batches([batch]).filter(self.predicate).combine_chunks().to_batches()
            batch = batches[0] if batches else batch.slice(0, 0)
        elif self.predicate is not None:
            batch = batch.filter(_matches(batch, self.predicate))
        return pa.RecordBatch.from_arrays([batch.column(name) for name in self.columns], schema=self.schema)


def query(table: str, columns: Sequence[str] | None = None, filters: Filters | None = None) -> Query:
    """Make a query, checked against the schema; None means all columns, or all rows.

    Raises:
        UsageError: an unknown table, column or operator, or a value that cannot be compared with its column.
    """
    schema = table_schema(table)
    if isinstance(columns, str):
        raise UsageError(f"columns takes a list of names, got the string {columns!r}")
    names = _names(table) if columns is None else tuple(columns)
    for name in names:
        _check_column(table, name)
    if filters is None or (isinstance(filters, (list, tuple)) and not filters):
        return Query(table, names, None)
    try:
        if isinstance(filters, pc.Expression):
            schema.empty_table().filter(filters)
            return Query(table, names, filters)
        alternatives = _compile(table, filters)
        _matches(_no_rows(table), alternatives)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise UsageError(f"a filter on {table} cannot be evaluated: {str(error).splitlines()[0]}") from error
    return Query(table, names, alternatives)


def _common_value(alternatives: Sequence[Sequence[_Term]], column: str) -> int | None:
    """The one value that all alternatives require of an integer column; None if there is no such value."""
    asked = {
        next((v for name, op, v in terms if name == column and op in {"=", "=="} and type(v) is int), None)
        for terms in alternatives
    }
    return asked.pop() if len(asked) == 1 else None


def _compile(table: str, filters: Any) -> tuple[tuple[_Term, ...], ...]:
    if not isinstance(filters, Sequence) or isinstance(filters, str):
        raise UsageError(f"filters takes a list of (column, operator, value), got {filters!r}")
    alternatives = [filters] if isinstance(filters[0], tuple) else filters
    return tuple(tuple(_term(table, term) for term in alternative) for alternative in alternatives)


def _term(table: str, term: Any) -> _Term:
    if not isinstance(term, tuple) or len(term) != 3:
        raise UsageError(f"a filter is a tuple (column, operator, value), got {term!r}")
    name, operator, value = term
    _check_column(table, name)
    if operator not in _OPERATORS:
        raise UsageError(f"no filter operator {operator!r}; there are {', '.join(_OPERATORS)}")
    if operator in {"in", "not in"}:  # an empty list has no type of its own
        value = pa.array(list(value), stored_type(table_schema(table).field(name).type))
    return name, operator, value


def _matches(batch: pa.RecordBatch, alternatives: Iterable[Iterable[_Term]]) -> pa.Array:
    """For each row whether it satisfies all terms of any alternative: true, false or null.

    Gives the result of the equivalent expression, without the thread pool and the plan that Arrow makes for one.
    """
    every = pa.repeat(pa.scalar(True), batch.num_rows)
    matches = [
        reduce(
            pc.and_kleene,
            (_term_matches(batch.column(name), operator, value) for name, operator, value in terms),
            every,
        )
        for terms in alternatives
    ]
    return reduce(pc.or_kleene, matches)


def _term_matches(column: pa.Array, operator: str, value: Any) -> pa.Array:
    holds = _OPERATORS[operator]
    if not pa.types.is_dictionary(column.type):
        return holds(column, value)
    if column.null_count:  # the shortcut below keeps a null null, but "not in" is true of a null
        return holds(column.dictionary_decode(), value)
    return pc.take(holds(column.dictionary, value), column.indices)  # compares each name once, not once per row


@cache
def _no_rows(table: str) -> pa.RecordBatch:
    schema = table_schema(table)
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _may_satisfy(operator: str, value: Any, first: int, last: int) -> bool:
    if operator in {"=", "=="}:
        return bool(first <= value <= last)
    if operator == "in":
        return any(first <= v <= last for v in value if v is not None)
    if operator in {"<", "<="}:
        return bool(first < value or (operator == "<=" and first == value))
    if operator in {">", ">="}:
        return bool(last > value or (operator == ">=" and last == value))
    return True


def _refers_to(predicate: pc.Expression, empty: pa.Table, name: str) -> bool:
    """Return whether an expression refers to column ``name``: without that column, Arrow fails to evaluate it."""
    try:
        empty.drop_columns([name]).filter(predicate)
    except pa.ArrowInvalid:
        return True
    return False


def _check_column(table: str, name: object) -> None:
    names = _names(table)
    if name not in names:
        raise UsageError(f"{table} has no column {name!r}{_nearest(str(name), names)}")


@cache
def _names(table: str) -> tuple[str, ...]:
    """Names of the table's columns; cached because ``schema.names`` builds a new list at each access."""
    return tuple(table_schema(table).names)


def _nearest(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, known) or f"; there are {', '.join(known)}"
