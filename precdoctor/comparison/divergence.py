"""Finds the first tensor, in execution order, whose bits differ between two runs, by comparing fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa

from precdoctor.comparison.lines import phase_of
from precdoctor.comparison.paired_rows import Module, pair_rows
from precdoctor.comparison.steps import KINDS
from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import Process, RunView

_COMPARED = ("module_class", "dtype", "shape", "order", "fingerprint", "amax", "attempt")
#: Most steps to read at once. Reading starts with one step and doubles, so that an early difference costs little and a
#: late one few reads.
_MOST_STEPS = 32


@dataclass(frozen=True)
class Setting:
    """A learning rate or loss scale that differs on a step: ``a`` in the first run, ``b`` in the second."""

    name: str
    a: float
    b: float

    def __str__(self) -> str:
        return f"the {self.name} is {self.b:g} instead of {self.a:g}"


@dataclass(frozen=True)
class Divergence:
    """The first tensor whose bits differ.

    Attributes:
        key: the tensor, named as in the first run.
        dtypes, shapes, amax: of the tensor in the first and in the second run.
        settings: learning rate and loss scale of the step, if they differ.
        order: place of the tensor in the execution order of the step; None if the log does not have it.
        equal: number of equal tensors before this one, over all steps and ranks.
        differing: number of tensors that differ on the step.
        last_equal_step: the last step on which all tensors were equal; None if there is none.
    """

    step: int
    rank: int
    key: Key
    module_class: str
    phase: Phase
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    settings: tuple[Setting, ...]
    order: int | None
    amax: tuple[float | None, float | None]
    equal: int
    differing: int
    last_equal_step: int | None

    @property
    def sentence(self) -> str:
        """A sentence: how many tensors before this one are equal, and the likely reason of the difference."""
        if not self.equal:
            return f"{self.meaning[:1].upper()}{self.meaning[1:]}."
        before = f"{plural(self.equal, 'tensor')} before it {'is' if self.equal == 1 else 'are'} equal in every bit"
        return f"{before}; {self.meaning}."

    @property
    def meaning(self) -> str:
        """The likely reason of the difference, by the kind of the first tensor that differs."""
        kind = self.key[2]
        if (changed := self._changed_property) is not None:
            return changed
        if kind == "batch":
            return "the runs were given different data: another shuffle, another seed, or other files"
        if kind == "weight" and self.last_equal_step is None:
            return "the runs began from different weights: another seed or checkpoint"
        if kind in ("input", "output") and self.last_equal_step is None and not self.equal:
            return "the first tensor compared differs: other data, or other initial weights"
        if "dropout" in self.module_class.lower():
            return "equal inputs, another dropout mask: the random state differs"
        if kind in ("input", "output"):
            return (
                "everything before it is equal, so this module (or functional code before it) computes differently: "
                "changed code, settings or weights, randomness, or a kernel that is not deterministic"
            )
        if kind == "loss":
            return "the model's outputs are equal and the loss is not: changed loss code or targets"
        if kind in ("grad_output", "weight_grad"):
            return "the forward pass is equal and the backward pass is not: a changed or non-deterministic gradient"
        if kind == "weight_grad_step":
            return "the gradients are equal until the optimizer is given them: unscaling, clipping or reduction"
        return "gradients are equal and the step is not: other optimizer settings or state"

    @property
    def _changed_property(self) -> str | None:
        """A changed dtype, shape or setting that explains the difference, in words; None if none changed."""
        if self.dtypes[0] != self.dtypes[1]:
            return f"its dtype changed from {self.dtypes[0]} to {self.dtypes[1]}"
        if self.shapes[0] != self.shapes[1]:
            return f"its shape changed from {list(self.shapes[0])} to {list(self.shapes[1])}"
        kind = self.key[2]
        acts_on = {"learning rate": ("update",), "loss scale": ("loss", "grad_output", "weight_grad")}
        setting = next((s for s in self.settings if kind in acts_on[s.name]), None)
        if setting is None:
            return None
        before = {"loss": "the model's outputs are", "update": "the gradients are"}.get(kind, "the forward pass is")
        return f"{before} equal, and {setting}"


@dataclass(frozen=True)
class BitComparison:
    """The result of comparing the fingerprints of two runs.

    Attributes:
        first: the first difference; None if every compared tensor is equal.
        compared: number of pairs compared, up to the end of the step of the first difference.
        steps: number of common steps on which tensors were compared.
    """

    first: Divergence | None
    compared: int
    steps: int


def compare_bits(a: RunView, b: RunView, steps: Sequence[int], names: Mapping[Module, Module]) -> BitComparison:
    """Compare fingerprints step by step, up to the first step with a difference.

    ``steps`` are those that both runs sampled, ascending; ``names`` are renamed modules, ``module in b -> module in
    a``.
    """
    compared, last_equal, done = 0, None, 0
    for window in _windows(steps):
        pairs = _paired_frames(a, b, window, names)
        for step in window:
            mine = pairs[pairs["step"] == step]
            done += len(mine) > 0
            different = mine[mine["fingerprint_a"] != mine["fingerprint_b"]]
            if different.empty:
                compared += len(mine)
                last_equal = step if len(mine) else last_equal
                continue
            ordered = different.sort_values(["order_a", "rank"], na_position="last", kind="stable")
            first = ordered.iloc[0]
            before = mine[mine["order_a"] < first["order_a"]]
            settings = _settings((a, first["attempt_a"]), (b, first["attempt_b"]), int(first["rank"]), step)
            found = _divergence(first, compared + len(before), len(different), last_equal, settings)
            return BitComparison(found, compared + len(mine), done)
    return BitComparison(None, compared, done)


def _windows(steps: Sequence[int]) -> Iterator[Sequence[int]]:
    size, at = 1, 0
    while at < len(steps):
        yield steps[at : at + size]
        at, size = at + size, min(2 * size, _MOST_STEPS)


def _paired_frames(a: RunView, b: RunView, steps: Sequence[int], names: Mapping[Module, Module]) -> pd.DataFrame:
    """Paired rows, columns suffixed ``_a`` and ``_b``; rows without a fingerprint or a partner are left out."""
    pairs = pair_rows(_rows(a, steps), _rows(b, steps), names)
    named = pairs.first.rename(columns={c: f"{c}_a" for c in _COMPARED})
    return pd.concat([named, pairs.second[list(_COMPARED)].add_suffix("_b")], axis=1)


def _rows(view: RunView, steps: Sequence[int]) -> pd.DataFrame:
    # Leaves out null fingerprints: beside a null, pandas would convert the others to float64 and lose bits.
    known = ("fingerprint", ">=", pa.scalar(0, pa.uint64()))
    return view.measured((), (*KINDS, "loss"), columns=("phase", *_COMPARED), steps=steps, where=[known])


def _settings(a: tuple[RunView, int], b: tuple[RunView, int], rank: int, step: int) -> tuple[Setting, ...]:
    """Learning rate and loss scale of a step if both logs have them and they differ; ``a``, ``b``: (view, attempt)."""
    ours, theirs = (view.step_facts(Process(rank, int(attempt)), step) for view, attempt in (a, b))
    if ours is None or theirs is None:
        return ()
    pairs = [("learning rate", ours.lr, theirs.lr), ("loss scale", ours.loss_scale, theirs.loss_scale)]
    return tuple(Setting(name, x, y) for name, x, y in pairs if x is not None and y is not None and x != y)


def _divergence(
    row: pd.Series, equal: int, differing: int, last_equal: int | None, settings: tuple[Setting, ...]
) -> Divergence:
    kind = str(row["kind"])
    return Divergence(
        step=int(row["step"]),
        rank=int(row["rank"]),
        key=(str(row["root"]), str(row["module"]), kind, str(row["name"]), int(row["call"])),
        module_class=str(row["module_class_a"] or ""),
        phase=phase_of(kind),
        dtypes=(str(row["dtype_a"]), str(row["dtype_b"])),
        shapes=(_shape(row["shape_a"]), _shape(row["shape_b"])),
        settings=settings,
        order=None if pd.isna(row["order_a"]) else int(row["order_a"]),
        amax=(_number(row["amax_a"]), _number(row["amax_b"])),
        equal=equal,
        differing=differing,
        last_equal_step=last_equal,
    )


def _shape(value: Iterable[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(int(n) for n in value)


def _number(value: object) -> float | None:
    return None if pd.isna(value) else float(value)  # type: ignore[call-overload,arg-type]
