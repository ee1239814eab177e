"""Underflow of gradients: per gradient the elements rounded to zero, the subnormals, and the bits that are left.

:mod:`precdoctor.diagnosis.advice.larger_loss_scale` prescribes the loss scale that mends it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from precdoctor.diagnosis.claims.rule import RuleOption
from precdoctor.diagnosis.survey.harm import bulk_loss, lost_to
from precdoctor.diagnosis.survey.healthy_steps import is_well
from precdoctor.diagnosis.survey.rows import Key, TensorRow, known_format, number
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP16, Format
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.tail import Tail, flushed_tail, magnitude

#: Dtypes of the examined gradients; FP32 weight gradients are also examined where FP16 autocast computed them.
_HALF = ("float16", "bfloat16")
#: In smallest subnormals, chosen empirically: zeros behind a gradient whose largest element is no more were flushed.
_FAINT = 64.0
#: In smallest subnormals: a tensor with no element this small has no tail below the flush limit, half of one.
_NEAR = 4.0
_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "numel", "order"),
    *("nan", "pos_inf", "neg_inf", "zero", "subnormal", "amax", "amin_nonzero", "exp_lo", "exp_hist"),
)

#: Options that all rules on gradients share.
MARGIN_BINADES = RuleOption("margin_binades", 2.0, "binades", "Headroom that a proposed loss scale must leave.",
                            "Gradient amax varies by a factor of 2 to 4 between steps.")  # fmt: skip
MAX_STEPS = RuleOption("max_steps", 64.0, "steps", "Maximum number of examined steps, evenly spread.",
                       "Bounds the work.", 1.0)  # fmt: skip
#: Options of PD303 and PD305, the two rules on subnormal gradients.
SUBNORMAL_SHARE = RuleOption(
    "subnormal_share", 0.25, "fraction", "Subnormals among the non-zero elements of a gradient, median over steps.",
    "Chosen empirically: a Gaussian with a quarter of its elements below 2^-14 has 3e-4 of them below 2^-25.",
    maximum=1.0,
)  # fmt: skip
FAINT_SHARE = RuleOption(
    "faint_share", 0.05, "fraction",
    "Subnormal share of the sum of magnitudes; with less, the weight gradient must also have lost bits.", maximum=1.0,
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
DYING_SHARE = RuleOption(
    "dying_share", 0.04, "fraction", "Flushed share beyond which a following gradient of zeros counts as flushed.",
    "As in PD201.", maximum=1.0,
)  # fmt: skip
#: Options of PD201 and PD202, the two rules on flushed gradients.
FLUSH_OPTIONS = (
    RuleOption("flushed_share", 0.04, "fraction",
               "Flushed elements among the intended non-zero ones, median over steps.",
               "Upper of the bands 0.5 / 2 / 4 % published with NVIDIA BioNeMo; a starting point, not truth.",
               maximum=1.0),
    RuleOption("lost_magnitude", 2.0**-8, "fraction",
               "Share of the sum of magnitudes that flushing must take to be harm without further proof.",
               "Half an ulp of BF16: below it, flushing costs less than rounding to BF16 does.", maximum=1.0),
    RuleOption("error_share", 0.2, "fraction", "Flushed share from which the finding is an error, not a warning.",
               "Chosen empirically: a fifth of the gradient is gone.", maximum=1.0),
    MARGIN_BINADES,
    MAX_STEPS,
)  # fmt: skip


@dataclass
class GradientSeries:
    """One gradient over the examined steps; each list holds one number per step.

    Attributes:
        fmt: format in which it was computed.
        shares: flushed among the intended non-zero elements.
        subnormal: subnormals among the non-zero elements.
        lost: share of the sum of magnitudes that was flushed.
        faint: share of the sum of magnitudes that is subnormal.
        bits: mean significant bits of the intended non-zero elements; FP16 gradients only.
        structural: zeros that the rounding did not make, among all elements.
        worst: process and step with the largest flushed share.
        dead: the gradient is zero throughout there.
    """

    fmt: Format
    shares: list[float] = field(default_factory=list)
    subnormal: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    faint: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    structural: list[float] = field(default_factory=list)
    worst: tuple[Process, int] = (Process(0, 0), 0)
    worst_share: float = -1.0
    dead: bool = False

    @property
    def share(self) -> float:
        """Flushed among the intended non-zero elements, median over steps."""
        return median(self.shares)

    @property
    def lost_share(self) -> float:
        """Flushed share of the sum of magnitudes, median over steps."""
        return median(self.lost)

    @property
    def subnormal_share(self) -> float:
        """Subnormals among the non-zero elements, median over steps."""
        return median(self.subnormal)

    @property
    def mean_bits(self) -> float:
        """Mean significant bits of the intended non-zero elements, median over steps; 0 outside FP16."""
        return median(self.bits) if self.bits else 0.0

    @property
    def faint_share(self) -> float:
        """Subnormal share of the sum of magnitudes, median over steps."""
        return median(self.faint)


@dataclass
class GradientSurvey:
    """All gradients of one kind over the examined steps."""

    tensors: dict[Key, GradientSeries] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    #: Smallest headroom of any half-precision gradient that was finite, in binades.
    headroom: float = math.inf


def examined_steps(view: RunView, limit: int) -> list[int]:
    """At most ``limit`` sampled healthy steps, evenly spread; skipped steps are left out."""
    healthy = sorted(
        {
            facts.step
            for process, steps in view.timeline.items()
            for facts in steps
            if facts.sampled
            and not facts.skipped
            and view.survey.covers([facts.step])
            and is_well(view, process, facts)
        }
    )
    return healthy[:: max(1, math.ceil(len(healthy) / limit))]


def survey(view: RunView, *, max_steps: float, dying_share: float, kind: str = "grad_output") -> GradientSurvey:
    """The gradients of one kind over at most ``max_steps`` healthy steps; computed once per view.

    Args:
        dying_share: flushed share beyond which underflow is to blame for a following gradient of zeros.
        kind: ``grad_output`` or ``weight_grad``.
    """
    name = f"underflow:{kind}:{max_steps:g}:{dying_share:g}"
    return view.remember(name, lambda: _survey(view, int(max_steps), dying_share, kind))


def _survey(view: RunView, max_steps: int, dying_share: float, kind: str) -> GradientSurvey:
    found = GradientSurvey()
    steps = examined_steps(view, max_steps)
    if not steps:
        return found
    dying: dict[tuple[Process, int, str], bool] = {}
    dtypes = _HALF if kind == "grad_output" else (*_HALF, "float32")
    records = view.scan_records(_COLUMNS, (kind,), steps=steps, where=[("dtype", "in", dtypes)])
    for record in sorted(records, key=_execution_order):
        row = TensorRow.of(record)
        fmt = computed_in(view, row)
        if fmt is not None and row.numel and not row.bad and row.phase != "recompute":
            _add(found, row, fmt, dying, dying_share)
    return found


def _execution_order(record: Mapping[str, Any]) -> tuple[int, int, int, float]:
    """A sort key; a tensor of unknown order comes last in its step."""
    order = number(record["order"])
    return record["rank"], record["attempt"], record["step"], math.inf if order is None else order


def computed_in(view: RunView, row: TensorRow) -> Format | None:
    """The format a gradient was rounded to last: its own, or FP16 where autocast widened it afterwards.

    Under FP16 autocast the gradient of an FP32 weight is computed in FP16 and then widened without rounding. All of
    its elements are then multiples of 2^-24; a smaller element proves that FP32 made it.
    """
    if row.dtype != "float32":
        return known_format(row.dtype)
    facts = view.step_facts(Process(row.rank, row.attempt), row.step)
    if facts is None or facts.autocast_dtype != FP16.dtype:
        return None
    return FP16 if row.amin_nonzero is not None and row.amin_nonzero >= FP16.min_subnormal else None


def _add(
    found: GradientSurvey, row: TensorRow, fmt: Format, dying: dict[tuple[Process, int, str], bool], dying_share: float
) -> None:
    process = Process(row.rank, row.attempt)
    where = (process, row.step, row.root)
    tail = tail_of(row, fmt)
    flushed, alive = tail.total, row.numel - row.zero
    cut_off = row.kind == "grad_output" and dying.get(where, False)
    share = flushed / (flushed + alive) if flushed + alive else float(cut_off)
    lost = lost_magnitude(row.histogram, tail) if alive else share
    if alive:
        dying[where] = share >= dying_share or (row.amax or 0.0) <= _FAINT * fmt.min_subnormal
    tensor = found.tensors.setdefault(row.key, GradientSeries(fmt))
    tensor.shares.append(share)
    tensor.lost.append(lost)
    tensor.subnormal.append(row.histogram.at_most(fmt.min_normal).low / alive if alive else 0.0)
    below = row.histogram[: round(math.log2(fmt.min_normal))]
    tensor.faint.append(magnitude(below) / magnitude(row.histogram) if alive else 0.0)
    tensor.structural.append(max(0.0, row.zero - flushed) / row.numel)
    if fmt is FP16 and alive:
        tensor.bits.append(bulk_loss(row.histogram, fmt, flushed).bits)
    found.steps.add(row.step)
    if row.amax:
        found.headroom = min(found.headroom, fmt.headroom(row.amax))
    if share > tensor.worst_share:
        tensor.worst, tensor.worst_share, tensor.dead = (process, row.step), share, alive == 0


def tail_of(row: TensorRow, fmt: Format) -> Tail:
    """The elements below the flush limit, extrapolated; skipped for the usual tensor, which has none near it."""
    near = row.amin_nonzero is not None and row.amin_nonzero <= _NEAR * fmt.min_subnormal
    return flushed_tail(row.histogram, row.zero if near else 0, fmt)


def lost_magnitude(histogram: ExponentHistogram, tail: Tail) -> float:
    """Flushed share of the sum of magnitudes."""
    total = magnitude(histogram) + tail.mass
    return tail.mass / total if total > 0.0 else 0.0


def lost_channels(view: RunView, key: Key, gradient: GradientSeries) -> float:
    """Lower bound of the share of the module's weight gradient that the rounding made zero; 0 if unknown."""
    if gradient.share == 0.0:
        return 0.0
    return lost_to(view, (key[0], key[1]), gradient.share, median(gradient.structural))


def is_harmed(view: RunView, key: Key, gradient: GradientSeries, limits: tuple[float, float]) -> bool:
    """Whether more is flushed than a tail that makes no difference to the layer's weight gradient.

    Args:
        limits: of the flushed share, and of the flushed share of the magnitude.
    """
    if gradient.share < limits[0]:
        return False
    return gradient.lost_share >= limits[1] or lost_channels(view, key, gradient) >= limits[0]


def is_faint(view: RunView, key: Key, gradient: GradientSeries, faint: float, enough_bits: float) -> bool:
    """Whether subnormals of an output gradient matter: by their magnitude, or by the bits a weight gradient lost.

    Args:
        faint: least subnormal share of the sum of magnitudes.
        enough_bits: mean significant bits of the module's weight gradient, below which they matter in any case.
    """
    if gradient.faint_share >= faint:
        return True
    weights = survey(view, max_steps=MAX_STEPS.default, dying_share=DYING_SHARE.default, kind="weight_grad")
    mine = [t for k, t in weights.tensors.items() if k[:2] == key[:2] and t.bits]
    return any(t.mean_bits < enough_bits for t in mine)
