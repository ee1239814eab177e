"""PD404, cause ``left-in``: the scales of a product's operands are not divided out of its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand
from precdoctor.diagnosis.survey.frames import AT, Mask
from precdoctor.diagnosis.survey.processes import Process
from precdoctor.diagnosis.survey.rows import Key, tensor_location
from precdoctor.diagnosis.survey.view import RunView

_AT = list(AT)
_SNIPPET = (
    "product = (x8.to(x.dtype) @ w8.to(x.dtype).t()) / (scale_x * scale_w)\n"
    "# torch._scaled_mm multiplies: scale_a=1 / scale_x, scale_b=1 / scale_w\n"
)


@dataclass(frozen=True, eq=False)
class _Product:
    """A module that casts one input and one weight.

    Attributes:
        rows: one row per step: ``amax`` of the output, ``bound`` (the largest magnitude that its operands can make),
            ``earlier`` (the largest output before it, which a residual connection may add) and ``scales`` (the product
            of both).
        over: the rows whose output is larger than both by more than the limit, while the scales explain it.
    """

    operand: Operand
    rows: pd.DataFrame
    over: Mask

    @property
    def excess(self) -> float:
        """Median of output amax over ``bound``, on the steps in ``over``."""
        rows = self.rows[self.over]
        return float((rows["amax"] / rows["bound"]).median())


def left_in(rule: Rule, view: RunView, found: Mapping[Key, Operand], options: Options) -> Checked:
    """Report the module whose output is furthest above what its operands can make."""
    products = list(_products(view, found, options["left_in"]))
    guilty = sorted((p for p in products if 2 * p.over.sum() > len(p.over)), key=lambda p: (-p.excess, p.operand.key))
    if not guilty:
        return Checked((), f"{plural(len(products), 'product')} within what the operands can make")
    return Checked([_finding(rule, guilty, options)], f"{plural(len(guilty), 'product')} with its scales left in")


def _products(view: RunView, found: Mapping[Key, Operand], limit: float) -> Iterator[_Product]:
    """Yield each module with one FP8 input and one FP8 weight, on the steps that recorded both and the output."""
    inputs = {key: o for key, o in found.items() if key[3] == "input"}
    several = {key[:2] for key in found if key[3].partition(".")[2] or key[4]}
    pairs = [(o, w) for key, o in inputs.items() if key[:2] not in several
             and (w := found.get((*key[:3], "weight", key[4]))) is not None]  # fmt: skip
    if not pairs:
        return
    rows = view.measured(("fan_in",), ("output", "weight"), columns=("amax", "numel", "order"))
    rows = rows.sort_values([*_AT, "order"], kind="stable")
    seen = rows["amax"].where(rows["kind"] == "output").groupby([rows[n] for n in _AT])
    rows["earlier"] = seen.cummax().groupby([rows[n] for n in _AT]).shift().fillna(0.0)
    own = dict(iter(rows.groupby(["root", "module"], observed=True, sort=False)))
    for operand, weight in pairs:
        here = own.get(operand.key[:2])
        together = _by_step(operand, weight, here) if here is not None else None
        if together is not None and len(together):
            largest = together[["bound", "earlier"]].max(axis=1)
            over = (together["amax"] >= 2.0**limit * largest) & (together["scales"] >= 2.0**limit)
            yield _Product(operand, together, over.to_numpy())


def _by_step(operand: Operand, weight: Operand, rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the rows of a :class:`_Product`; None unless the module has one weight matrix and an output."""
    outputs, weights = rows[rows["kind"] == "output"], rows[rows["kind"] == "weight"]
    matrices = weights[weights["fan_in"] > 1]
    if outputs.empty or len(set(matrices["name"])) != 1:
        return None
    # The product may sum over either side of the weight: take the longer one.
    terms = float(np.maximum(matrices["fan_in"], matrices["numel"] / matrices["fan_in"]).max())
    bias = float(weights[weights["fan_in"] <= 1]["amax"].max())
    x, w = (pd.DataFrame({**{n: getattr(o.casts, n) for n in _AT}, "of": o.casts.amax, "scale": o.casts.scale})
            for o in (operand, weight))  # fmt: skip
    both = x.merge(w, on=_AT, suffixes=("_x", "_w"))
    both = both.merge(outputs.groupby(_AT)[["amax", "earlier"]].max().reset_index(), on=_AT).dropna()
    bound = terms * both["of_x"] * both["of_w"] + (0.0 if np.isnan(bias) else bias)
    found: pd.DataFrame = both.assign(bound=bound, scales=both["scale_x"] * both["scale_w"])
    return found


def _finding(rule: Rule, guilty: Sequence[_Product], options: Options) -> Finding:
    worst = guilty[0]
    row = worst.rows[worst.over].iloc[0]
    return rule.finding(
        severity=Severity.ERROR,
        confidence=0.9,
        cause="left-in",
        title=f"the output of `{worst.operand.place}` is {worst.excess:,.0f} times what its FP8 operands can make: "
        "their scales are not divided out",
        message=f"At step {int(row['step'])} the output of `{worst.operand.place}` reaches {row['amax']:.3g}. An input "
        f"of up to {row['of_x']:.3g} and a weight of up to {row['of_w']:.3g} make {row['bound']:.3g} at most; limit "
        f"{2.0 ** options['left_in']:g} times that. Their scales are {row['scale_x']:.3g} and {row['scale_w']:.3g}, "
        f"{row['scales']:.3g} together. That holds on {worst.over.sum():,} of {plural(len(worst.rows), 'step')}. "
        f"Affected: {plural(len(guilty), 'module')}.",
        location=tensor_location(
            worst.operand.key, worst.operand.module_class, "output", Phase.FORWARD, Process.of(row), int(row["step"])
        ),
        evidence={
            "excess": worst.excess,
            "limit": 2.0 ** options["left_in"],
            "output_amax": float(row["amax"]),
            "bound": float(row["bound"]),
            "scales": float(row["scales"]),
            "bad_steps": worst.rows["step"][worst.over].astype(int).tolist()[:64],
            "last_bad_step": int(worst.rows["step"][worst.over].iloc[-1]),
            "modules": [p.operand.place for p in guilty],
            "confidence_reason": "no sum of so many products of the recorded size is that large",
        },
        prescription=Prescription(
                title=f"divide the product by both scales: output of `{worst.operand.place}` {row['amax']:.3g} -> "
                f"{row['amax'] / row['scales']:.3g}",
                change={"operand": worst.operand.label, "divide_by": float(row["scales"])},
                predicted={"output_amax": {"from": float(row["amax"]), "to": float(row["amax"] / row["scales"])}},
                snippet=_SNIPPET,
            ),
    )  # fmt: skip
