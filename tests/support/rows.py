"""Rows for tests of the log: one with every column filled with awkward values, and many as a real run makes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from precdoctor.runlog.parts import DOMAINS, WORDS
from precdoctor.runlog.schema import TABLES

_AWKWARD: dict[str, list[Any]] = {
    "int32": [-(2**31), 0, 2**31 - 1],
    "int64": [2**63 - 1, -(2**63), 2**53 + 1],
    "uint64": [2**64 - 1, 0, 2**53 + 1],
    "double": [math.inf, 5e-324, -0.0],
    "string": ["", 'é\u2028"</script>', "x" * 300],
    "bool": [True, False, True],
    "list<item: int64>": [[], [2**63 - 1], list(range(64))],
    "list<item: double>": [[], [math.inf], [0.1, -0.0]],
}


def awkward_rows(table: str) -> list[dict[str, Any]]:
    """Three rows with every column filled and a fourth with every nullable one null; ``rank`` is 0."""
    rows: list[dict[str, Any]] = [{}, {}, {}, {}]
    for field in TABLES[table]:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        for row, value in zip(rows, [*_AWKWARD[str(kind)], None], strict=True):
            row[field.name] = _possible(field.name, value, table)
        if not field.nullable:
            rows[3][field.name] = rows[0][field.name]
    for n, row in enumerate(rows):
        row.update(rank=0, step=n)
    return rows


def _possible(column: str, value: Any, table: str) -> Any:
    """The nearest value that the column may hold."""
    if value is not None and column in WORDS.get(table, {}):
        return WORDS[table][column][0]
    if value is None or column not in DOMAINS:
        return value
    if isinstance(value, list):
        return [_possible(column, v, table) for v in value]
    low, high = DOMAINS[column]
    return type(value)(low) if math.isnan(value) or value < low else type(value)(min(value, high))


def training_columns(tensors: int, steps: int, *, blocks: bool) -> dict[str, list[Any]]:
    """Columns of ``tensors`` x ``steps`` rows with the value distributions and sampling noise of a GPT's training."""
    rng = np.random.default_rng(0)
    rows = [_training_row(rng, step, t, blocks=blocks) for step in range(steps) for t in range(tensors)]
    return {name: [row.get(name) for row in rows] for name in TABLES["tensors"].names}


def _training_row(rng: np.random.Generator, step: int, t: int, *, blocks: bool) -> dict[str, Any]:
    kind = ["output", "grad_output", "weight", "weight_grad", "update"][t % 5]
    place = t // 5
    numel = [65536, 262144, 1024, 49152][place % 4]
    x = (rng.standard_normal(1024) * 2.0 ** (-3 - t % 17) * (1 + 0.1 * rng.standard_normal())).astype(np.float32)
    magnitude = np.abs(x[x != 0])
    exponent = np.frexp(magnitude)[1] - 1
    lo = int(exponent.min())
    row: dict[str, Any] = {
        "step": step,
        "rank": 0,
        "root": "GPT#0",
        "module": f"transformer.h.{place // 4}.{['attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down'][place % 4]}",
        "module_class": "Linear",
        "kind": kind,
        "name": "" if kind in {"output", "grad_output"} else "weight",
        "call": 0,
        "phase": "train",
        "dtype": "bfloat16" if t % 5 < 2 else "float32",
        "shape": [8, numel // 8],
        "numel": numel,
        "micro_step": 0,
        "order": step * 3000 + t,
        "zero": int(rng.integers(0, 5)),
        **dict.fromkeys(("nan", "pos_inf", "neg_inf", "subnormal", "at_max"), 0),
        "amax": float(magnitude.max()),
        "amin_nonzero": float(magnitude.min()),
        "sum": float(x.sum(dtype=np.float64)),
        "sum_sq": float(np.square(x, dtype=np.float64).sum()),
        "exp_lo": lo,
        "exp_hist": rng.multinomial(numel, np.bincount(exponent - lo) / magnitude.size),
        "fingerprint": int(rng.integers(0, 2**63)),
        "scale": 65536.0 if kind == "grad_output" else None,
    }
    if kind == "update":
        row.update(unchanged=int(rng.integers(0, numel)), rel_lo=-20, rel_hist=rng.multinomial(numel, [1 / 18] * 18))
    if blocks:
        share = 0.5 ** np.arange(1, 25)
        for size in (16, 32, 128) if kind == "weight" else (32, 128):
            row[f"block{size}_hist"] = rng.multinomial(numel, share / share.sum())
            row[f"block{size}_amax_lo"] = lo + 8
            row[f"block{size}_amax_hist"] = rng.multinomial(numel // size, [0.1, 0.3, 0.4, 0.15, 0.05])
    return row
