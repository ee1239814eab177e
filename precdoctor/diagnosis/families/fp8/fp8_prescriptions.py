"""Prescriptions for casts to FP8: changes from the smallest on, each with its predicted effect on the operand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.rule import RuleOption, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import KIND, Operand
from precdoctor.diagnosis.families.fp8.fp8_damage import Damage, medians, rounding_db
from precdoctor.diagnosis.families.fp8.fp8_outliers import bulk_of, cut, hot_blocks, lost_channels
from precdoctor.diagnosis.survey.frames import keys
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import IDENTITY, RunView, remembered
from precdoctor.numerics.block_prediction import predict_blocks
from precdoctor.numerics.blocks import MXFP8_E4M3, MXFP8_E5M2, TILE_1X128, BlockFormat, BlockHistogram
from precdoctor.numerics.formats import E4M3FN, E5M2, Format

#: Number of steps whose block histograms are read, to bound the reading; chosen empirically.
_BLOCK_STEPS = 3
#: Recorded block sizes.
SIZES = (128, 32)

FLUSHED_SHARE = fraction(
    "flushed_share", 0.04, "Finite non-zero elements that the cast rounds to zero, median over steps.",
    "Upper of the bands 0.5 / 2 / 4 % published with NVIDIA BioNeMo: a starting point.",
)  # fmt: skip
LOST_DB = RuleOption("lost_db", 3.0, "dB",
                     "Signal to noise lost beyond rounding to the format's mantissa (32.2 dB in E4M3, 26.2 in E5M2).",
                     "At 3 dB the scale costs as much as all rounding does.")  # fmt: skip
MIN_ELEMENTS = RuleOption("min_elements", 512.0, "elements", "Smaller tensors are not judged.", "Four tiles of 128.",
                          1.0)  # fmt: skip


@dataclass(frozen=True)
class Cure:
    """A change to one operand.

    Attributes:
        words: the change, as an imperative.
        change: the change as machine-readable settings.
        damage: predicted cost of the cast after the change.
    """

    words: str
    change: Mapping[str, Any]
    damage: Damage
    snippet: str

    def prescription(self, effect: str, predicted: Mapping[str, Any]) -> Prescription:
        """Return the change as a prescription; ``effect``: the predicted effect in words."""
        return Prescription(f"{self.words}: {effect}", self.change, predicted, self.snippet)

    def prescription_after(self, before: Damage) -> Prescription:
        """Return the change as a prescription, with flushed share and SQNR before and after."""
        after = self.damage
        effect = f"flushed {percent(before.flushed)} -> {percent(after.flushed)}"
        predicted = {
            "flushed_share": {"from": before.flushed, "to": after.flushed},
            "saturated_share": {"from": before.saturated, "to": after.saturated},
        }
        if after.sqnr_db < math.inf:
            effect += f", SQNR {before.sqnr_db:.1f} -> {after.sqnr_db:.1f} dB"
            predicted["sqnr_db"] = {"from": before.sqnr_db, "to": after.sqnr_db}
        return self.prescription(effect, predicted)


def works(damage: Damage, flushed_share: float, lost_db: float) -> bool:
    """Return whether a cast is within both limits: little is flushed, and there is little noise beyond rounding."""
    return damage.flushed < flushed_share and damage.lost_db < lost_db


def cures(view: RunView, operand: Operand) -> Iterator[Cure]:
    """Yield changes from the smallest on; the last one, the tensor's own dtype, always works."""
    if operand.padding > 1.0:
        yield rescaled(operand)
    if operand.gradient and operand.fmt.mantissa_bits == E4M3FN.mantissa_bits:
        yield in_e5m2(operand)
    yield from in_blocks(view, operand)
    yield from smoothed(view, operand)
    yield kept_wide(operand)


def smallest(view: RunView, operand: Operand, flushed_share: float, lost_db: float) -> Cure:
    """Return the first change that brings the operand within the limits, else the last one."""
    tried = list(cures(view, operand))
    return next((c for c in tried if works(c.damage, flushed_share, lost_db)), tried[-1])


def rescaled(operand: Operand) -> Cure:
    """Change to the scale of the tensor's own amax."""
    fmt, factor = operand.fmt, float(np.median(operand.fmt.max / operand.settled.peak))
    known = operand.settled.scale[~np.isnan(operand.settled.scale)]
    scale = float(known[-1]) if known.size else None
    now = "its present scale" if scale is None else "the scale in force"
    return Cure(
        f"scale by the tensor's own amax, some {factor:.3g} times {now}",
        {"scaling": {"from": scale, "to": "current"}, "scale_multiplier": factor},
        operand.fitted,
        current_snippet(fmt),
    )


def in_e5m2(operand: Operand) -> Cure:
    """Change to E5M2 at the scale of the tensor's own amax."""
    return Cure(
        "cast this gradient to E5M2 at the scale of its amax",
        {"operand": operand.label, "format": {"from": operand.fmt.dtype, "to": E5M2.dtype}},
        operand.fitted_to(E5M2),
        current_snippet(E5M2),
    )


def in_blocks(view: RunView, operand: Operand) -> Iterator[Cure]:
    """Yield changes to a scale per 1x128 tile and to MX blocks of 32, as far as blocks were recorded."""
    for fmt in (TILE_1X128, MXFP8_E5M2 if operand.fmt.mantissa_bits == E5M2.mantissa_bits else MXFP8_E4M3):
        if (found := block_damage(view, operand, fmt)) is not None:
            size = fmt.block[1]
            yield Cure(
                f"scale it per 1x{size} block along its last dimension ({fmt.name})",
                {"operand": operand.label, "block": size, "scaling": {"from": "tensor", "to": fmt.name}},
                found,
                block_snippet(fmt),
            )


def in_blocks_apart(view: RunView, operand: Operand, most: float) -> tuple[Cure, float] | None:
    """Change to the coarsest recorded blocks of which at most the share ``most`` hold an outlier; with that share."""
    last = round(median(cut(c.statistics.histogram) for c in operand.spots))
    for cure in in_blocks(view, operand):
        hot = median(hot_blocks(h, last) for h, _ in histograms(view, operand, cure.change["block"]))
        if hot <= most:
            return cure, hot
    return None


def smoothed(view: RunView, operand: Operand) -> Iterator[Cure]:
    """Yield a change that moves loud channels of an input into the weight; only if channels are proven to be lost.

    Predicted from the exponents of the bulk at a scale of its own. Source: SmoothQuant, arXiv:2211.10438.
    """
    bulk = bulk_of(operand) if operand.key[3].startswith("input") else None
    if bulk is None or not lost_channels(view, operand):
        return
    sqnr = bulk.sqnr_db + bulk.lost_db
    yield Cure(
        f"divide the loud channels by their amax before the cast, and multiply these columns of the weight by it "
        f"(2^{bulk.distance:.0f} down), which leaves the rest {sqnr:.1f} dB instead of {bulk.sqnr_db:.1f}",
        {"operand": operand.label, "smoothing": {"from": None, "to": "channel amax"}},
        Damage(bulk.flushed_alone, 0.0, 0.0, math.inf, max(0.0, rounding_db(operand.fmt) - sqnr)),
        "amax = x.abs().amax(0, keepdim=True).clamp_min(1e-12)  # per channel, over a few batches, then constant\n"
        "x, weight = x / amax, weight * amax  # before both are cast; the product is the same\n",
    )


def kept_wide(operand: Operand, module: str | None = None) -> Cure:
    """Change to no cast in the operand's module, or in ``module`` around it."""
    name = operand.key[1] if module is None else module
    return Cure(
        f"keep {f'`{name or operand.place}`' if operand.place else f'the {operand.label}'} in {operand.dtype}",
        {"module": name, "cast_to": {"from": operand.fmt.dtype, "to": operand.dtype}},
        Damage(0.0, 0.0, 0.0, math.inf, 0.0),
        f"# where the FP8 layers are made, leave this one out\nkeep_wide = [{name!r}]\n"
        if operand.place
        else f"x = x.to(torch.{operand.dtype})  # and not torch.{operand.fmt.dtype}\n",
    )


# -- blocks -----------------------------------------------------------------------------------------------------------


@remembered
def _blocks(view: RunView) -> dict[Key, list[Mapping[str, Any]]]:
    """Read a few rows with block histograms by operand, without recomputed and all-zero tensors."""
    columns = [f"block{size}{part}" for size in SIZES for part in ("_hist", "_amax_lo", "_amax_hist")]
    frame = view.measured((), (KIND,), columns=("phase", "amax", *columns), steps=_block_steps(view))
    frame = frame[(frame["phase"] != "recompute") & (frame["amax"] > 0.0)]
    found: dict[Key, list[Mapping[str, Any]]] = {}
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    for key, row in zip(keys(frame), rows, strict=True):
        found.setdefault(key, []).append(row)
    return found


def _block_steps(view: RunView) -> list[int]:
    """Return a few steps with block histograms, spread over the run; without the first if there are others."""
    low = [f"block{size}_amax_lo" for size in SIZES]
    frame = view.measured((), (KIND,), columns=low)
    recorded: list[int] = np.unique(frame.loc[frame[low].notna().any(axis=1), "step"]).tolist()
    steps = recorded[1:] or recorded
    return steps[:: -max(1, -(-len(steps) // _BLOCK_STEPS))]


def histograms(view: RunView, operand: Operand, size: int) -> list[tuple[BlockHistogram, float]]:
    """Return block histograms of an operand, each with the tensor's amax; empty if none were recorded."""
    rows = _blocks(view).get(operand.key, ())
    read = ((BlockHistogram.of_row(r, size), float(r["amax"])) for r in rows)
    return [(h, amax) for h, amax in read if h is not None and h.amax.total]


def block_damage(view: RunView, operand: Operand, fmt: BlockFormat) -> Damage | None:
    """Cost of the cast in a block format, median over a few steps; None if its blocks were not recorded."""
    each = [predict_blocks(h, fmt, amax=amax) for h, amax in histograms(view, operand, fmt.block[1])]
    # Flushed elements lie below their block's amax by the whole range of the format: they weigh nothing.
    return medians([Damage.of(found, fmt.element, 0.0) for found in each]) if each else None


# -- parts of findings ------------------------------------------------------------------------------------------------


def listed(guilty: Iterable[Operand], figure: str) -> list[dict[str, Any]]:
    """The ``tensors`` entry of a finding's evidence: all operands, which relations compare, with one figure of each."""
    return [{**dict(zip(IDENTITY, o.key, strict=True)), figure: getattr(o, figure)} for o in guilty]


def seen_words(found: Mapping[Key, Operand]) -> str:
    """``12 FP8 operands on 40 steps``."""
    steps = {step for o in found.values() for step in o.casts.step.tolist()}
    return f"{plural(len(found), 'FP8 operand')} on {plural(len(steps), 'step')}"


def current_snippet(fmt: Format) -> str:
    """Lines that scale by the tensor's current amax, by hand."""
    return (
        f"import torch\n\n"
        f"amax = x.abs().amax()\n"
        f"scale = torch.where(amax > 0, {fmt.max!r} / amax, torch.ones_like(amax))\n"
        f"y = (x * scale).clamp(-{fmt.max!r}, {fmt.max!r}).to(torch.{fmt.dtype})\n"
    )


def block_snippet(fmt: BlockFormat) -> str:
    """Lines that scale each block along the last dimension, by hand."""
    largest, size = fmt.element.max, fmt.block[1]
    return (
        f"import torch\n\n"
        f"blocks = x.unflatten(-1, (-1, {size}))\n"
        f"scale = {largest!r} / blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12)\n"
        f"y = (blocks * scale).to(torch.{fmt.element.dtype}).flatten(-2)  # keep `scale`, one per block\n"
    )
