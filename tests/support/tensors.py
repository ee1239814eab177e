"""Rows of the ``tensors`` table counted from real values, as the recorder's kernels count them."""

from __future__ import annotations

from typing import Any

import numpy as np

from precdoctor.numerics.formats import format_of_dtype
from tests.support.references import blocks_of, groups_of, histogram_of


def row_of(values: Any, *, blocks: tuple[int, ...] = (32, 128), **columns: Any) -> dict[str, Any]:
    """The row of an array that already holds values of its dtype (``float32`` unless told)."""
    x = np.asarray(values, dtype=np.float64)
    finite = x[np.isfinite(x)]
    used = np.abs(finite[finite != 0])
    histogram = histogram_of(used)
    row: dict[str, Any] = {
        "dtype": "float32",
        "shape": list(x.shape),
        "numel": x.size,
        "nan": int(np.isnan(x).sum()),
        "pos_inf": int(np.isposinf(x).sum()),
        "neg_inf": int(np.isneginf(x).sum()),
        "zero": int((x == 0).sum()),
        "amax": float(np.abs(finite).max()) if finite.size else None,
        "amin_nonzero": float(used.min()) if used.size else None,
        "sum": float(finite.sum()),
        "sum_sq": float(np.square(finite).sum()),
        "exp_lo": histogram.lo if used.size else None,
        "exp_hist": histogram.counts.tolist() if used.size else None,
    }
    for size in blocks if used.size else ():
        counted = blocks_of(x.reshape(-1, x.shape[-1]), size)
        row[f"block{size}_hist"] = list(counted.below)
        row[f"block{size}_amax_lo"], row[f"block{size}_amax_hist"] = counted.amax.lo, counted.amax.counts.tolist()
    fmt = format_of_dtype(columns.get("dtype", "float32"))
    row["subnormal"] = int((used < fmt.min_normal).sum())
    return {**row, **columns}


def grouped_row_of(x: Any, kind: str, **columns: Any) -> dict[str, Any]:
    """The row of an inference run: a weight, an output with features last, or keys or values of a cache."""
    flat = x.reshape(-1, x.shape[-1])
    if kind == "weight":
        ways = {"channel": x}
    elif kind == "output":
        ways = {"token": flat, "channel": flat.T}
    else:
        heads, features = x.shape[1], x.shape[3]
        by_channel = x.transpose(1, 3, 0, 2).reshape(heads * features, -1)
        ways = {"token": flat, "channel": by_channel, "head": x.transpose(1, 0, 2, 3).reshape(heads, -1)}
    found: dict[str, Any] = {}
    for grouping, groups in ways.items():
        counted = groups_of(groups)
        found |= {f"{grouping}_hist": list(counted.counts), f"{grouping}_energy": list(counted.energy)}
    return row_of(x, kind=kind, blocks=(16, 32), **found, **columns)
