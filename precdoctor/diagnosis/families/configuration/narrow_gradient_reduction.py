"""PD708: gradients reduced over ranks in a format that cannot hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from precdoctor.diagnosis.analyses.gradient_underflow import FLUSH_OPTIONS, MAX_STEPS, examined_steps
from precdoctor.diagnosis.analyses.healthy_steps import is_well
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import (
    Key,
    TensorRow,
    dotted,
    integer,
    known_format,
    location,
    tensor_evidence,
    text,
)
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP16, Format
from precdoctor.numerics.tail import magnitude

PAGE = RulePage(
    finds="""
Gradients that travel between ranks in FP16 or BF16 because of a communication hook (`fp16_compress_hook`,
`bf16_compress_hook`), of FSDP's `reduce_dtype`, or because they are 16-bit themselves. The effect of the reduction is
computed from each rank's own gradients, recorded before it. DistributedDataParallel and its hooks cast, divide by the
number of ranks N and add up, so elements below N times the format's flush limit become zero, and elements above its
largest number become infinities. The finding is a warning if more than `flushed_share` of a gradient's non-zero
elements, with more than `lost_magnitude` of its magnitude, newly become zero, or if it overflows. It is information
from the number of ranks at which a running sum stalls (256 in BF16, 2048 in FP16): the last ranks' share may be rounded
away.
""",
    matters="""
The gradient is right on every rank and wrong after the reduction, where nobody looks. The loss goes on falling, but
more slowly with more ranks, because the gradient is divided by their number before it is sent.
""",
    example="""
    model = DistributedDataParallel(model)
    model.register_comm_hook(None, fp16_compress_hook)  # FP32 gradients of 1e-7, on 64 ranks: zero
""",
    remedy="""
Reduce in BF16, which has FP32's range, or in FP32, at twice the traffic. With FP16, a loss scale keeps gradients up: it
must be larger by the number of ranks.
""",
    confidence="""
0.9: each rank's gradients are recorded before the reduction, and the wrapper's arithmetic is known. 0.75 with fewer
than four recorded steps, or for FSDP, which divides in part before and in part after the sum.
""",
    references=(
        "PyTorch source: torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py (cast, divide, all_reduce)",
        "PyTorch documentation: FSDP MixedPrecision.reduce_dtype",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2 (flush of small gradients)",
    ),
)


@dataclass(frozen=True)
class _Reduction:
    """How the gradients of one root are reduced over ranks; ``hook``: DDP's communication hook, if there is one."""

    wrapper: str
    ranks: int
    hook: str
    #: Dtype of the reduction; None: the dtype of the gradients.
    dtype: str | None

    @property
    def divides_by(self) -> float:
        """Divisor before the sum; under FSDP, by torch's rule, a power of two near the root of the number of ranks."""
        if self.wrapper == "DistributedDataParallel":
            return float(self.ranks)
        factor = 1
        while self.ranks % factor == 0 and self.ranks / factor > factor:
            factor *= 2
        return float(factor)

    def words(self, fmt: Format) -> str:
        return f"{self.hook} ({fmt.dtype})" if self.hook else f"{self.wrapper} in {fmt.dtype}"


#: Most non-finite steps of a process that are examined for an overflow.
_MOST_LOST_STEPS = 4


@dataclass
class _Gradient:
    """A weight's gradient on the examined steps and ranks; ``flushed``, ``lost``: shares that its reduction takes."""

    fmt: Format
    flushed: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    overflows: set[int] = field(default_factory=set)
    last: tuple[Process, int] = (Process(0, 0), 0)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the gradient that loses most, else the reduction over many ranks."""
    reductions = _reductions(view)
    if not reductions:
        return Checked.not_applicable("no gradient is reduced by DistributedDataParallel or FSDP")
    gradients = _survey(view, reductions, options)
    first = next(iter(reductions.values()))
    seen = f"{plural(len(gradients), '16-bit reduction')} over {plural(first.ranks, 'rank')}"
    if not gradients:
        return Checked((), f"gradients are reduced in FP32 over {plural(first.ranks, 'rank')}")
    if guilty := {k: g for k, g in gradients.items() if _loses(g, options) or g.overflows}:
        key = max(guilty, key=lambda k: (bool(guilty[k].overflows), median(guilty[k].flushed)))
        finding = _finding(view, key, guilty, reductions[key[0]], options)
        return Checked([finding], f"{len(guilty):,} of {seen} lose elements")
    key = next(iter(gradients))
    fmt, reduction = gradients[key].fmt, reductions[key[0]]
    if reduction.ranks >= 2 ** (fmt.mantissa_bits + 1):
        return Checked([_many_ranks_finding(fmt, reduction, key)], f"{seen}: a running sum stalls")
    worst = max(median(g.flushed) for g in gradients.values())
    return Checked((), f"{seen}: at most {percent(worst)} flushed")


def _reductions(view: RunView) -> Mapping[str, _Reduction]:
    """Return how each root's gradients are reduced, by name of the root."""
    found = {}
    for process in view.processes:
        for root in view.facts(process).get("roots") or ():
            r = root.get("reduction")
            if isinstance(r, Mapping) and (ranks := integer(r.get("ranks"))):
                dtype = text(r.get("dtype")) or None
                found[text(root.get("name"))] = _Reduction(text(r.get("wrapper")), ranks, text(r.get("hook")), dtype)
    return found


def _survey(view: RunView, reductions: Mapping[str, _Reduction], options: Options) -> dict[Key, _Gradient]:
    """Return the gradients that are reduced in a 16-bit format."""
    examined = examined_steps(view, options["max_steps"])
    healthy = ((process, step) for process in view.processes for step in examined)
    lost = _lost_steps(view)
    found: dict[Key, _Gradient] = {}
    for process, step in (*healthy, *lost):
        rows = view.rows(process, step)
        broken = {r.owner for r in rows if r.kind == "weight_grad_step" and r.bad}
        for row in rows:
            reduction = reductions.get(row.root) if row.kind == "weight_grad" and not row.bad else None
            fmt = known_format((reduction.dtype or row.dtype) if reduction is not None else "")
            if reduction is None or fmt is None or fmt.bits != 16 or not row.histogram.total:
                continue
            overflows = row.owner in broken and (row.amax or 0.0) >= fmt.overflow_limit
            if overflows or (process, step) not in lost:
                gradient = found.setdefault(row.key, _Gradient(fmt))
                gradient.last = (process, step)
                _add_losses(gradient, row, reduction)
    return found


def _lost_steps(view: RunView) -> list[tuple[Process, int]]:
    """Return each process's first sampled steps with a non-finite value that no loss scaler skipped."""
    found = []
    for process, steps in view.timeline.items():
        lost = [f.step for f in steps if f.sampled and not f.skipped and not is_well(view, process, f)]
        found += [(process, step) for step in lost[:_MOST_LOST_STEPS]]
    return found


def _add_losses(gradient: _Gradient, row: TensorRow, reduction: _Reduction) -> None:
    """Add to ``gradient`` what this rank's part of the sum loses by the cast and the division."""
    limit = math.floor(math.log2(gradient.fmt.flush_limit * reduction.divides_by))
    below = row.histogram[:limit]  # magnitudes up to 2^limit
    flushed = below.total
    if reduction.dtype is None:  # the gradient is in this format already, so no cast flushes anything
        flushed -= row.histogram[: math.floor(math.log2(gradient.fmt.flush_limit))].total
    gradient.flushed.append(flushed / row.histogram.total)
    gradient.lost.append(magnitude(below) / magnitude(row.histogram))
    if row.amax is not None and row.amax >= gradient.fmt.overflow_limit:
        gradient.overflows.add(row.step)


def _loses(gradient: _Gradient, options: Options) -> bool:
    """Return whether the reduction flushes too many elements, with too much of the magnitude."""
    return median(gradient.flushed) > options["flushed_share"] and median(gradient.lost) > options["lost_magnitude"]


def _finding(
    view: RunView, key: Key, guilty: Mapping[Key, _Gradient], reduction: _Reduction, options: Options
) -> Finding:
    gradient = guilty[key]
    process, step = gradient.last
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    share, steps = median(gradient.flushed), len(gradient.flushed)
    name, how = row.parameter, reduction.words(gradient.fmt)
    after = next((r for r in rows if r.kind == "weight_grad_step" and r.owner == row.owner), None)
    message = (
        f"Over {plural(reduction.ranks, 'rank')} gradients are reduced by {how}, after a division by "
        f"{reduction.divides_by:g}. "
    )
    if gradient.overflows:
        reach = f" ({row.amax:.3g} at step {step})" if row.amax is not None else ""
        message += (
            f"On {plural(len(gradient.overflows), 'step')} the largest element of the gradient of `{name}`{reach} is "
            f"beyond {gradient.fmt.max:g} (limit of {gradient.fmt.dtype}): the optimizer gets infinities or NaN. "
        )
    if not gradient.overflows or _loses(gradient, options):
        message += (
            f"In the gradient of `{name}` {percent(share)} of the non-zero elements become zero, in the median of "
            f"{plural(steps, 'recorded gradient')} (limit {percent(options['flushed_share'])})."
        )
        if after is not None and not after.bad:
            message += (
                f" At step {step} {percent(row.zero / row.numel)} of it is zero before the reduction, and "
                f"{percent(after.zero / after.numel)} in the gradient that the optimizer gets."
            )
    sharded = reduction.wrapper != "DistributedDataParallel"
    return RULE.finding(
        confidence=0.75 if sharded or steps < 4 else 0.9,
        title=_title(name, gradient, reduction, share),
        message=f"{message.rstrip()} {plural(len(guilty), 'gradient')} affected.",
        location=location(row, Phase.BACKWARD, process, step),
        evidence={
            "flushed_share": share,
            "limit": options["flushed_share"],
            "lost_magnitude": median(gradient.lost),
            "overflow_steps": len(gradient.overflows),
            "first_overflow_step": min(gradient.overflows, default=None),
            "ranks": reduction.ranks,
            "reduced_by": how,
            "zero_before": row.zero / row.numel,
            "zero_after": after.zero / after.numel if after is not None else None,
            "tensors": [dotted(k[1], k[3]) for k in list(guilty)[:16]],
            **tensor_evidence(row),
            "confidence_reason": "FSDP splits the division before and after the sum"
            if sharded
            else "each rank's gradient was recorded before the reduction",
        },
        prescription=_prescribe(gradient, reduction, share),
    )


def _title(name: str, gradient: _Gradient, reduction: _Reduction, share: float) -> str:
    how = reduction.words(gradient.fmt)
    if gradient.overflows:
        return f"the gradient of `{name}` overflows in its reduction by {how} over {plural(reduction.ranks, 'rank')}"
    return f"{percent(share)} of the gradient of `{name}` becomes zero in its reduction by {how}"


def _prescribe(gradient: _Gradient, reduction: _Reduction, share: float) -> Prescription:
    to = "bfloat16" if gradient.fmt is FP16 else "float32"
    lost = f"flushed {percent(share)} -> 0 %"
    lost = f"overflowing steps {len(gradient.overflows)} -> 0" if gradient.overflows else lost
    return Prescription(
        title=f"reduce gradients in {to}: {lost}"
        + (" at the same traffic" if to == "bfloat16" else " at twice the traffic"),
        change={"reduction_dtype": {"from": gradient.fmt.dtype, "to": to}},
        predicted={
            "flushed_share": {"from": share, "to": 0.0},
            "overflow_steps": {"from": len(gradient.overflows), "to": 0},
        },
        snippet=_snippet(reduction, to),
    )


def _snippet(reduction: _Reduction, to: str) -> str:
    if reduction.wrapper != "DistributedDataParallel":
        return (
            "import torch\nfrom torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n\n"
            f"fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{to}))\n"
        )
    if to == "float32":
        return "model = DistributedDataParallel(model)  # FP32 weights, no communication hook\n"
    return (
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook\n\n"
        "model.register_comm_hook(None, bf16_compress_hook)  # in place of fp16_compress_hook\n"
    )


def _many_ranks_finding(fmt: Format, reduction: _Reduction, key: Key) -> Finding:
    """Return the finding about so many ranks that a running sum over them stalls."""
    limit = 2 ** (fmt.mantissa_bits + 1)
    how = reduction.words(fmt)
    return RULE.finding(
        severity=Severity.INFO,
        confidence=0.6,
        title=f"gradients of {reduction.ranks:,} ranks are added up by {how}",
        message=f"{reduction.ranks:,} gradients are added up by {how}, with {fmt.mantissa_bits + 1} significant bits. "
        f"A running sum of like terms stalls at {limit:,} of them (limit {limit:,}): added one rank after the other, "
        "the last ranks' gradients are rounded away; added up as a tree, each of them loses up to "
        f"{math.ceil(math.log2(reduction.ranks))} half ulps.",
        location=Location(root=key[0], kind="weight_grad", phase=Phase.BACKWARD),
        evidence={
            "ranks": reduction.ranks,
            "limit": limit,
            "reduced_by": how,
            "confidence_reason": "the order in which the library adds ranks up is not known",
        },
        prescription=Prescription(
            title=f"reduce gradients in FP32: relative error of the sum up to {reduction.ranks * 0.5 / limit:.2g}"
            f" -> {reduction.ranks * 2.0**-24:.1g}, at twice the traffic",
            change={"reduction_dtype": {"from": fmt.dtype, "to": "float32"}},
            predicted={"relative_error": {"from": reduction.ranks / (2.0 * limit), "to": reduction.ranks * 2.0**-24}},
            snippet=_snippet(reduction, "float32"),
        ),
    )


def _overflowed_before(cause: Finding, effect: Finding) -> bool:
    """Return whether the reduction had overflowed when the optimizer was given a gradient that was not finite."""
    first, step = cause.evidence.get("first_overflow_step"), effect.location.step
    is_received = effect.code != "PD102" or effect.location.kind == "weight_grad_step"
    return is_received and first is not None and step is not None and step >= int(first)


RULE = Rule(
    code="PD708",
    name="narrow-gradient-reduction",
    severity=Severity.WARNING,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=(*FLUSH_OPTIONS[:2], MAX_STEPS),
    explains=when(_overflowed_before, "PD102", "PD105"),
    check=check,
    newer_half=True,
)  # fmt: skip
