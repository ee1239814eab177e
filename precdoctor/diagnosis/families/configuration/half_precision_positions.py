"""PD703: positions, and angles made of them, kept in half precision."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precdoctor.diagnosis.analyses.parameters import HALF
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import same_module, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.configuration.half_precision_positions_angles import (
    angles_finding,
    angles_of,
    measured_angles,
)
from precdoctor.diagnosis.survey.frames import PARAMETER, at, firsts, groups, parameters
from precdoctor.diagnosis.survey.measures import lists
from precdoctor.diagnosis.survey.rows import TensorRow, known_format, location, tensor_evidence
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import BF16, FP16, FP32, Format

PAGE = RulePage(
    finds="""
Buffers in BF16 or FP16 that hold inverse frequencies of a rotary or sinusoidal encoding (`inv_freq`, `freqs`), or
position numbers (`position_ids`, `positions`), usually because `model.bfloat16()` or `.half()` converted every buffer
along with the weights. The measure is the rounding error at the longest recorded sequence. An angle is position times
frequency, so a frequency that is off by half an ulp (2^-9 of itself in BF16) makes an angle that is off by that times
the position. A table with two dimensions holds the angles themselves, off by 2^-9 of the largest. Frequencies above 1
are features of coordinates and are not judged. Neighbouring position numbers collide from 256 on in BF16 and from 2048
in FP16. Frequencies in an FP32 buffer are judged in the same way if all of them are BF16 or FP16 numbers: a table that
was computed in half precision, or converted and widened again, is as coarse.

Or, in a deep scan, sines and cosines of angles that are in half precision, or were before they were widened, and so
large that half an ulp of them is `angle` radians: above 256 in BF16, above 2048 in FP16. Time steps of a diffusion
model that are cast along with the latents are an example. In FP32 the limit is `wide_angle`, which only angles above 2
million exceed: Unix times. Where a scan follows data from before it was cast to half precision, the error of the angles
that are made of it is measured, and the limit is `measured_angle`: coordinates times the frequencies of Fourier
features.
""",
    matters="""
Positions far from the start get the wrong angle, or the same angle as their neighbours. The model trains all the same,
is worse on long contexts, and disagrees with any implementation that computes the table in FP32.
""",
    example="""
    model = LanguageModel().to(torch.bfloat16)   # converts rotary.inv_freq as well
    angles = positions[:, None] * inv_freq       # at position 4096 off by up to 7 radians
""",
    remedy="""
Keep the table in FP32: compute it in `forward` in FP32 and convert only the sines and cosines, or put the buffer back
after converting the model, as in the snippet. Pass time steps to the model as integers or in FP32.
""",
    confidence="""
0.85: dtype and values are recorded, and the name says what the buffer is for. 0.7 when no sequence length was seen.
Sines 0.85, and 0.75 where only the largest number identifies the tensor that was widened.
""",
    references=(
        "Su et al., RoFormer, arXiv:2104.09864 (rotary encoding: position times frequency)",
        "IEEE 754-2019, section 4.3 (rounding); half an ulp of BF16 is 2^-9 of a number just below a power of two",
    ),
)
#: Usual names of buffers that hold frequencies, and positions.
_FREQUENCIES = re.compile(r"(?:^|_)(?:inv_?freqs?|freqs?|frequenc(?:y|ies)|thetas?)(?:$|_)")
_POSITIONS = re.compile(r"(?:^|_)(?:positions?|position_ids|pos_ids)(?:$|_)")
#: Every FP64 number above this one is whole: larger quotients prove no multiple.
_EXACT = 2.0**52
#: Numbers with at most this many significant bits below the leading one (counts, say) need no rounding to be narrow.
_FEW_BITS = 4


#: Least share of the angles that is off by an eighth of a radian or more.
_MANY = 0.02


@dataclass(frozen=True)
class _Table:
    """A table of positions or frequencies in half precision; ``what``: ``radians`` or ``collision``."""

    row: TensorRow
    fmt: Format
    #: Radians off at the longest sequence; for positions how many of them share one number.
    error: float
    what: str


def check(view: RunView, options: Options) -> Checked:
    """One finding for the table that is off most; else one for each module whose angles are known to be off."""
    tables = _check_tables(view, options)
    return tables if tables.findings else _check_angles(view, options, tables)


def _check_angles(view: RunView, options: Options, tables: Checked) -> Checked:
    """Check the angles in deep scans; ``tables``: the outcome for tables, without a finding."""
    limit = options["measured_angle"]
    measured = [a for a in measured_angles(view) if a.error >= limit and a.wrong >= _MANY]
    known = {(a.root, a.module) for a in measured}
    angles = [a for a in angles_of(view) if (a.root, a.module) not in known]
    findings = [angles_finding(RULE, view, a, limit) for a in measured]
    words = f"sines of angles made of half precision, off by {measured[0].error:.2g} radians" if measured else ""
    if not angles:
        return Checked(findings, words) if findings else tables
    limits = {a: options["wide_angle"] if a.dtype == FP32.dtype else options["angle"] for a in angles}
    worst = max(angles, key=lambda a: a.error / limits[a])
    words = words or f"sines of angles up to {worst.amax:.4g} in {worst.dtype}, off by {worst.error:.2g} radians"
    if worst.error >= limits[worst]:
        findings.append(angles_finding(RULE, view, worst, limits[worst]))
    if findings:
        return Checked(findings, words)
    reason = words if tables.status is Status.NOT_APPLICABLE else f"{tables.reason}; {words}"
    return Checked((), f"{reason} (limit {limits[worst]:g})")


def _check_tables(view: RunView, options: Options) -> Checked:
    """Check the buffers of positions and frequencies."""
    named = _candidates(view)
    if not named:
        return Checked.not_applicable("no table and no sine of positions or frequencies in BF16 or FP16 was seen")
    length = _longest_sequence(view)
    tables = [t for row in named if (t := _table_of(row, length)) is not None]
    limits = {"radians": options["radians"], "collision": options["collision"]}
    guilty = [t for t in tables if t.error >= limits[t.what]]
    seen = plural(len(named), "half-precision position table")
    if not guilty:
        return Checked((), f"{seen} at lengths up to {length:,}: harmless there")
    worst = max(guilty, key=lambda t: t.error / limits[t.what])
    return Checked([_finding(worst, guilty, length, limits)], f"{len(guilty):,} of {seen} lose positions")


def _candidates(view: RunView) -> list[TensorRow]:
    """Return the first row of every buffer named like positions or frequencies that holds half-precision numbers."""
    frame = view.measured((), ("buffer",), columns=("dtype",), where=[("dtype", "in", (*HALF, FP32.dtype))])
    names = {name: str(name).rsplit(".", maxsplit=1)[-1].lower() for name in frame["name"].unique()}
    frequencies = [name for name, leaf in names.items() if _FREQUENCIES.search(leaf)]
    positions = [name for name, leaf in names.items() if _POSITIONS.search(leaf)]
    frame = frame[frame["name"].isin(frequencies) | (frame["name"].isin(positions) & frame["dtype"].isin(HALF))]
    first = frame.iloc[firsts(groups(frame, PARAMETER))]
    found = []
    for (process, step), place in sorted(zip(at(first), parameters(first), strict=True), key=lambda f: f[0][0]):
        rows = view.rows(process, step)
        mine = (r for r in rows if r.kind == "buffer" and r.owner == place)
        found += [r for r in mine if r.dtype in HALF or rounded_to(r) is not None]
    return found


def rounded_to(row: TensorRow) -> Format | None:
    """Return the 16-bit format that holds all elements of an FP32 tensor; None if none does or no rounding was needed.

    Numbers between ``2**e`` and ``2**(e + 1)`` are multiples of ``2**(e - 7)`` in BF16, of ``2**(e - 10)`` in FP16 and
    of ``2**(e - 23)`` in FP32. With ``e`` the exponent of the smallest element, a table rounded to BF16 consists of
    multiples of ``2**(e - 7)``. Then its sum is also such a multiple, and its sum of squares a multiple of the square.
    A log has both sums in FP64. The smallest FP32 number alone is such a multiple by a chance of 2^-16 (2^-13 for
    FP16); sums of FP16 numbers pass for those of BF16 once in some dozens. Numbers with few significant bits (counts,
    powers of two and fractions of them) are no sign of rounding.
    """
    if row.dtype != "float32" or row.bad or not row.amin_nonzero or row.amax is None or row.numel < 2:
        return None
    exponent = math.frexp(row.amin_nonzero)[1] - 1
    if _are_multiples(row, 2.0 ** (exponent - _FEW_BITS)):
        return None
    return next((f for f in (BF16, FP16) if _are_multiples(row, 2.0 ** (exponent - f.mantissa_bits))), None)


def _are_multiples(row: TensorRow, grid: float) -> bool:
    """Return whether amax, sum and sum of squares of a row fit elements that are all multiples of ``grid``."""
    if row.amax is None or row.sum is None or row.sum_sq is None:
        return False
    counts = row.amax / grid, abs(row.sum) / grid, row.sum_sq / grid / grid
    return all(c <= _EXACT and c == round(c) for c in counts)


def _longest_sequence(view: RunView) -> int:
    """Return the longest second dimension of an activation with three (batch, sequence, width); 0 without any."""
    frame = view.measured((), ("output",), columns=("shape",), steps=view.kept_steps[:1])
    lengths, extents = lists(frame, "shape")
    second = (np.cumsum(lengths) - lengths)[lengths == 3] + 1
    return int(extents[second].max(initial=0))


def _table_of(row: TensorRow, length: int) -> _Table | None:
    """Return a buffer with the error of its numbers at sequences of ``length``; None if it is no table."""
    fmt = known_format(row.dtype) if row.dtype in HALF else rounded_to(row)
    if fmt is None or not row.amax:
        return None
    leaf = row.name.rsplit(".", maxsplit=1)[-1].lower()
    if _POSITIONS.search(leaf):
        step = 2.0 ** (math.ceil(math.log2(row.amax)) - 1 - fmt.mantissa_bits)  # an ulp at the largest number
        return _Table(row, fmt, step, "collision")
    half_ulp = 2.0 ** -(fmt.mantissa_bits + 2)
    if len(row.shape) > 1:
        return _Table(row, fmt, row.amax * half_ulp, "radians")
    if row.amax > 1.0:
        return None
    # The largest frequency is usually 1 and exact; its neighbours are not.
    return _Table(row, fmt, length * row.amax * half_ulp, "radians")


def _finding(table: _Table, guilty: Sequence[_Table], length: int, limits: dict[str, float]) -> Finding:
    row, limit = table.row, limits[table.what]
    name = row.parameter
    if table.what == "radians":
        effect = f"an angle at position {length:,} is off by up to {table.error:.2g} radians"
        after = table.error * 2.0 ** (table.fmt.mantissa_bits - FP32.mantissa_bits)
        predicted = {"radians_off": {"from": table.error, "to": after}}
    else:
        effect = f"up to {table.error:.0f} neighbouring positions near {row.amax:.0f} are the same number"
        predicted = {"positions_per_number": {"from": table.error, "to": 1.0}}
    holds = f"is {row.dtype}"
    if row.dtype not in HALF:
        holds += f" and holds numbers rounded to {table.fmt.dtype}"
    return RULE.finding(
        confidence=0.85 if length else 0.7,
        title=f"`{name}` {holds}: {effect}",
        message=f"The buffer `{name}` ({plural(row.numel, 'element')}, largest {row.amax:.4g}) {holds}, which keeps "
        f"{table.fmt.mantissa_bits + 1} significant bits: {effect} (limit {limit:g}). {plural(len(guilty), 'table')} "
        "affected.",
        location=location(row, Phase.FORWARD, row.process, row.step),
        evidence={
            "effect": table.what,
            "measured": table.error,
            "limit": limit,
            "sequence_length": length,
            "tables": [t.row.parameter for t in guilty[:16]],
            **tensor_evidence(row),
            "confidence_reason": "dtype and values are recorded; the name says what it is for",
        },
        prescription=_keep_fp32(row, table.fmt, effect, predicted),
    )


def _keep_fp32(row: TensorRow, fmt: Format, effect: str, predicted: Mapping[str, Any]) -> Prescription:
    name, at = row.parameter, f"{module_expression(row.module)}.{row.name}"
    if row.dtype in HALF:
        how = f"keep `{name}` in FP32 (+{2 * row.numel:,} bytes)"
        snippet = (
            f"import torch\n\nkept = {at}.clone()  # still FP32\nmodel = model.to(torch.{row.dtype})\n{at} = kept\n"
        )
    else:
        how = f"compute `{name}` in FP32"
        snippet = (
            "import torch\n\n"
            f"# no .to(torch.{fmt.dtype}) on the way, and behind a conversion of the model\n"
            "exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim\n"
            f"{at} = 1.0 / base**exponents\n"
        )
    return Prescription(
        title=f"{how}: {effect} -> none",
        change={"buffer": name, "dtype": {"from": fmt.dtype, "to": "float32"}},
        predicted=predicted,
        snippet=snippet,
    )


def angles_without_cast(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` is a lossy cast in the module of a table; a cast that makes angles is their cause."""
    return same_module(cause, effect) and cause.evidence.get("effect") != "angles"


RULE = Rule(
    code="PD703",
    name="half-precision-positions",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("radians", 0.1, "radians", "Largest error of an angle at the longest recorded sequence.",
                   "Chosen empirically: it moves a sine by up to 0.1, 25 times the error of rounding it to BF16."),
        RuleOption("collision", 2.0, "positions per number", "Least number of neighbouring positions per number.",
                   "Two: from there positions coincide.", 1.0),
        RuleOption("angle", 1.0, "radians", "Half an ulp of the largest angle whose sine or cosine is taken.",
                   "At one, neighbouring integers are one angle. Networks of sines in half precision bear a tenth."),
        RuleOption("measured_angle", 0.25, "radians", "Largest error of an angle whose numbers were rounded before.",
                   "Chosen empirically: a quarter of what the bound allows; a tenth is borne."),
        RuleOption("wide_angle", 0.1, "radians", "The same for an angle in FP32.",
                   "A tenth of that of half precision: nothing that is computed in FP32 is meant to be so coarse."),
    ),
    explains=when(angles_without_cast, "PD706"),
    check=check,
)  # fmt: skip
