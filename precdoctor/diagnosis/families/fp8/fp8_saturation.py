"""PD401: FP8 tensors with too many elements at the format's maximum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import same_module, same_tensors, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import (
    LOST_DB,
    MIN_ELEMENTS,
    current_snippet,
    listed,
    rescaled,
    seen_words,
)
from precdoctor.diagnosis.survey.frames import at, firsts, groups, keys, rows_of, worst_rows
from precdoctor.diagnosis.survey.measures import Floats
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, Key, TensorRow, location, tensor_evidence
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView
from precdoctor.numerics.formats import FORMATS, format_of_dtype

PAGE = RulePage(
    finds="""
Tensors in a float8 dtype with a large share of elements exactly at the format's maximum (448 in E4M3FN, 57344 in E5M2).
Where the log holds the exact count of clipped elements (`saturated`, from a recorded cast), that count is judged
instead, against its own, stricter limit. For FP8 operands (`fp8_operand`) clipping must also cost `lost_db` of signal
to noise on the step of median clipping: under delayed scaling, weights that grow a few percent a step are always
clipped by as much, and lose nothing. One element at the maximum per scaled block is healthy, because amax scaling puts
it there; the default limit is therefore above 1/128.
""",
    matters="""
E4M3FN has no infinity: a cast of too large a value saturates silently, the largest activations all become equal, and
nothing is ever NaN. The scale is too large for the data, usually because it is missing, or stale (PD404).
""",
    example="""
    x.to(torch.float8_e4m3fn)                 # no scale: everything above 464 becomes 448
    scale = 448.0 / x.abs().amax()
    (x * scale).to(torch.float8_e4m3fn)       # fits
""",
    remedy="""
Compute the scale from the current amax (current scaling), or shorten the amax history and add a margin (delayed
scaling). The finding states by how many binades the scale must come down.
""",
    confidence="""
0.95 from exact counts of clipped elements, 0.8 from elements at the maximum with a limit above one per 128-element
block, 0.6 below 4,096 elements.
""",
    references=(
        "OCP 8-bit Floating Point Specification (OFP8) revision 1.0",
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433",
        "Transformer Engine documentation: delayed scaling, amax history, margin",
    ),
)

_KINDS = ("input", "output", "grad_output", "weight", "weight_grad", "buffer")
_FLOAT8 = tuple(f.dtype for f in FORMATS.values() if f.dtype.startswith("float8"))
_COLUMNS = ("dtype", "numel", "at_max", "saturated")


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor in an FP8 dtype over the recorded steps.

    Attributes:
        exact: clipped elements were counted at the cast; otherwise elements exactly at the maximum stand in.
        shares: share of clipped elements, or of elements at the maximum, on each step.
        worst: process and step of the largest share.
    """

    dtype: str
    exact: bool
    numel: int
    shares: Floats
    worst: tuple[Process, int]

    @property
    def share(self) -> float:
        """Median of ``shares``."""
        return float(np.median(self.shares))


def check(view: RunView, options: Options) -> Checked:
    """One finding: the worst tensor, with the others above the limit as evidence."""
    tensors, steps = _survey(view, options)
    casts = {k: o for k, o in operands(view).items() if o.numel >= options["min_elements"]}
    if not tensors and not operands(view):
        return Checked.not_applicable("no tensor is in a float8 dtype")
    beyond = [o for o in casts.values() if o.saturated_share > options["saturated_share"]]
    clipped = [o for o in beyond if o.clipping.lost_db >= options["lost_db"]]
    if clipped:
        clipped.sort(key=lambda o: (-o.saturated_share, o.key))
        reason = f"{plural(len(clipped), 'operand')} of {seen_words(casts)} above the limit"
        return Checked([_clipped_finding(view, clipped, options)], reason)
    if not tensors:
        worst = max((o.saturated_share for o in casts.values()), default=0.0)
        return Checked((), f"{seen_words(casts)}: at most {percent(worst)} clipped")
    seen = f"{plural(len(tensors), 'FP8 tensor')} on {plural(len(steps), 'step')}"
    limits = {True: options["saturated_share"], False: options["at_max_share"]}
    guilty = {k: t for k, t in tensors.items() if t.share > limits[t.exact]}
    if not guilty:
        worst = max(t.share for t in tensors.values())
        return Checked((), f"{seen}: at most {percent(worst)} at the maximum")
    key, tensor = max(guilty.items(), key=lambda item: item[1].share)
    finding = _finding(view, key, tensor, limits[tensor.exact], options, len(guilty))
    return Checked([finding], f"{plural(len(guilty), 'tensor')} of {seen} above the limit")


def _survey(view: RunView, options: Options) -> tuple[dict[Key, _Tensor], set[int]]:
    """Return every FP8 tensor of `min_elements` or more, and the steps on which some were recorded."""
    where = [("dtype", "in", _FLOAT8), ("numel", ">=", math.ceil(options["min_elements"]))]
    frame = view.measured(("saturated_share", "at_max_share"), _KINDS, columns=_COLUMNS, where=where)
    shares = frame["saturated_share"].fillna(frame["at_max_share"]).to_numpy()
    ids = groups(frame, IDENTITY)
    first, worst = frame.iloc[firsts(ids)], worst_rows(ids, shares)
    own_shares, exact = (shares[rows] for rows in rows_of(ids)), first["saturated"].notna()
    columns = zip(first["dtype"], exact, first["numel"], own_shares, at(frame.iloc[worst]), strict=True)
    tensors = {key: _Tensor(*values) for key, values in zip(keys(first), columns, strict=True)}
    return tensors, set(frame["step"].unique().tolist())


def _binades_down(row: TensorRow, allowed_share: float) -> int:
    """Binades by which the scale must fall until a smaller share of the elements than ``allowed_share`` clips.

    Clipped magnitudes are not recorded. The tail is continued geometrically by the ratio of the two full binades below
    the top one, or by a half per binade if it does not fall that fast.
    """
    counts, allowed = row.histogram.trimmed().counts, allowed_share * row.numel
    ratio = 0.5
    if counts.size >= 3 and counts[-2] > 0 and counts[-3] > 0:
        ratio = min(0.5, float(counts[-2]) / float(counts[-3]))
    if row.at_max <= allowed:
        return 1
    return max(1, math.ceil(math.log(allowed / row.at_max) / math.log(ratio)))


def _finding(view: RunView, key: Key, tensor: _Tensor, limit: float, options: Options, guilty: int) -> Finding:
    process, step = tensor.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    largest = format_of_dtype(tensor.dtype).max
    what = "clipped at" if tensor.exact else "exactly at"
    phase = Phase.BACKWARD if row.kind in BACKWARD_KINDS else Phase.FORWARD
    confidence = 0.95 if tensor.exact else 0.8 if tensor.numel >= 4096 else 0.6
    return RULE.finding(
        severity=Severity.ERROR if tensor.share >= options["error_share"] else Severity.WARNING,
        confidence=confidence,
        title=f"{percent(tensor.share)} of {row.label} is {what} the maximum of {tensor.dtype}, {largest:g}",
        message=f"{percent(tensor.share)} of the elements of {row.label} ({row.dtype}) are {what} {largest:g} in the "
        f"median of {plural(len(tensor.shares), 'step')}, limit {percent(limit)}; "
        f"{percent(np.nanmax(tensor.shares))} at step {step}. "
        f"Larger values silently became equal. {plural(guilty, 'tensor')} above the limit.",
        location=location(row, phase, process, step),
        evidence={
            "at_max_share": tensor.share,
            "limit": limit,
            "exact": tensor.exact,
            "steps_examined": len(tensor.shares),
            **tensor_evidence(row, rows),
            "confidence_reason": "clipped elements were counted at the cast"
            if tensor.exact
            else "elements at the maximum, above what amax scaling puts there",
        },
        prescription=_prescribe(row, tensor, _wide_source(row, rows), options),
    )


def _clipped_finding(view: RunView, clipped: Sequence[Operand], options: Options) -> Finding:
    """Return the finding about recorded casts, whose rows still hold the elements beyond the maximum."""
    operand = clipped[0]
    share, largest = operand.saturated_share, operand.fmt.max
    cast = operand.settled[int(operand.settled.saturated_share.argmax())]
    sure, why = operand.confidence
    return RULE.finding(
        severity=Severity.ERROR if share >= options["error_share"] else Severity.WARNING,
        confidence=0.95 if sure > 0.7 else sure,
        title=f"{percent(share)} of the {operand.label} is clipped at the maximum of {operand.fmt.dtype}, {largest:g}",
        message=f"{percent(share)} of the elements of the {operand.label} are beyond {largest:g} when they are cast to "
        f"{operand.fmt.dtype}, in the median of {plural(len(operand.settled), 'step')} (limit "
        f"{percent(options['saturated_share'])}); {percent(cast.saturated_share)} at step {cast.step}, where "
        f"{cast.scale_words}. Larger values silently became equal. {plural(len(clipped), 'operand')} above the limit.",
        location=operand.location(cast),
        evidence={
            "saturated_share": share,
            "limit": options["saturated_share"],
            "exact": True,
            "steps_examined": len(operand.settled),
            "scale": cast.scale,
            "tensors": listed(clipped, "saturated_share"),
            **operand.evidence(view, cast),
            "confidence_reason": why,
        },
        prescription=_prescribe_amax_scale(operand, share),
    )


def _prescribe_amax_scale(operand: Operand, share: float) -> Prescription:
    """Prescribe the scale of the tensor's own amax, with the shares that it clips and flushes."""
    cure, flushed = rescaled(operand), operand.flushed_share
    return cure.prescription(
        f"clipped {percent(share)} -> {percent(cure.damage.saturated)}, flushed {percent(flushed)} -> "
        f"{percent(cure.damage.flushed)}",
        {
            "saturated_share": {"from": share, "to": cure.damage.saturated},
            "flushed_share": {"from": flushed, "to": cure.damage.flushed},
        },
    )


def _wide_source(row: TensorRow, rows: tuple[TensorRow, ...]) -> TensorRow | None:
    """Return the cast's likely input: the last wider tensor of as many elements before it; None if unknown."""
    if row.order is None:
        return None
    earlier = [
        r
        for r in rows
        if r.numel == row.numel and not r.dtype.startswith("float8") and r.order is not None and r.order < row.order
    ]
    return max(earlier, key=lambda r: r.order or 0, default=None)


def _prescribe(row: TensorRow, tensor: _Tensor, source: TensorRow | None, options: Options) -> Prescription:
    """Prescribe the scale that fits the source's amax, else a lower scale."""
    fmt = format_of_dtype(tensor.dtype)
    if source is not None and source.amax:
        scale = fmt.max / source.amax
        return Prescription(
            title=f"scale by {scale:.4g} before the cast: its source {source.label} reaches {source.amax:.4g}",
            change={"scale": {"from": row.scale or 1.0, "to": scale}},
            predicted={"saturated_share": {"from": tensor.share, "to": 0.0}},
            snippet=current_snippet(fmt),
        )
    binades = _binades_down(row, options["at_max_share"])
    factor = 2.0**-binades
    return Prescription(
        title=f"lower the scale of this tensor by 2^{binades} (to {factor:g} of what it is)",
        change={"scale_multiplier": factor},
        predicted={"at_max_share": {"from": tensor.share, "to": tensor.share * factor}},
        snippet=current_snippet(fmt),
    )


def _clipped_going_forward(cause: Finding, effect: Finding) -> bool:
    """Return whether inputs or weights of a module are clipped (``cause``), and its gradients grow (``effect``)."""
    return same_module(cause, effect) and cause.location.phase is Phase.FORWARD


RULE = Rule(
    code="PD401",
    name="fp8-saturation",
    severity=Severity.ERROR,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        fraction("at_max_share", 0.02, "Largest share exactly at the maximum, median over steps.",
                 "2.5 times the one element per 1x128 tile that amax scaling puts there (0.78 %)."),
        fraction("saturated_share", 0.005, "Largest share clipped by a recorded cast, median over steps.",
                 "Above the 0.3 % of Gaussian elements that floor-rounded E8M0 scales clip (OCP MX)."),
        fraction("error_share", 0.1, "Share from which the finding is an error."),
        LOST_DB,
        MIN_ELEMENTS,
    ),
    explains={
        **when(same_module, "PD203", "PD706"),
        **when(_clipped_going_forward, "PD603"),
        **when(same_tensors, "PD407"),
    },
    check=check,
    newer_half=True,
)  # fmt: skip
