"""Underflow of gradients: for each gradient the flushed share, the subnormal share, and the significant bits left.

:mod:`precdoctor.diagnosis.advice.larger_loss_scale` prescribes the loss scale that lifts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.harm import kept_bits, lost_to
from precdoctor.diagnosis.analyses.healthy_steps import healthy_sampled_steps
from precdoctor.diagnosis.claims.rule import RuleOption, fraction
from precdoctor.diagnosis.survey.arrow_rows import records
from precdoctor.diagnosis.survey.frames import AT, Mask, at, firsts, groups, histograms, keys, on_steps, worst_rows
from precdoctor.diagnosis.survey.measures import Floats, column, share
from precdoctor.diagnosis.survey.rows import Key, TensorRow, known_format
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView, remembered
from precdoctor.numerics.formats import BF16, FP16, Format
from precdoctor.numerics.tail import Tail, flushed_tail, flushed_tails, magnitudes

#: Dtypes of the examined gradients; FP32 weight gradients are also examined where FP16 autocast computed them.
_HALF = ("float16", "bfloat16")
#: The format of a gradient by its column ``fp16``.
_FORMATS = {True: FP16, False: BF16}
#: If a gradient's amax is at most this many smallest subnormals, a following gradient of zeros was flushed. Empirical.
_FAINT = 64.0
#: If a tensor's smallest element is more than this many smallest subnormals, no part of it is below the flush limit.
_NEAR = 4.0
_COLUMNS = ("phase", "dtype", "order", "amax", "amin_nonzero", "exp_lo", "exp_hist")

#: Options that all rules on gradients share.
MARGIN_BINADES = RuleOption("margin_binades", 2.0, "binades", "Headroom that a proposed loss scale must leave.",
                            "Gradient amax varies by a factor of 2 to 4 between steps.")  # fmt: skip
MAX_STEPS = RuleOption("max_steps", 64.0, "steps", "Maximum number of examined steps, evenly spread.",
                       "Bounds the work.", 1.0)  # fmt: skip
#: Options of PD303 and PD305, the two rules on subnormal gradients.
SUBNORMAL_SHARE = fraction(
    "subnormal_share", 0.25, "Subnormals among the non-zero elements of a gradient, median over steps.",
    "Chosen empirically: a Gaussian with a quarter of its elements below 2^-14 has 3e-4 of them below 2^-25."
)  # fmt: skip
FAINT_SHARE = fraction(
    "faint_share", 0.05,
    "Subnormal share of the sum of magnitudes; with less, the weight gradient must also have lost bits.",
)  # fmt: skip
FINE_BITS = RuleOption(
    "fine_bits", 8.0, "significant bits", "A gradient that keeps this many on average is not reported.",
    "BF16 has 8 significant bits, and training in it needs no loss scale.", maximum=11.0,
)  # fmt: skip
ENOUGH_BITS = RuleOption(
    "enough_bits", 6.0, "significant bits", "Below this average in the worst gradient the finding is a warning.",
    "Two fewer than BF16 has: a rounding error four times BF16's. Chosen empirically; no published source.",
    maximum=11.0,
)  # fmt: skip
DYING_SHARE = fraction(
    "dying_share", 0.04, "Flushed share beyond which a following gradient of zeros counts as flushed.",
    "As in PD201."
)  # fmt: skip
#: Options of PD201 and PD202, the two rules on flushed gradients.
FLUSH_OPTIONS = (
    fraction("flushed_share", 0.04, "Flushed elements among the intended non-zero ones, median over steps.",
             "Upper of the bands 0.5 / 2 / 4 % published with NVIDIA BioNeMo; a starting point, not truth."),
    fraction("lost_magnitude", 2.0**-8,
             "Share of the sum of magnitudes that flushing must take to be harm without further proof.",
             "Half an ulp of BF16: below it, flushing costs less than rounding to BF16 does."),
    fraction("error_share", 0.2, "Flushed share from which the finding is an error, not a warning.",
             "Chosen empirically: a fifth of the gradient is gone."),
    MARGIN_BINADES,
    MAX_STEPS,
)  # fmt: skip


@dataclass(frozen=True)
class GradientSeries:
    """One gradient over the examined steps; shares and bits are medians over them.

    Attributes:
        fmt: format in which the gradient was computed.
        steps: number of rows: one per step and process.
        share: flushed share of the elements that would be non-zero without rounding ("intended").
        lost_share: share of the sum of magnitudes that was flushed.
        subnormal_share: share of subnormals among the non-zero elements.
        faint_share: share of the sum of magnitudes that subnormals make up.
        structural: share of all elements that are zero for another reason than rounding.
        bits: mean significant bits of the intended elements; NaN outside FP16, and for a gradient that is always zero.
        worst: process and step with the largest flushed share.
        dead: whether the gradient is zero throughout on the ``worst`` step.
    """

    fmt: Format
    steps: int
    share: float
    lost_share: float
    subnormal_share: float
    faint_share: float
    structural: float
    bits: float
    worst: tuple[Process, int]
    dead: bool

    @property
    def mean_bits(self) -> float:
        """``bits``, or 0 if that is NaN."""
        return 0.0 if math.isnan(self.bits) else self.bits


@dataclass(frozen=True)
class GradientSurvey:
    """All gradients of one kind over the examined steps."""

    tensors: dict[Key, GradientSeries] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    #: Smallest headroom of any finite FP16 or BF16 gradient, in binades; infinity without one.
    headroom: float = math.inf
    #: The same for each process and step.
    headrooms: dict[tuple[Process, int], float] = field(default_factory=dict)


def examined_steps(view: RunView, limit: float) -> list[int]:
    """Return at most ``limit`` sampled healthy steps, evenly spread; skipped steps are left out."""
    healthy = sorted({facts.step for facts in healthy_sampled_steps(view) if not facts.skipped})
    return healthy[:: max(1, math.ceil(len(healthy) / limit))]


@remembered
def survey(view: RunView, *, max_steps: float, dying_share: float, kind: str = "grad_output") -> GradientSurvey:
    """Measure the gradients of one kind over at most ``max_steps`` healthy steps.

    Args:
        dying_share: flushed share of a gradient from which the next one in the backward pass, if all zero, counts as
            flushed.
        kind: ``grad_output`` or ``weight_grad``.
    """
    steps = examined_steps(view, max_steps)
    dtypes = _HALF if kind == "grad_output" else (*_HALF, "float32")
    where = [("dtype", "in", dtypes)]
    rows = view.measured(("alive", "non_finite"), (kind,), columns=_COLUMNS, steps=steps, where=where)
    rows = rows[(rows["non_finite"] == 0) & (rows["numel"] > 0) & (rows["phase"] != "recompute")]
    fp16 = (rows["dtype"] == FP16.dtype) | _is_widened(view, rows)
    rows = rows.assign(fp16=fp16)[fp16 | (rows["dtype"] != "float32")]
    rows = rows.iloc[np.lexsort((column(rows, "order"), *(rows[c] for c in ("step", "attempt", "rank"))))]
    if rows.empty:
        return GradientSurvey()
    rounded = pd.concat([_with_rounding_loss(rows[rows["fp16"] == is_fp16], fmt) for is_fp16, fmt in _FORMATS.items()])
    rows = rounded.loc[rows.index]
    rows = rows.assign(**_shares(rows, dying_share, kind))
    headrooms = _headrooms(rows)
    headroom = min(headrooms.values(), default=math.inf)
    return GradientSurvey(_series(rows), set(rows["step"].unique().tolist()), headroom, headrooms)


def _headrooms(rows: pd.DataFrame) -> dict[tuple[Process, int], float]:
    """Return the smallest headroom of each process and step, in binades; those with zeros only are left out."""
    headrooms: dict[tuple[Process, int], float] = {}
    for is_fp16, fmt in _FORMATS.items():
        own = rows[(rows["fp16"] == is_fp16) & (rows["amax"] > 0.0)]
        largest = own.iloc[worst_rows(groups(own, AT), own["amax"])]
        for place, amax in zip(at(largest), largest["amax"], strict=True):
            headrooms[place] = min(headrooms.get(place, math.inf), fmt.headroom(amax))
    return headrooms


def _is_widened(view: RunView, rows: pd.DataFrame) -> Mask:
    """Mask of the rows of FP32 gradients that FP16 autocast computed; see :func:`computed_in`."""
    under = {
        (process, s.step) for process, steps in view.timeline.items() for s in steps if s.autocast_dtype == FP16.dtype
    }
    multiples = column(rows, "amin_nonzero") >= FP16.min_subnormal
    wide: Mask = (rows["dtype"] == "float32").to_numpy() & multiples
    return wide & on_steps(rows, under) if under else np.zeros_like(wide)


def _with_rounding_loss(rows: pd.DataFrame, fmt: Format) -> pd.DataFrame:
    """Add columns that measure the loss by rounding to ``fmt``.

    Number of elements: ``flushed``, ``subnormal``. Sum of magnitudes: ``lost`` (flushed), ``kept`` (not flushed),
    ``faint`` (subnormal). Mean bits of an intended element: ``bits``. ``faded``: whether amax is near the subnormals.
    """
    found = histograms(rows)
    near = column(rows, "amin_nonzero") <= _NEAR * fmt.min_subnormal
    tails = flushed_tails(found, np.where(near, rows["zero"], 0), fmt)
    normal, total = found.bins >= round(math.log2(fmt.min_normal)), magnitudes(found)
    middles = 1.5 * np.exp2(found.bins.astype(np.float64))
    return rows.assign(
        flushed=tails.total,
        lost=tails.mass,
        kept=total,
        subnormal=found.at_most(np.full(len(rows), fmt.min_normal))[0],
        faint=found.sums(np.where(normal, 0.0, middles)),
        bits=share(found.sums(kept_bits(found.bins, fmt)), tails.total + found.total) if fmt is FP16 else np.nan,
        faded=column(rows, "amax") <= _FAINT * fmt.min_subnormal,
    )


def _shares(rows: pd.DataFrame, dying_share: float, kind: str) -> dict[str, Floats]:
    """Return the shares of :class:`GradientSeries` for each row; the rows are in execution order.

    An output gradient of zeros counts as flushed if at least ``dying_share`` of the last non-zero one before it was
    flushed, or if that one was faded.
    """
    flushed, alive = column(rows, "flushed"), column(rows, "alive")
    own = share(flushed, flushed + alive)
    known = pd.Series(np.where(alive > 0.0, (own >= dying_share) | rows["faded"], np.nan))
    step = groups(rows, (*AT, "root"))
    before = known.groupby(step).ffill().groupby(step).shift().to_numpy()
    cut_off = (before == 1.0) & (kind == "grad_output")
    shares = np.where(alive > 0.0, own, cut_off)
    lost, kept = column(rows, "lost"), column(rows, "kept")
    return {
        "share": shares,
        "lost_share": np.where(alive > 0.0, np.nan_to_num(share(lost, kept + lost)), shares),
        "subnormal_share": np.nan_to_num(share(column(rows, "subnormal"), alive)),
        "faint_share": np.nan_to_num(share(column(rows, "faint"), kept)),
        "structural": np.maximum(column(rows, "zero") - flushed, 0.0) / column(rows, "numel"),
        "bits": np.where(alive > 0.0, column(rows, "bits"), np.nan),
    }


def _series(rows: pd.DataFrame) -> dict[Key, GradientSeries]:
    ids = groups(rows, IDENTITY)
    names = ["share", "lost_share", "subnormal_share", "faint_share", "structural", "bits"]
    medians = records(rows[names].groupby(ids).median())
    first, worst = rows.iloc[firsts(ids)], rows.iloc[worst_rows(ids, rows["share"])]
    dead = (worst["alive"] == 0.0).tolist()
    named = zip(keys(first), first["fp16"], np.bincount(ids).tolist(), at(worst), dead, medians, strict=True)
    return {
        key: GradientSeries(_FORMATS[fp16], steps, worst=of, dead=gone, **shares)
        for key, fp16, steps, of, gone, shares in named
    }


def computed_in(view: RunView, row: TensorRow) -> Format | None:
    """Return the format in which a gradient was computed: its own, or FP16 if FP16 autocast widened it later.

    None for other FP32 gradients and for dtypes that are no floating-point format.

    Under FP16 autocast the gradient of an FP32 weight is computed in FP16 and then widened without rounding. All of
    its elements are then multiples of 2^-24; a smaller element proves that FP32 made it.
    """
    if row.dtype != "float32":
        return known_format(row.dtype)
    facts = view.step_facts(Process(row.rank, row.attempt), row.step)
    if facts is None or facts.autocast_dtype != FP16.dtype:
        return None
    return FP16 if row.amin_nonzero is not None and row.amin_nonzero >= FP16.min_subnormal else None


def tail_of(row: TensorRow, fmt: Format) -> Tail:
    """Estimate the elements below the flush limit of ``fmt``; only for tensors with elements near it, to save work."""
    near = row.amin_nonzero is not None and row.amin_nonzero <= _NEAR * fmt.min_subnormal
    return flushed_tail(row.histogram, row.zero if near else 0, fmt)


def flush_confidence(row: TensorRow, steps: int) -> tuple[float, str]:
    """Return the confidence that rounding flushed elements of a gradient on ``steps`` steps, and the reason for it."""
    if row.numel - row.zero < 1000:
        return 0.6, "fewer than 1,000 elements survive"
    if steps < 4:
        return 0.7, "fewer than four steps were sampled"
    return 0.9, "the zeros continue the distribution of the survivors at the flush limit"


def lost_channels(view: RunView, key: Key, gradient: GradientSeries) -> float:
    """Return a lower bound of the share of the module's weight gradient that rounding made zero; 0 if unknown."""
    return lost_to(view, (key[0], key[1]), gradient.share, gradient.structural)


def is_harmed(view: RunView, key: Key, gradient: GradientSeries, limits: tuple[float, float]) -> bool:
    """Return whether flushing does harm: it takes much of the magnitude, or leaves zeros in the weight gradient.

    ``limits`` are the least flushed share, and the least flushed share of the magnitude.
    """
    if gradient.share < limits[0]:
        return False
    return gradient.lost_share >= limits[1] or lost_channels(view, key, gradient) >= limits[0]


def is_faint(view: RunView, key: Key, gradient: GradientSeries, faint: float, enough_bits: float) -> bool:
    """Return whether subnormals of an output gradient do harm: by their magnitude, or by the weight gradient's bits.

    Args:
        faint: subnormal share of the sum of magnitudes from which they do.
        enough_bits: mean significant bits of the module's weight gradient below which they do in any case.
    """
    if gradient.faint_share >= faint:
        return True
    weights = survey(view, max_steps=MAX_STEPS.default, dying_share=DYING_SHARE.default, kind="weight_grad")
    return any(t.bits < enough_bits for k, t in weights.tensors.items() if k[:2] == key[:2])
