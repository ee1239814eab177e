"""Where a rank stands in a parallel layout, and weights of which several ranks hold a copy.

Copies are compared by fingerprint in one pass over the rows.

Which ranks hold the same of a parameter is in the ``layout`` of their rank.json. :meth:`Replicas.compare` maps a record
batch to a partial result, :func:`merge` joins partial results in any order and grouping, and :func:`summarise` turns
the last one into a row per weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import Process, RunView

#: Columns of the ``tensors`` table that a comparison reads.
COLUMNS: Final = (
    *("step", "rank", "attempt", "root", "module", "kind", "name", "order", "fingerprint"),
    *("nan", "pos_inf", "neg_inf"),
)
#: What identifies a row's weight on its process.
_PLACE: Final = ("rank", "attempt", "root", "module", "name")
_MEMBERS: Final = pa.schema(
    [("rank", pa.int32()), ("attempt", pa.int32()), ("root", pa.string()), ("module", pa.string()),
     ("name", pa.string()), ("weight", pa.int32())]
)  # fmt: skip
#: A partial result: per weight and step the extremes of the fingerprints, the number of copies, and the largest number
#: of non-finite elements in one.
PARTIAL: Final = pa.schema(
    [("weight", pa.int32()), ("step", pa.int64()), ("low", pa.uint64()), ("high", pa.uint64()), ("copies", pa.int64()),
     ("order", pa.int64()), ("bad", pa.int64())]
)  # fmt: skip
#: How the columns of partial results are joined.
_JOIN: Final = [("low", "min"), ("high", "max"), ("copies", "sum"), ("order", "min"), ("bad", "max")]


#: Names of dimensions along which only the data differ.
_OF_ALL_RANKS: Final = frozenset(("dp", "dim0", "shard", "dp_shard", "fsdp"))


def coordinates(view: RunView, rank: int) -> Mapping[str, int]:
    """The place of a rank in the parallel layout by dimension, ``stage`` for that of a pipeline.

    Empty without a layout, and where all ranks are replicas, or shards, of one another: their number says as much.
    """
    facts = (view.facts(p) for p in view.everyone if p.rank == rank)
    layout: Mapping[str, Any] = next((found for f in facts if (found := f.get("layout"))), {})
    places = {text(d["name"]): int(d["rank"]) for d in layout.get("dimensions") or () if d["size"] > 1}
    stages: Sequence[int] = layout.get("stages") or ()
    if len(stages) == 1:
        places.pop("pp", None)
        return {**places, "stage": int(stages[0])}
    return {} if places.keys() <= _OF_ALL_RANKS and set(places.values()) <= {rank} else places


@dataclass(frozen=True)
class Weight:
    """A parameter, or a piece of one, that ``replicas`` ranks hold; ``first`` is the lowest of them."""

    root: str
    module: str
    name: str
    first: int
    replicas: int
    #: How often the launcher had restarted the ranks; None: not known.
    restart: int | None
    trained: bool
    is_matrix: bool
    by: str


class Replicas:
    """Which rows of a run are copies of one another.

    Attributes:
        weights: what at least two recorded processes hold a copy of.
    """

    def __init__(self, facts: Mapping[Process, Mapping[str, Any]]) -> None:
        """Read the layouts; ``facts`` is the rank.json of each process."""
        holders: dict[Weight, list[Process]] = {}
        for process, document in facts.items():
            for weight in _weights(document):
                holders.setdefault(weight, []).append(process)
        shared = self._shared = {w: held for w, held in holders.items() if len({p.rank for p in held}) > 1}
        self.weights: Sequence[Weight] = tuple(shared)
        rows = [
            (p.rank, p.attempt, w.root, w.module, w.name, n)
            for n, (w, held) in enumerate(shared.items())
            for p in held
        ]  # fmt: skip
        columns = zip(*rows, strict=True) if rows else ([] for _ in _MEMBERS)
        self._members = pa.table([pa.array(c, f.type) for c, f in zip(columns, _MEMBERS, strict=True)], _MEMBERS)

    def holders(self, weight: int) -> Sequence[Process]:
        """The recorded processes that hold a copy of ``weights[weight]``."""
        return self._shared[self.weights[weight]]

    def compare(self, batch: pa.RecordBatch) -> pa.Table:
        """A partial result over one batch of rows with :data:`COLUMNS`."""
        is_weight = pc.and_(pc.equal(batch["kind"], "weight"), pc.is_valid(batch["fingerprint"]))
        rows = pa.Table.from_batches([batch]).filter(is_weight)
        if not rows.num_rows or not self.weights:
            return PARTIAL.empty_table()
        members = self._members.filter(pc.is_in(self._members["rank"], pc.unique(rows["rank"])))
        columns = {name: rows[name].cast(_MEMBERS.field(name).type) for name in _PLACE}
        value, one = rows["fingerprint"], pa.array([1] * rows.num_rows, pa.int64())
        bad = pc.add(pc.add(rows["nan"], rows["pos_inf"]), rows["neg_inf"])
        columns |= {
            "step": rows["step"],
            "low": value,
            "high": value,
            "copies": one,
            "order": rows["order"],
            "bad": bad,
        }
        return _joined(pa.table(columns).join(members, list(_PLACE), join_type="inner"))


def merge(partials: Iterable[pa.Table]) -> pa.Table:
    """One partial result of several; associative and commutative but for the order of its rows."""
    return _joined(pa.concat_tables([PARTIAL.empty_table(), *partials]))


def _joined(rows: pa.Table) -> pa.Table:
    grouped = rows.group_by(["weight", "step"]).aggregate(_JOIN)
    return grouped.rename_columns(["weight", "step", *(name for name, _ in _JOIN)]).select(PARTIAL.names).cast(PARTIAL)


def summarise(partial: pa.Table) -> pa.Table:
    """Per weight of which two copies or more were recorded on one step, in the order of ``weight``:

    ``first``, ``last``: steps on which copies were compared; ``steps``: their number; ``different``: the number of
    those on which they differ, with the first one, ``differs_from`` (null: none); ``equal_again``: the last step on
    which all copies were equal and finite, null where they never were; ``order``: of execution.
    """
    several = partial.filter(pc.greater(partial["copies"], 1))
    differs = pc.not_equal(several["low"], several["high"])
    whole = several.group_by("weight").aggregate([("copies", "max")])
    several = several.append_column("differs", pc.cast(differs, pa.int64()))
    several = several.append_column("differs_from", pc.if_else(differs, several["step"], pa.scalar(None, pa.int64())))
    several = several.join(whole, "weight")
    # Copies that are NaN throughout are equal because nothing is left of them.
    sound = pc.and_(pc.equal(several["differs"], 0), pc.equal(several["bad"], 0))
    equal = pc.and_(pc.equal(several["copies"], several["copies_max"]), sound)
    several = several.append_column("equal_again", pc.if_else(equal, several["step"], pa.scalar(None, pa.int64())))
    found = several.group_by("weight").aggregate(
        [("step", "min"), ("step", "max"), ("step", "count"), ("differs", "sum"), ("differs_from", "min"),
         ("equal_again", "max"), ("order", "min")]
    )  # fmt: skip
    names = ("weight", "first", "last", "steps", "different", "differs_from", "equal_again", "order")
    return found.rename_columns(list(names)).sort_by("weight")


def replica_differences(batches: Iterable[pa.RecordBatch], replicas: Replicas) -> pa.Table:
    """The summary over all batches; see :func:`summarise`. Memory is flat in the number of ranks."""
    total = PARTIAL.empty_table()
    waiting: list[pa.Table] = []
    for batch in batches:
        waiting.append(replicas.compare(batch))
        if sum(table.num_rows for table in waiting) > max(1 << 16, total.num_rows):
            total, waiting = merge([total, *waiting]), []
    return summarise(merge([total, *waiting]))


def _weights(facts: Mapping[str, Any]) -> Iterable[Weight]:
    layout = facts.get("layout") or {}
    placements = layout.get("placements") or ()
    for root in facts.get("roots") or () if placements else ():
        for parameter in root.get("parameters") or ():
            number = parameter.get("placement")
            if number is None or not 0 <= number < len(placements) or (placements[number].get("replicas") or 0) < 2:
                continue
            placement = placements[number]
            yield Weight(
                text(root.get("name")), text(parameter.get("module")), text(parameter.get("name")),
                placement["first"], placement["replicas"], layout.get("restart"),
                parameter.get("requires_grad") is not False, len(parameter.get("shape") or ()) > 1,
                text(placement.get("by")),
            )  # fmt: skip
