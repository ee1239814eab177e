"""Mesh coordinates of ranks, and the comparison of replicated weights by fingerprint, in one pass over the rows.

The ``layout`` in each rank.json says which ranks hold a copy of the same parameter, or of the same piece of it.
:meth:`Replicas.compare` maps a record batch to a partial result, :func:`merge` joins partial results in any order and
grouping, and :func:`summarise` turns the last one into a row per weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.rows import grouped, text
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
#: A partial result: for each weight and step the smallest and largest fingerprint, the number of copies, the earliest
#: order of execution, and the largest number of non-finite elements in a copy.
PARTIAL: Final = pa.schema(
    [("weight", pa.int32()), ("step", pa.int64()), ("low", pa.uint64()), ("high", pa.uint64()), ("copies", pa.int64()),
     ("order", pa.int64()), ("bad", pa.int64())]
)  # fmt: skip
#: The aggregation that joins each column of partial results.
_JOIN: Final = [("low", "min"), ("high", "max"), ("copies", "sum"), ("order", "min"), ("bad", "max")]


#: Names of mesh dimensions along which ranks differ only in their data.
_OF_ALL_RANKS: Final = frozenset(("dp", "dim0", "shard", "dp_shard", "fsdp"))


def coordinates(view: RunView, rank: int) -> Mapping[str, int]:
    """Return the mesh coordinates of a rank by dimension; ``stage`` is that of a pipeline.

    Empty without a layout, and if all ranks are replicas or shards of one another: the coordinate is then the rank.
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
    """A parameter, or a piece of one, with a copy on ``replicas`` ranks; ``first`` is the lowest of these ranks."""

    root: str
    module: str
    name: str
    first: int
    replicas: int
    #: How often the launcher had restarted the ranks; None if unknown. Copies of different restarts are not compared.
    restart: int | None
    trained: bool
    is_matrix: bool
    by: str


class Replicas:
    """The replicated weights of a run (at least two recorded ranks hold a copy) and the processes that hold them."""

    def __init__(self, facts: Mapping[Process, Mapping[str, Any]]) -> None:
        """Read the layouts; ``facts`` is the rank.json of each process."""
        holders = grouped((weight, process) for process, document in facts.items() for weight in _weights(document))
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
        """Return the recorded processes that hold a copy of ``weights[weight]``."""
        return self._shared[self.weights[weight]]

    def compare(self, batch: pa.RecordBatch) -> pa.Table:
        """Compare the copies in one batch of rows with :data:`COLUMNS`; returns a partial result."""
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
        return _aggregated(pa.table(columns).join(members, list(_PLACE), join_type="inner"))


def merge(partials: Iterable[pa.Table]) -> pa.Table:
    """Join partial results into one; associative, and commutative except for the order of the rows."""
    return _aggregated(pa.concat_tables([PARTIAL.empty_table(), *partials]))


def _aggregated(rows: pa.Table) -> pa.Table:
    grouped = rows.group_by(["weight", "step"]).aggregate(_JOIN)
    return grouped.rename_columns(["weight", "step", *(name for name, _ in _JOIN)]).select(PARTIAL.names).cast(PARTIAL)


def summarise(partial: pa.Table) -> pa.Table:
    """Summarise a partial result: one row per weight with at least two copies on some step, sorted by ``weight``.

    Columns: ``first``, ``last``: first and last step on which copies were compared; ``steps``: their number;
    ``different``: the number of them on which copies differ; ``differs_from``: the first of those, or null;
    ``equal_again``: the last step on which all copies were equal and finite, or null; ``order``: of execution.
    """
    several = partial.filter(pc.greater(partial["copies"], 1))
    differs = pc.not_equal(several["low"], several["high"])
    whole = several.group_by("weight").aggregate([("copies", "max")])
    several = several.append_column("differs", pc.cast(differs, pa.int64()))
    several = several.append_column("differs_from", pc.if_else(differs, several["step"], pa.scalar(None, pa.int64())))
    several = several.join(whole, "weight")
    # Copies that are NaN throughout have equal fingerprints: that is no sign that they agree again.
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
    """Compare all batches and summarise; see :func:`summarise`. Memory does not grow with the number of ranks."""
    total = PARTIAL.empty_table()
    waiting: list[pa.Table] = []
    for batch in batches:
        waiting.append(replicas.compare(batch))
        if sum(table.num_rows for table in waiting) > max(1 << 16, total.num_rows):
            total, waiting = merge([total, *waiting]), []
    return summarise(merge([total, *waiting]))


def _weights(facts: Mapping[str, Any]) -> Iterable[Weight]:
    """Yield the parameters of one process that at least two ranks hold, from its rank.json."""
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
