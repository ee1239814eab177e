"""PD703, angles: sines and cosines, seen in deep scans, of angles that are too coarse in their format.

An angle of 980 in BF16 stands for all from 978 to 982, and widening it before the sine does not help. In FP32 only
angles of millions, such as Unix times, are as coarse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.analyses.op_dtypes import coverage
from precdoctor.diagnosis.analyses.op_facts import real
from precdoctor.diagnosis.analyses.parameters import HALF
from precdoctor.diagnosis.analyses.scans import facts, short_name
from precdoctor.diagnosis.claims.finding import (
    Finding,
    Location,
    Phase,
    Prescription,
    Source,
    at_line,
    change_line,
    is_of_library,
)
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.processes import Process
from precdoctor.diagnosis.survey.rows import integer, known_format, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32, Format

_SINES = ("sin", "cos")
_WIDE = ("float32", "float64")


@dataclass(frozen=True)
class Angles:
    """The operand of a sine or cosine in the forward pass; ``fmt``: the format that it was rounded to."""

    root: str
    module: str
    step: int
    process: Process
    op: str
    source: Source | None
    dtype: str
    fmt: Format
    amax: float
    #: Whether the sine is taken in a wider format than ``fmt``.
    widened: bool
    #: Largest error in radians, measured against the numbers before they were rounded, None if unknown; and the share
    #: of angles that are off by an eighth of a radian or more.
    measured: float | None = None
    wrong: float = 1.0
    #: Where the angles can be changed, in words: the line of the sine unless it is in a library.
    own_line: str = ""

    @property
    def spacing(self) -> float:
        """An ulp of the format just below the largest angle, in radians."""
        return float(2.0 ** (math.ceil(math.log2(self.amax)) - 1 - self.fmt.mantissa_bits))

    @property
    def error(self) -> float:
        """Largest error in radians: measured, else half the spacing (round to nearest, IEEE 754-2019, section 4.3)."""
        return self.spacing / 2.0 if self.measured is None else self.measured


def angles_of(view: RunView) -> list[Angles]:
    """Return the coarsest angles of each module in all scans, the coarsest first."""
    found: dict[tuple[str, str], Angles] = {}
    for listed in coverage(view):
        place = listed.root, listed.module
        for entry, dtype, amax in _sine_operands(listed.ops):
            fmt, line, file = known_format(dtype), integer(entry.get("line")), text(entry.get("file"))
            if fmt is None:
                continue
            source = Source.read(file, line, "") if line is not None else None
            seen = Angles(
                *place, listed.step, listed.process, text(entry["op"]), source, dtype, fmt, amax,
                widened=text(entry.get("inputs")) != dtype,
                own_line=change_line(source, None, in_library=is_of_library(file)),
            )  # fmt: skip
            known = found.get(place)
            if known is None or (seen.spacing, amax) > (known.spacing, known.amax):
                found[place] = seen
    return sorted(found.values(), key=lambda a: -a.spacing)


def measured_angles(view: RunView) -> list[Angles]:
    """Return the worst angles of each module with measured errors on two scanned steps or more, the worst first."""
    found: dict[tuple[str, str], list[Angles]] = {}
    for fact in facts(view, "angle"):
        dtype = text(fact.data.get("rounded_to"))
        if (fmt := known_format(dtype)) is not None:
            measured = fact.number("error"), fact.share("wrong", "of")
            angles = Angles(
                fact.root, fact.module, fact.step, fact.process, fact.op, fact.source, dtype, fmt,
                fact.number("largest"), fact.dtype not in HALF, *measured, fact.own_line,
            )  # fmt: skip
            found.setdefault((fact.root, fact.module), []).append(angles)
    several = [group for group in found.values() if len({a.step for a in group}) > 1]
    return sorted((max(group, key=lambda a: a.error) for group in several), key=lambda a: -a.error)


def _sine_operands(ops: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, float]]:
    """Yield each sine or cosine of one module with the dtype and the amax of its operand.

    The operand is the last result before it of the same dtype and number of elements. An operand in a wide dtype came
    from half precision if a tensor widened before it has the same amax: the first frequency is 1, so the largest
    position is also the largest angle.
    """
    before: list[Mapping[str, Any]] = []
    for entry in ops:
        name, dtype = short_name(text(entry.get("op"))), text(entry.get("inputs"))
        if text(entry.get("phase")) != "forward" or name not in _SINES:
            before.append(entry)
            continue
        made = [o for o in before if text(o.get("outputs")) == dtype and _elements(o) == _elements(entry)]
        amax = real(made[-1].get("amax")) if made else None
        if not amax or not math.isfinite(amax):
            continue
        if dtype in HALF:
            yield entry, dtype, amax
        elif dtype in _WIDE:
            widened = [o for o in before[: before.index(made[-1]) + 1] if _widens(o) and real(o.get("amax")) == amax]
            yield entry, text(widened[-1]["inputs"]) if widened else dtype, amax


def _elements(entry: Mapping[str, Any]) -> int:
    """Number of elements of one result."""
    return (integer(entry.get("numel")) or 0) // max(1, integer(entry.get("calls")) or 1)


def _widens(entry: Mapping[str, Any]) -> bool:
    """Return whether the op casts half precision to a wider dtype."""
    return (
        short_name(text(entry.get("op"))) == "to_copy"
        and text(entry.get("inputs")) in HALF
        and text(entry.get("outputs")) in _WIDE
    )


def angles_finding(rule: Rule, view: RunView, angles: Angles, limit: float) -> Finding:
    """Return the finding about angles above ``limit`` radians."""
    where = f"`{angles.module or angles.root}`" if angles.root else "the training loop"
    line = at_line(angles.source)
    what, known = short_name(angles.op), angles.measured is not None
    effect = f"angles up to {angles.amax:.4g} are {angles.spacing:g} radians apart"
    if known:
        effect = f"angles are up to {angles.error:.2g} radians off"
    taken = f"The {what}{line} in {where} is taken"
    how = (
        f"{taken} in a wider format, but of numbers that had been rounded to {angles.dtype}."
        if angles.widened
        else f"{taken} of angles in {angles.dtype}."
    )
    if known:
        how = f"{taken} of angles that were made of numbers rounded to {angles.dtype}."
    wide = angles.fmt.mantissa_bits >= FP32.mantissa_bits
    return rule.finding(
        confidence=0.9 if known else 0.75 if angles.widened else 0.85,
        title=f"{what} of {angles.dtype} positions in {where}: {effect}{line}",
        message=_message(angles, how, limit),
        location=Location(
            root=angles.root or None,
            module=angles.module if angles.root else None,
            module_class=view.module_classes.get((angles.root, angles.module)),
            phase=Phase.FORWARD,
            **vars(angles.process),
            step=angles.step,
            op=angles.op,
            source=angles.source,
        ),
        evidence={
            "effect": "angles",
            "measured": angles.error,
            "limit": limit,
            "amax": angles.amax,
            "spacing": angles.spacing,
            "dtype": angles.dtype,
            "widened": angles.widened,
            "confidence_reason": "the angles were held against the numbers before the rounding"
            if known
            else "dtype and largest angle are recorded"
            + ("; their size alone identifies them as the ones that were widened" if angles.widened else ""),
        },
        prescription=(_subtract_turns if wide else _in_fp32)(angles),
    )


def _message(angles: Angles, how: str, limit: float) -> str:
    if angles.measured is not None:
        return (
            f"{how} Held against the same numbers before they were rounded, the angles are off by up to "
            f"{angles.error:.2g} radians (limit {limit:g}), {percent(angles.wrong)} of them by an eighth or more."
        )
    return (
        f"{how} It has {angles.fmt.mantissa_bits + 1} significant bits: near {angles.amax:.4g}, the largest at step "
        f"{angles.step}, numbers are {angles.spacing:g} apart, so that the angle is off by up to {angles.error:.2g} "
        f"radians (limit {limit:g}). Positions and time steps there are mistaken for their neighbours, and widening "
        "them afterwards brings nothing back."
    )


def _in_fp32(angles: Angles) -> Prescription:
    fine = angles.error * 2.0 ** (angles.fmt.mantissa_bits - FP32.mantissa_bits)
    return Prescription(
        title=f"positions and angles in FP32{angles.own_line}: off by {angles.error:.2g} -> {fine:.1g} radians",
        change={"angles": {"from": angles.dtype, "to": "float32"}},
        predicted={"radians_off": {"from": angles.error, "to": fine}},
        snippet=(
            "import torch\n\n"
            "# pass the positions as they are: no .to(half) before the sines are taken\n"
            "angles = positions.float()[:, None] * frequencies.float()\n"
            f"table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.{angles.dtype})\n"
        ),
    )


def _subtract_turns(angles: Angles) -> Prescription:
    """Prescribe to subtract whole turns first: they do not change a sine, but take up all the digits."""
    fine = math.pi * 2.0 ** -(angles.fmt.mantissa_bits + 1)
    return Prescription(
        title=f"subtract whole turns first{angles.own_line}, in integers or FP64: off by {angles.error:.2g} -> "
        f"{fine:.1g} radians",
        change={"angles": {"from": angles.amax, "to": 2.0 * math.pi}},
        predicted={"radians_off": {"from": angles.error, "to": fine}},
        snippet=(
            "import torch\n\n"
            "turns = (t % period).double() / period  # t as the integers they are, or in FP64\n"
            "angles = (2 * torch.pi * turns).float()\n"
        ),
    )
