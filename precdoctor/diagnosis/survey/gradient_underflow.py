"""How many elements of which gradients were rounded to zero, and which loss scale would have kept them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.rule import RuleOption
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.harm import bulk_loss, lost_to
from precdoctor.diagnosis.survey.healthy_steps import is_well
from precdoctor.diagnosis.survey.rows import Key, TensorRow, known_format, number
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP16, Format
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.tail import Tail, flushed_tail, magnitude

#: Dtypes whose gradients are looked at; FP32 weight gradients are, too, where FP16 autocast made them.
_HALF = ("float16", "bfloat16")
#: In smallest subnormals: what follows a gradient whose largest element is no more and is zero throughout was flushed.
_FAINT = 64.0
_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "numel", "order"),
    *("nan", "pos_inf", "neg_inf", "zero", "subnormal", "amax", "amin_nonzero", "exp_lo", "exp_hist"),
)

#: Options that the rules on gradients share.
MARGIN_BINADES = RuleOption(
    "margin_binades",
    2.0,
    "binades",
    "Kept free below overflow when a loss scale is proposed.",
    "Gradient amax varies by a factor of 2 to 4 between steps.",
)
MAX_STEPS = RuleOption(
    "max_steps", 64.0, "steps", "Sampled steps that are looked at, evenly spread.", "Bounds the work.", 1.0
)
#: Those of the two rules on subnormal gradients.
FINE_BITS = RuleOption(
    "fine_bits",
    8.0,
    "significant bits",
    "With so many on average nothing is said: a gradient in BF16 has no more.",
    "BF16 has 8 significant bits, and training in it needs no loss scale.",
    maximum=11.0,
)
ENOUGH_BITS = RuleOption(
    "enough_bits",
    6.0,
    "significant bits",
    "Kept on average in the worst gradient; with fewer the finding is a warning, before that information.",
    "Two fewer than BF16 has: a rounding error four times BF16's. Chosen empirically; no published source.",
    maximum=11.0,
)
#: Those of the two rules on flushed gradients.
FLUSH_OPTIONS = (
    RuleOption(
        "flushed_share",
        0.04,
        "fraction",
        "Flushed elements among the intended non-zero ones, median over steps.",
        "Upper of the bands 0.5 / 2 / 4 % published with NVIDIA BioNeMo; a starting point, not truth.",
        maximum=1.0,
    ),
    RuleOption(
        "lost_magnitude",
        2.0**-8,
        "fraction",
        "Share of the sum of magnitudes lost with them, from which on it is harm without further proof.",
        "Half an ulp of BF16: below it, flushing costs less than rounding to BF16 does.",
        maximum=1.0,
    ),
    RuleOption(
        "error_share",
        0.2,
        "fraction",
        "From this flushed share on the finding is an error, below a warning.",
        "Precdoctor's own: a fifth of the gradient gone is no longer a matter of taste.",
        maximum=1.0,
    ),
    MARGIN_BINADES,
    MAX_STEPS,
)


@dataclass
class GradientSeries:
    """One gradient over the steps that were looked at; ``fmt`` is the format it was computed in."""

    fmt: Format
    shares: list[float] = field(default_factory=list)
    #: Per step the subnormals among the non-zero elements.
    subnormal: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    #: Per step the share of the sum of magnitudes that is subnormal.
    faint: list[float] = field(default_factory=list)
    #: Per step the significant bits that the elements meant to be non-zero keep on average; of FP16 gradients only.
    bits: list[float] = field(default_factory=list)
    #: Per step the zeros that the rounding did not make, among all elements.
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
        """Share of the sum of magnitudes that went with them, median over steps."""
        return median(self.lost)

    @property
    def subnormal_share(self) -> float:
        """Subnormals among the non-zero elements, median over steps."""
        return median(self.subnormal)

    @property
    def mean_bits(self) -> float:
        """Significant bits of the elements meant to be non-zero, on average; median over steps, FP16 only."""
        return median(self.bits) if self.bits else 0.0

    @property
    def faint_share(self) -> float:
        """Share of the sum of magnitudes that is subnormal, median over steps."""
        return median(self.faint)


@dataclass
class Survey:
    """What one pass over the gradients found out."""

    tensors: dict[Key, GradientSeries] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    #: Smallest headroom of any half-precision gradient that was finite, in binades.
    headroom: float = math.inf


def examined_steps(view: RunView, limit: int) -> list[int]:
    """At most ``limit`` sampled steps, evenly spread, those that were skipped or went wrong left out."""
    healthy = sorted(
        {
            facts.step
            for process, steps in view.timeline.items()
            for facts in steps
            if facts.sampled and not facts.skipped and is_well(view, process, facts)
        }
    )
    return healthy[:: max(1, math.ceil(len(healthy) / limit))]


def survey(view: RunView, *, max_steps: float, dying_share: float, kind: str = "grad_output") -> Survey:
    """The gradients of one kind over at most ``max_steps`` healthy steps; computed once per view.

    Args:
        dying_share: from this flushed share on a gradient that vanishes after it was cut off by underflow.
        kind: ``grad_output`` or ``weight_grad``.
    """
    name = f"underflow:{kind}:{max_steps:g}:{dying_share:g}"
    return view.remember(name, lambda: _survey(view, int(max_steps), dying_share, kind))


def _survey(view: RunView, max_steps: int, dying_share: float, kind: str) -> Survey:
    found = Survey()
    steps = examined_steps(view, max_steps)
    if not steps:
        return found
    dying: dict[tuple[Process, int, str], bool] = {}
    dtypes = _HALF if kind == "grad_output" else (*_HALF, "float32")
    for record in sorted(
        view.scan_records(_COLUMNS, (kind,), steps=steps, where=[("dtype", "in", dtypes)]), key=_place
    ):
        row = TensorRow.of(record)
        fmt = computed_in(view, row)
        if fmt is not None and row.numel and not row.bad and row.phase != "recompute":
            _take(found, row, fmt, dying, dying_share)
    return found


def _place(record: Mapping[str, Any]) -> tuple[int, int, int, float]:
    """Execution order; what has none comes last."""
    order = number(record["order"])
    return record["rank"], record["attempt"], record["step"], math.inf if order is None else order


def computed_in(view: RunView, row: TensorRow) -> Format | None:
    """The format a gradient was rounded to last: its own, or FP16 where autocast widened it afterwards.

    Under FP16 autocast the gradient of an FP32 weight is computed in FP16 and widened without another rounding, so all
    of its elements are multiples of 2^-24; one that is smaller proves that FP32 made it.
    """
    if row.dtype != "float32":
        return known_format(row.dtype)
    facts = view.step_facts(Process(row.rank, row.attempt), row.step)
    if facts is None or facts.autocast_dtype != FP16.dtype:
        return None
    return FP16 if row.amin_nonzero is not None and row.amin_nonzero >= FP16.min_subnormal else None


def _take(
    found: Survey, row: TensorRow, fmt: Format, dying: dict[tuple[Process, int, str], bool], dying_share: float
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
    """The extrapolation, skipped for the usual tensor: nothing survives near the flush limit."""
    near = row.amin_nonzero is not None and row.amin_nonzero <= 4.0 * fmt.min_subnormal
    return flushed_tail(row.histogram, row.zero if near else 0, fmt)


def lost_magnitude(histogram: ExponentHistogram, tail: Tail) -> float:
    """Magnitude of what was flushed over that of what was meant."""
    total = magnitude(histogram) + tail.mass
    return tail.mass / total if total > 0.0 else 0.0


def subnormal_share(row: TensorRow, binades: int) -> float:
    """FP16 subnormals among the non-zero elements, were the loss multiplied by ``2**binades``; exact."""
    return row.histogram.at_most(FP16.min_normal / 2.0**binades).low / max(1, row.histogram.total)


def out_of_subnormals(row: TensorRow, room: float, *, target: float) -> tuple[int, float]:
    """The fewest binades, within ``room``, that leave ``target`` of ``row`` subnormal; and the share they leave."""
    most = max(1, math.floor(room))
    chosen = next((k for k in range(1, most + 1) if subnormal_share(row, k) <= target), most)
    return chosen, subnormal_share(row, chosen)


def lost_channels(view: RunView, key: Key, gradient: GradientSeries) -> float:
    """Share of the weight gradient behind an output gradient that the rounding made zero, at least; 0 if not known."""
    if gradient.share == 0.0:
        return 0.0
    return lost_to(view, (key[0], key[1]), gradient.share, median(gradient.structural))


def is_harmed(view: RunView, key: Key, gradient: GradientSeries, limits: tuple[float, float]) -> bool:
    """Whether more is flushed than a tail that the layer's weight gradient does not miss.

    Args:
        limits: of the flushed share, and of the share of the magnitude.
    """
    if gradient.share < limits[0]:
        return False
    return gradient.lost_share >= limits[1] or lost_channels(view, key, gradient) >= limits[0]


def is_faint(view: RunView, key: Key, gradient: GradientSeries, faint: float, enough_bits: float) -> bool:
    """Whether subnormals of an output gradient matter: they hold some of its magnitude, or of a weight's bits.

    Args:
        faint: share of the sum of magnitudes that must be subnormal.
        enough_bits: with fewer in the gradient of the module's weight they matter all the same.
    """
    if gradient.faint_share >= faint:
        return True
    dying = FLUSH_OPTIONS[0].default
    weights = survey(view, max_steps=MAX_STEPS.default, dying_share=dying, kind="weight_grad")
    mine = [t for k, t in weights.tensors.items() if k[:2] == key[:2] and t.bits]
    return any(t.mean_bits < enough_bits for t in mine)


@dataclass(frozen=True)
class Plan:
    """A power of two to multiply the loss with, and what the histograms say it would do."""

    binades: int
    before: float
    after: float
    headroom: float


def plan(view: RunView, found: Survey, guilty: Mapping[Key, GradientSeries], *, target: float, margin: float) -> Plan:
    """The smallest power of two that brings the worst tensor to ``target``, if the headroom allows it.

    Args:
        target: flushed share to reach.
        margin: binades that stay free below overflow.
    """
    most = max(0, math.floor(found.headroom - margin))
    rows = list(_worst_rows(view, guilty))
    before = _worst_share(rows, 0) if rows else 1.0
    chosen = next((k for k in range(1, most + 1) if _worst_share(rows, k) <= target), most) if rows else most
    return Plan(chosen, before, _worst_share(rows, chosen), found.headroom - chosen)


def _worst_rows(view: RunView, guilty: Mapping[Key, GradientSeries]) -> Iterable[tuple[TensorRow, Format]]:
    for key, tensor in sorted(guilty.items(), key=lambda item: -item[1].share)[:16]:
        row = next((r for r in view.rows(*tensor.worst) if r.key == key), None)
        if row is not None and not tensor.dead:
            yield row, tensor.fmt


def _worst_share(rows: Sequence[tuple[TensorRow, Format]], binades: int) -> float:
    """The largest flushed share among ``rows`` were the loss multiplied by ``2**binades``."""
    worst = 0.0
    for row, fmt in rows:
        tail = tail_of(row, fmt)
        intended = tail.total + row.numel - row.zero
        worst = max(worst, tail.still_flushed(fmt, 2.0**binades) / intended if intended else 0.0)
    return worst


def prescribe(view: RunView, fmt: Format, current: float, plan: Plan) -> Prescription:
    """The loss scale of the plan; BF16 where there is no room for one."""
    if plan.binades == 0:
        return Prescription(
            title=f"use BF16 autocast: FP16 leaves {plan.headroom:.1f} binades for a larger loss scale, too few",
            change={"autocast_dtype": {"from": fmt.dtype, "to": "bfloat16"}},
            predicted={"flushed_share": {"from": plan.before, "to": 0.0}},
            snippet=snippets.bfloat16_autocast(view.device),
        )
    scale = 2.0 ** (round(math.log2(current)) + plan.binades)
    exponent = round(math.log2(scale))
    return Prescription(
        title=f"loss scale 2^{exponent}: flushed {percent(plan.before)} -> {percent(plan.after)}",
        change={"loss_scale": {"from": current, "to": scale}},
        predicted={
            "flushed_share": {"from": plan.before, "to": plan.after},
            "overflow": 0,
            "headroom_binades": round(plan.headroom, 1),
        },
        snippet=snippets.grad_scaler(view.device, scale),
    )
