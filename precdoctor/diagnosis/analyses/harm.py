"""Harm to a tensor that was rounded to a narrow format: the information lost on its bulk, and the proof of it.

The unit is the significant bit. Every element that is not zero before the rounding counts once, however large: it keeps
all bits of the format in the normal range, one less per binade below, and none if it is flushed. A sum of squares or
magnitudes would measure only a few outliers.

The loss of scattered small elements does no harm: a sum over the batch still reaches every channel. The layer's weight
gradient proves it. Its rows belong to output channels and its columns to input channels: a channel that is flushed on
every sample leaves zeros there, scattered losses leave none. So a rule that stays silent because the lost magnitude is
small has proof.

Source: bits by IEEE 754-2019, section 3.3 (gradual underflow); channels by dL/dW = g^T x.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.survey.frames import Ints, groups, lasts
from precdoctor.diagnosis.survey.measures import Floats, format_values
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import RunView, remembered
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram

#: Root and module.
Module = tuple[str, str]
_KINDS = ("weight_grad", "grad_output", "input", "fp8_operand")
#: Factor by which a share of zeros may exceed the flushed share that explains it: both are medians over steps.
_SLACK = 1.1
#: Classes of modules whose input is assumed to have no zeros if it was not recorded.
_PLAIN = re.compile(r"(?:Lazy)?(?:Linear|Conv[123]d)$")


def mean_bits(histogram: ExponentHistogram, fmt: Format) -> float:
    """Return the mean number of significant bits that ``fmt`` keeps of the non-zero elements; 0 without any."""
    kept = kept_bits(histogram.lo + np.arange(histogram.counts.size), fmt)
    return float((histogram.counts * kept).sum()) / (float(histogram.counts.sum()) or 1.0)


def kept_bits(bins: Ints, fmt: Format) -> Floats:
    """Return the number of significant bits that ``fmt`` keeps of a magnitude in each of these bins."""
    lowest, least = round(math.log2(fmt.min_normal)), round(math.log2(fmt.flush_limit))
    full = fmt.mantissa_bits + 1.0
    return np.where(bins < least, 0.0, np.clip(full - (lowest - bins), 1.0, full))


@dataclass(frozen=True)
class ChannelZeros:
    """Exact zeros around one module with a weight matrix, as shares of the elements, medians over the steps.

    Attributes:
        weight: share of zeros in the weight gradient.
        given: share of zeros in the module's input or in its output gradient, the larger one.
        came: share of zeros in its output gradient.
        steps: number of recorded weight gradients if all of them were zero throughout, else 0.
    """

    weight: float
    given: float
    came: float
    steps: int


def lost_to(view: RunView, place: Module, flushed: float, already: float | None = None) -> float:
    """Return a lower bound of the share of a module's weight gradient that is zero because channels were flushed.

    0 if unknown.

    Args:
        flushed: share of the module's input or output gradient that was rounded to zero. A channel is lost only with
            all of its elements, so a larger share of zeros has another reason.
        already: share of zeros in the layer's operands that the rounding did not make; by default the recorded zeros.
    """
    zeros = channel_zeros(view).get(place)
    if zeros is None:
        return 0.0
    lost = max(0.0, zeros.weight - (zeros.given if already is None else already))
    return lost if lost <= _SLACK * flushed else 0.0


@remembered
def channel_zeros(view: RunView) -> Mapping[Module, ChannelZeros]:
    """Return the zeros around each module with a weight matrix and floating-point inputs; computed once per view.

    Modules whose output gradient is missing or always zero are left out, and embeddings: most of their rows are unused.
    """
    measures, columns = ("zero_share", "dimensions"), ("module_class", "dtype", "phase")
    rows = view.measured(measures, _KINDS, columns=columns, steps=watched_steps(view))
    flat = (rows["kind"] == "weight_grad") & ~(rows["dimensions"] >= 2)
    floating = ~np.isnan(format_values(rows, "max"))
    operand = rows["kind"] == "fp8_operand"  # its counts are from before the cast
    others = operand & ~rows["name"].str.startswith("input")
    rows = rows[~flat & ~others & floating & (rows["numel"] > 0) & (rows["phase"] != "recompute")]
    ids = groups(rows, ("root", "module"))
    kinds = rows["kind"].astype(str).replace("fp8_operand", "input")
    shares = rows["zero_share"].groupby([ids, kinds])
    names = ["weight_grad", "grad_output", "input"]
    places = pd.MultiIndex.from_product([range(int(ids.max(initial=-1)) + 1), names])
    middle: list[list[float]] = shares.median().reindex(places).to_numpy().reshape(-1, 3).tolist()
    least: list[list[float]] = shares.min().reindex(places).to_numpy().reshape(-1, 3).tolist()
    counts: list[int] = np.bincount(ids[kinds == "weight_grad"], minlength=len(middle)).tolist()
    found: dict[Module, ChannelZeros] = {}
    last = rows.iloc[lasts(ids)]
    named = zip(last["root"], last["module"], last["module_class"].map(text), counts, middle, least, strict=True)
    for root, module, module_class, count, (weight, came, entered), (always, never, _) in named:
        if count and never < 1.0 and (not math.isnan(entered) or _PLAIN.match(module_class)):
            given = came if math.isnan(entered) else max(entered, came)
            found[root, module] = ChannelZeros(weight, given, came, count if always == 1.0 else 0)
    return found


@remembered
def input_zeros(view: RunView) -> Mapping[Module, Mapping[int, tuple[int, int]]]:
    """Return the number of elements and of exact zeros in the input, per module of :func:`channel_zeros` and step."""
    rows = view.measured((), ("input",), columns=("numel", "zero", "phase"), steps=watched_steps(view))
    rows = rows[rows["phase"] != "recompute"]
    summed = rows.groupby(["root", "module", "step"], observed=True, sort=False)[["numel", "zero"]].sum()
    found: dict[Module, dict[int, tuple[int, int]]] = {}
    for (root, module, step), sums in zip(summed.index, summed.to_numpy().tolist(), strict=True):
        if (root, module) in channel_zeros(view):
            found.setdefault((root, module), {})[step] = (sums[0], sums[1])
    return found
