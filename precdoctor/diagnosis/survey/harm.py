"""Harm to a tensor that was rounded to a narrow format: the information lost on its bulk, and the proof of it.

The unit is the significant bit. Every intended non-zero element counts once, however large: it keeps all bits of the
format in the normal range, one less per binade below, and none if it was flushed. Zeros from before the rounding do not
count. A sum of squares or magnitudes would measure a few outliers only.

The loss of scattered small elements does no harm: a sum over the batch still reaches every channel. The weight gradient
of the layer shows it. Its rows belong to output channels and its columns to input channels. A channel that is flushed
on every sample leaves zeros there, scattered losses leave none. If a rule stays silent because the lost magnitude is
small, this is the proof.

Source: bits by IEEE 754-2019, section 3.3 (gradual underflow); channels by dL/dW = g^T x.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram

#: Root and module.
Module = tuple[str, str]
_KINDS = ("weight_grad", "grad_output", "input", "fp8_operand")
#: Factor by which a share of zeros may exceed the flushed share that explains it: both are medians over steps.
_SLACK = 1.1
#: Modules of plain sums of products: their input counts as free of zeros if it was not recorded.
_PLAIN = re.compile(r"(?:Lazy)?(?:Linear|Conv[123]d)$")


@dataclass(frozen=True)
class BulkLoss:
    """The intended non-zero elements after rounding.

    Attributes:
        flushed: share that became zero.
        subnormal: share that is subnormal and not zero.
        bits: mean significant bits left; 0 for each flushed element.
        of_bits: significant bits of the format.
    """

    flushed: float
    subnormal: float
    bits: float
    of_bits: int


def bulk_loss(histogram: ExponentHistogram, fmt: Format, flushed: float = 0.0, multiplier: float = 1.0) -> BulkLoss:
    """The loss of a tensor stored in ``fmt``, after multiplication by ``multiplier``.

    Args:
        histogram: exponents of the non-zero elements.
        fmt: the format.
        flushed: number of elements that were rounded to zero; they are not in ``histogram``.
        multiplier: power of two; elements that it lifts out of zero are not counted.
    """
    shift = round(math.log2(multiplier))
    lowest, least = round(math.log2(fmt.min_normal)), round(math.log2(fmt.flush_limit))
    full = fmt.mantissa_bits + 1
    total, bits, subnormal, zero = flushed, 0.0, 0.0, flushed
    for i, count in enumerate(histogram.counts.tolist()):
        k = histogram.lo + i + shift
        total += count
        if k < least:
            zero += count
        elif k < lowest:
            subnormal += count
            bits += count * max(1, full - (lowest - k))
        else:
            bits += count * full
    total = total or 1.0
    return BulkLoss(zero / total, subnormal / total, bits / total, full)


@dataclass(frozen=True)
class ChannelZeros:
    """Exact zeros around one module with a weight matrix, as shares of the elements, medians over the steps.

    Attributes:
        weight: of the weight gradient.
        given: of the module's input or of its output gradient, the larger one.
        came: of its output gradient.
        steps: number of recorded steps if the weight gradient was zero throughout on all of them, else 0.
    """

    weight: float
    given: float
    came: float
    steps: int


def lost_to(view: RunView, place: Module, flushed: float, already: float | None = None) -> float:
    """Lower bound of the share of a module's weight gradient that is zero because channels were flushed.

    0 if unknown.

    Args:
        view: the run.
        place: root and module.
        flushed: share of the module's input or output gradient that was rounded to zero. A channel is lost only with
            all of its elements, so more zeros than that have another reason.
        already: share of zeros in the layer's operands that the rounding did not make; default: as recorded.
    """
    zeros = channel_zeros(view).get(place)
    if zeros is None:
        return 0.0
    lost = max(0.0, zeros.weight - (zeros.given if already is None else already))
    return lost if lost <= _SLACK * flushed else 0.0


def channel_zeros(view: RunView) -> Mapping[Module, ChannelZeros]:
    """The zeros around each module with a weight matrix and floating-point inputs; one pass, remembered by the view.

    Modules without any output gradient are left out, and so are lookups, because most rows of an embedding are unused.
    """
    return view.remember("channel-zeros", lambda: _channel_zeros(view))


def _channel_zeros(view: RunView) -> dict[Module, ChannelZeros]:
    shares: dict[Module, dict[str, list[float]]] = {}
    classes: dict[Module, str] = {}
    names = ("root", "module", "module_class", "kind", "name", "dtype", "shape", "numel", "zero", "phase")
    for r in view.scan_records(names, _KINDS, steps=watched_steps(view)):
        kind, numel = text(r["kind"]), int(r["numel"])
        flat = kind == "weight_grad" and (r["shape"] is None or len(r["shape"]) < 2)
        if flat or not numel or r["phase"] == "recompute" or known_format(text(r["dtype"])) is None:
            continue
        if kind == "fp8_operand":  # as it lies before the cast
            if not text(r["name"]).startswith("input"):
                continue
            kind = "input"
        place = text(r["root"]), text(r["module"])
        classes[place] = text(r["module_class"])
        shares.setdefault(place, {}).setdefault(kind, []).append(int(r["zero"]) / numel)
    found = {}
    for place, seen in shares.items():
        if "weight_grad" not in seen or min(seen.get("grad_output", (1.0,))) == 1.0:
            continue
        if "input" not in seen and not _PLAIN.match(classes[place]):
            continue
        weight, always = seen["weight_grad"], min(seen["weight_grad"]) == 1.0
        came = median(seen["grad_output"])
        given = max(median(seen.get("input", (0.0,))), came)
        found[place] = ChannelZeros(median(weight), given, came, len(weight) if always else 0)
    return found


def input_zeros(view: RunView) -> Mapping[Module, Mapping[int, tuple[int, int]]]:
    """Elements and exact zeros of the recorded input, per module of :func:`channel_zeros` and step."""
    return view.remember("input-zeros", lambda: _input_zeros(view))


def _input_zeros(view: RunView) -> dict[Module, dict[int, tuple[int, int]]]:
    found: dict[Module, dict[int, tuple[int, int]]] = {}
    names = ("root", "module", "step", "numel", "zero", "phase")
    for r in view.scan_records(names, ("input",), steps=watched_steps(view)):
        place = text(r["root"]), text(r["module"])
        if r["phase"] == "recompute" or place not in channel_zeros(view):
            continue
        steps = found.setdefault(place, {})
        numel, zero = steps.get(int(r["step"]), (0, 0))
        steps[int(r["step"])] = numel + int(r["numel"]), zero + int(r["zero"])
    return found
