"""Rows as a recorder leaves them of a small GPT in training: healthy, but for what a test wants to be wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precdoctor.runlog import Run, open_run
from tests.support.runs import write_run

Row = dict[str, Any]
ROOT = "GPT#0"
NUMEL = 4096

#: Execution order of the forward pass: (module, class).
FORWARD = (
    ("emb", "Embedding"),
    ("blocks.0.norm", "LayerNorm"),
    ("blocks.0.attn.qkv", "Linear"),
    ("blocks.0.attn.proj", "Linear"),
    ("blocks.0.mlp.up", "Linear"),
    ("blocks.0.mlp.down", "Linear"),
    ("norm", "LayerNorm"),
    ("head", "Linear"),
)
#: An input no other row covers: attention is functional code between qkv and proj.
FUNCTIONAL_INPUTS = ("blocks.0.attn.proj",)
CLASSES = {
    **dict(FORWARD),
    "": "GPT",
    "blocks": "ModuleList",
    "blocks.0": "Block",
    "blocks.0.attn": "CausalSelfAttention",
    "blocks.0.mlp": "MLP",
}
FACTS: dict[str, Any] = {
    "roots": [
        {
            "name": ROOT,
            "class": "GPT",
            "modules": [{"name": n, "class": c} for n, c in CLASSES.items()],
            "parameters": [
                {"name": "weight", "module": m, "shape": [64, 64], "dtype": "float32", "requires_grad": True}
                for m, _ in FORWARD
            ],
        }
    ],
    "optimizers": [
        {
            "name": "AdamW#0",
            "class": "AdamW",
            "intended_update": "exact",
            "groups": [{"lr": 1e-3, "eps": 1e-8, "betas": [0.9, 0.999], "weight_decay": 0.0, "parameters": 8}],
        }
    ],
    "scalers": [],
    "device": {"type": "cpu"},
}


def histogram(values: np.ndarray) -> Row:
    """The statistics columns of an array, by the definition of the columns."""
    x = np.abs(values.astype(np.float64))
    finite = x[np.isfinite(x)]
    nonzero = finite[finite > 0]
    mantissa, exponent = np.frexp(nonzero)
    bins = np.where(mantissa == 0.5, exponent - 2, exponent - 1)
    row: Row = {
        "numel": int(values.size),
        "nan": int(np.isnan(x).sum()),
        "pos_inf": int(np.isposinf(values).sum()),
        "neg_inf": int(np.isneginf(values).sum()),
        "zero": int((finite == 0).sum()),
        "amax": float(finite.max()) if finite.size else None,
        "amin_nonzero": float(nonzero.min()) if nonzero.size else None,
        "sum": float(values[np.isfinite(values)].astype(np.float64).sum()),
        "sum_sq": float((finite**2).sum()),
    }
    if nonzero.size:
        lo = int(bins.min())
        row |= {"exp_lo": lo, "exp_hist": np.bincount(bins - lo).tolist()}
    return row


_VALUES = np.random.default_rng(0).normal(0.0, 1.0, NUMEL).astype(np.float32)
_HEALTHY = histogram(_VALUES)
_UPDATE = histogram(_VALUES * 2.0**-8)


def tensor(step: int, kind: str, module: str, order: int | None, **columns: Any) -> Row:
    """One healthy row, with some columns changed."""
    return {
        "step": step,
        "root": ROOT,
        "module": module,
        "module_class": CLASSES.get(module),
        "kind": kind,
        "order": order,
        "first_bad_order": None,
        "shape": [64, 64],
        "phase": "train",
        **_HEALTHY,
        **columns,
    }


def healthy_step(
    step: int, *, dtype: str = "float32", weight_dtype: str = "float32", scale: float | None = None
) -> list[Row]:
    """All rows of one step in execution order."""
    rows: list[Row] = []

    def add(kind: str, module: str, **columns: Any) -> None:
        rows.append(tensor(step, kind, module, len(rows), **columns))

    for module, _ in FORWARD:
        if module in FUNCTIONAL_INPUTS:
            add("input", module, name="0", dtype=dtype)
        add("output", module, dtype=dtype)
    rows.append(
        tensor(step, "loss", "", len(rows), root="", module_class=None, dtype="float32", scale=scale)
        | histogram(np.array([2.5 * (scale or 1.0)], dtype=np.float32))
    )
    for module, _ in reversed(FORWARD):
        add("grad_output", module, dtype=dtype, scale=scale)
        add("weight_grad", module, name="weight", dtype=weight_dtype, scale=scale)
    for module, _ in FORWARD:
        add("weight_grad_step", module, name="weight", dtype=weight_dtype)
    for module, _ in FORWARD:
        add("weight", module, name="weight", dtype=weight_dtype)
        rel = {"unchanged": 0, "rel_lo": -8, "rel_hist": [NUMEL // 2, NUMEL // 2]}
        add("update", module, name="weight", dtype=weight_dtype, **_UPDATE, **rel)
    return rows


def normal(sigma: float, dtype: str = "float32") -> Row:
    """The statistics columns of a Gaussian tensor of this standard deviation, rounded to ``dtype``; 0: all zeros."""
    values = (_VALUES * sigma).astype(dtype).astype(np.float32)
    return {"amin_nonzero": None, "exp_lo": None, "exp_hist": None, **histogram(values)}


def find(rows: Iterable[Row], kind: str, module: str = "") -> Row:
    """The row of one tensor."""
    return next(r for r in rows if r["kind"] == kind and r["module"] == module)


def spoil(row: Row, **counts: int) -> None:
    """Put non-finite values into a row: ``nan=``, ``pos_inf=``, ``neg_inf=``."""
    row |= counts
    row["first_bad_order"] = row["order"]


def poison(rows: Sequence[Row], kind: str, module: str = "", *, until: str = "update", **counts: int) -> None:
    """Make one tensor the origin of non-finite values; everything after it becomes NaN, weights excepted."""
    origin = find(rows, kind, module)
    spoil(origin, **(counts or {"nan": 3}))
    for row in rows:
        if row["order"] > origin["order"] and row["kind"] != "weight":
            row |= {"amax": None, "amin_nonzero": None, "exp_lo": None, "exp_hist": None}
            spoil(row, nan=row["numel"], pos_inf=0, neg_inf=0)
        if row["kind"] == until and row is rows[-1]:
            break


@dataclasses.dataclass
class Training:
    """A run in the making: a healthy one of ``steps`` steps, to be changed and then written."""

    steps: int = 12
    dtype: str = "float32"
    weight_dtype: str = "float32"
    scale: float | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=lambda: FACTS)
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    end: bool = True

    def __post_init__(self) -> None:
        make = lambda s: healthy_step(s, dtype=self.dtype, weight_dtype=self.weight_dtype, scale=self.scale)  # noqa: E731
        self.tensors: dict[int, list[Row]] = {s: make(s) for s in range(self.steps)}
        self.step_rows: dict[int, Row] = {s: self._step_row(s) for s in range(self.steps)}
        self.events: list[Row] = []
        #: Rows of one rank only, in place of the common ones: (rank, step) -> rows.
        self.of_rank: dict[tuple[int, int], list[Row]] = {}

    def _step_row(self, step: int) -> Row:
        return {
            "step": step,
            "optimizer": "AdamW#0",
            "complete": True,
            "loss": 2.5,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "loss_scale": self.scale,
            "found_inf": None if self.scale is None else False,
            "skipped": False,
            "non_finite": 0,
            "sampled": True,
            "recorder_ns": 1_000,
            "step_ns": 100_000,
        }

    def poison(self, step: int, kind: str, module: str = "", *, then: bool = True, **counts: int) -> Training:
        """Non-finite values begin at one tensor of ``step``; with ``then``, all later steps are NaN throughout."""
        poison(self.tensors[step], kind, module, **counts)
        self._settle(step)
        if then:
            for later in range(step + 1, self.steps):
                for row in self.tensors[later]:
                    spoil(row, nan=row["numel"])
                self._settle(later)
        return self

    def skip(self, *steps: int) -> Training:
        """The loss scaler finds these steps non-finite and skips them; gradients overflow from the head on."""
        for step in steps:
            for row in self.tensors[step]:
                if row["kind"] in ("grad_output", "weight_grad", "weight_grad_step") and not row["nan"]:
                    spoil(row, pos_inf=7)
            self.tensors[step] = [r for r in self.tensors[step] if r["kind"] not in ("update", "weight")]
            self.step_rows[step] |= {"found_inf": True, "skipped": True, "non_finite": 8}
        return self

    def scales(self, scales: Sequence[float]) -> Training:
        """The loss scale of each step."""
        for step, scale in enumerate(scales):
            self.step_rows[step]["loss_scale"] = scale
            for row in self.tensors.get(step, ()):
                if row["kind"] in ("grad_output", "weight_grad", "loss"):
                    row["scale"] = scale
        return self

    def change(
        self,
        change: Callable[[Row], None],
        *,
        kind: str | None = None,
        module: str | None = None,
        step: int | None = None,
    ) -> Training:
        """Apply ``change`` to the rows of a kind, a module and a step; of all where none is given."""
        for at, rows in self.tensors.items():
            for row in rows:
                if kind in (None, row["kind"]) and module in (None, row["module"]) and step in (None, at):
                    change(row)
        return self

    def unsample(self, *steps: int) -> Training:
        """No full statistics on these steps."""
        for step in steps:
            self.tensors.pop(step, None)
            self.step_rows[step]["sampled"] = False
        return self

    def _settle(self, step: int) -> None:
        triggers = ("loss", "weight_grad", "weight_grad_step", "weight", "update")
        bad = [r for r in self.tensors[step] if r["nan"] or r["pos_inf"] or r["neg_inf"]]
        self.step_rows[step]["non_finite"] = sum(r["kind"] in triggers for r in bad)
        if any(r["kind"] == "loss" for r in bad):
            self.step_rows[step]["loss"] = float("nan")

    def write(self, path: Path) -> Run:
        """The run, written by the real writer and opened by the real reader."""
        tensors = [r for step, rows in self.tensors.items() for r in self._rows_of_all(step, rows)]
        steps = list(self.step_rows.values())
        write_run(path, tensors, steps, self.events, facts=self.facts, info=self.info, ranks=self.ranks, end=self.end)
        return open_run(path)

    def _rows_of_all(self, step: int, rows: list[Row]) -> list[Row]:
        own = {rank: mine for (rank, s), mine in self.of_rank.items() if s == step}
        if not own:
            return rows
        return [{**r, "rank": rank} for rank in range(self.ranks) for r in own.get(rank, rows)]
