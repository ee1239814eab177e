"""Upper bounds, in bytes, of the memory that a log takes as Python objects; the constants were measured on a million
rows.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.runlog.caps import JSON_COSTS, json_cost

#: Bytes per row, text and lists not counted, what rules derive from the row included.
_ROW_COSTS: Final = {"steps": 1800, "events": 2100, "ops": 200}
#: Bytes per learning rate in ``lrs``.
_LEARNING_RATE_COST: Final = 64
#: Bytes per tensor, however many rows it has.
TENSOR_COST: Final = 4500


def document_cost(document: dict[str, Any]) -> int:
    """Bytes that a parsed JSON document takes."""
    return json_cost(json.dumps(document).encode())


def shared_model_cost(facts: dict[str, Any], models: dict[str, Any]) -> int:
    """Bytes that the facts of a process add. Processes with equal module trees share one tree, counted once.

    Args:
        facts: content of rank.json; its ``roots`` are replaced by the equal tree in ``models``.
        models: the module trees so far, by checksum; the key ``""`` has the latest. Updated.
    """
    roots = facts.get("roots")
    if not roots:
        return document_cost(facts)
    cost = 0
    if models.get("") != roots:
        text = json.dumps(roots).encode()
        key = hashlib.sha256(text).hexdigest()
        cost = 0 if key in models else json_cost(text)
        models[""] = models.setdefault(key, roots)
    facts["roots"] = models[""]
    return cost + document_cost({name: value for name, value in facts.items() if name != "roots"})


def rows_cost(table: str, batch: pa.RecordBatch) -> int:
    """Bytes that the rows of a batch of ``steps``, ``events`` or ``ops`` take; 0 for ``tensors``."""
    cost = _ROW_COSTS.get(table, 0) * batch.num_rows
    if not cost:
        return 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "lrs":
            cost += _LEARNING_RATE_COST * len(column.flatten())
        elif pa.types.is_string(column.type):
            cost += 2 * column.nbytes
        if name == "data":
            found = {sign: pc.sum(pc.count_substring(column, sign)).as_py() or 0 for sign in JSON_COSTS}
            cost += sum(found[sign] * JSON_COSTS[sign] for sign in found)
    return int(cost)
