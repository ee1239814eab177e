"""Why a value became non-finite, from the recorded tensors alone.

The causes follow from arithmetic: a matrix product of finite operands can only become infinite by leaving the format's
range; ``exp`` overflows above ``ln(max)``; and so on. If several causes fit, none is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from precdoctor.diagnosis.analyses.bad_data import BadTensor, as_given, delivered_tensor
from precdoctor.diagnosis.analyses.op_facts import Replay
from precdoctor.diagnosis.analyses.origin import Origin
from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.incident import UNKNOWN, Cause
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, TensorRow, known_format

_PRODUCT = re.compile(r"Linear|Conv|Bilinear|LSTM|GRU|RNN", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
#: Provenance of a tensor that was non-finite before the model read it: confidence that it is data, and a clause on it.
_PROVENANCES = {
    "loader": (0.97, ""),
    "after-loader": (0.97, ", and what the data loader delivered was finite"),
    "outside-step": (0.85, ", and no torch op of the traced step had made them"),
    "unknown": (0.75, "; the log does not show whether data or code before the model made them"),
}
_RMS_NORM = re.compile(r"RMS_?Norm", re.IGNORECASE)


def forward_cause(
    origin: Origin, rows: Sequence[TensorRow], earlier_weights: Sequence[TensorRow], replay: Replay | None
) -> Cause:
    """The cause of a forward or loss origin; ``UNKNOWN`` if the surrounding rows do not leave exactly one.

    Args:
        earlier_weights: the module's weights and updates on an earlier step, used if ``rows`` holds no weight of it.
    """
    row, after = origin.row, origin.after
    fmt = known_format(row.dtype)
    if origin.phase is Phase.DATA:
        return data_cause(replay, as_given(row), "the batch held non-finite values when the model was called")
    names = f"{origin.module_class} {origin.module}"
    if after is not None and after.mask_like and row.nan and (_SOFTMAX.search(names) or _ATTENTION.search(names)):
        return Cause("softmax-fully-masked", 0.8, "a -inf mask went into a softmax and NaN came out")
    if fmt is None or after is None or after.amax is None:
        return UNKNOWN
    if origin.how == "module" and _PRODUCT.search(origin.module_class) and row.inf:
        if known_format(after.dtype) != fmt and after.amax >= fmt.overflow_limit:
            return Cause("cast-overflow", 0.9, f"its input reaches {after.amax:.4g}, above {row.dtype}'s {fmt.max:g}")
        return _product_cause(origin, rows, earlier_weights, fmt.max)
    if _ATTENTION.search(names):
        return _attention_cause(origin, rows, fmt.max)
    if _RMS_NORM.search(origin.module_class) and after.dtype == row.dtype == "float16" and after.amax**2 > fmt.max:
        return Cause("square-overflow", 0.7, f"the square of its input's amax {after.amax:.4g} exceeds {fmt.max:g}")
    if origin.how == "module" and origin.phase is Phase.FORWARD:
        return UNKNOWN
    return _functional_cause(row, after, fmt.max)


def data_cause(replay: Replay | None, read: BadTensor | None, why: str) -> Cause:
    """The cause of a tensor that was non-finite before the model read it; its provenance sets the confidence.

    Args:
        read: the tensor; None if the log lacks its counts.
    """
    confidence, more = _PROVENANCES[provenance(replay, read)]
    return Cause("nonfinite-input-batch", confidence, why + more)


def provenance(replay: Replay | None, read: BadTensor | None) -> str:
    """The provenance of a tensor that was non-finite before the model read it: a key of ``_PROVENANCES``."""
    if read is not None and (read.delivered or (replay and delivered_tensor(replay.bad_data, read))):
        return "loader"
    if replay is not None and replay.data_is_finite is True:
        return "after-loader"
    return "outside-step" if replay is not None and replay.made_outside else "unknown"


def provenance_words(made_by: str) -> str:
    """A sentence on what can have made the tensor of this provenance non-finite; empty if the log shows it."""
    if made_by == "outside-step":
        return (
            " The step was traced from its beginning on, and no op of it made the value: it came with the data, from "
            "code before the step, or from outside of torch (NumPy, another thread)."
        )
    return " The data held it, or code between the data and the model made it." if made_by == "unknown" else ""


def _product_cause(
    origin: Origin, rows: Sequence[TensorRow], earlier_weights: Sequence[TensorRow], largest: float
) -> Cause:
    """The cause of a matrix product: overflow, if terms x largest input x largest weight can exceed the format.

    The log does not show which recorded tensor is the input, so the largest one before the origin is the bound. If the
    product cannot overflow: ``UNKNOWN`` with weights of this step; with earlier ones, the weights changed since.
    """
    before = [r for r in rows if r.kind in FORWARD_KINDS and r.position < origin.row.position and r.amax is not None]
    x_amax = max((r.amax or 0.0 for r in before), default=0.0)
    own_weights = [r for r in rows if r.kind == "weight" and (r.root, r.module) == (origin.root, origin.module)]
    reach = _weight_reach(own_weights or earlier_weights)
    if not reach or not before:
        return Cause("matmul-overflow", 0.8, "finite operands of a matrix product can only become Inf by overflow")
    terms = max(math.prod(shape[1:]) for shape, _, _ in reach)
    _, w_amax, update = max(reach, key=lambda r: r[1])
    bound = terms * x_amax * w_amax
    if bound >= largest:
        grown = f" (the update before moved them by up to {update:.3g})" if update > 0.5 * w_amax else ""
        why = f"{terms:,} products of inputs up to {x_amax:.4g} and weights up to {w_amax:.4g}{grown} can reach "
        return Cause("matmul-overflow", 0.9, f"{why}{bound:.3g} > {largest:g}")
    if own_weights:
        return UNKNOWN
    why = f"with the last recorded weights the product cannot exceed {bound:.3g}, so they must have changed since"
    return Cause("nonfinite-weights", 0.7, why)


def _weight_reach(rows: Sequence[TensorRow]) -> list[tuple[Sequence[int], float, float]]:
    """Per weight matrix: its shape, an upper bound of its amax after the recorded update, and the update's amax."""
    updates = {r.name: r.amax or 0.0 for r in rows if r.kind == "update"}
    return [
        (r.shape, r.amax + updates.get(r.name, 0.0), updates.get(r.name, 0.0))
        for r in rows
        if r.kind == "weight" and r.amax is not None and len(r.shape) > 1
    ]


def _attention_cause(origin: Origin, rows: Sequence[TensorRow], largest: float) -> Cause:
    """The cause in an attention module: overflow, if ``d * amax ** 2``, the bound of a dot product, exceeds the format.

    ``UNKNOWN`` if it does not. The amax is the largest one among the module's earlier tensors.
    """
    inside = [
        r
        for r in rows
        if r.kind in FORWARD_KINDS
        and r.root == origin.root
        and r.amax
        and r.position < origin.row.position
        and (r.module == origin.module or r.module.startswith(origin.module + "."))
    ]
    wide = max(inside, key=lambda r: r.amax or 0.0, default=origin.after)
    if wide is None or not wide.amax or not wide.shape:
        return UNKNOWN
    bound = wide.amax**2 * wide.shape[-1]
    if bound < largest:
        return UNKNOWN
    certainty = 0.85 if origin.row.dtype == "float16" else 0.6
    why = f"operands up to {wide.amax:.4g} let dot products of length {wide.shape[-1]} reach {bound:.3g} > {largest:g}"
    return Cause("matmul-overflow", certainty, why)


def _functional_cause(row: TensorRow, after: TensorRow, largest: float) -> Cause:
    """The cause in functional code between two tensors, from their shapes and the range of the first (``after``)."""
    amax = after.amax or 0.0
    terms = _terms_per_sum(after.shape, row.shape)
    looks_like_probabilities = after.zero > 0 and amax <= 1.0
    if row.inf and not row.nan and looks_like_probabilities:
        return Cause(
            "log-of-nonpositive", 0.6, f"{plural(after.zero, 'exact zero')} among values up to {amax:.4g} went in"
        )
    if row.inf and terms > 1 and amax < math.log(largest) and amax * terms >= largest:
        why = f"sums of {terms:,} values up to {amax:.4g} can reach {amax * terms:.3g} > {largest:g}"
        return Cause("reduction-overflow", 0.6, why)
    # exp is not named if a sum or a square could also have overflowed.
    if row.pos_inf and math.log(largest) < amax < math.sqrt(largest) and amax * terms < largest:
        why = (
            f"values up to {amax:.4g} went in: exp overflows {row.dtype} above {math.log(largest):.2f}, squares do not"
        )
        return Cause("exp-overflow", 0.6, why)
    return UNKNOWN


def _terms_per_sum(before: Sequence[int], after: Sequence[int]) -> int:
    """Number of elements per sum, if the shapes look like a reduction over one dimension; else 1."""
    if len(before) == len(after):
        differing = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
        return differing[0][0] if len(differing) == 1 and differing[0][1] == 1 else 1
    dropped = [i for i in range(len(before)) if [*before[:i], *before[i + 1 :]] == list(after)]
    return max((before[i] for i in dropped), default=1)


def backward_cause(origin: Origin, rows: Sequence[TensorRow], loss_scale: float | None) -> Cause:
    """The cause of a backward origin, from the rows of its step; ``UNKNOWN`` unless FP16 scaling or a root fits."""
    row = origin.row
    output = next((r for r in rows if r.kind == "output" and (r.root, r.module) == (row.root, row.module)), None)
    if row.dtype == "float16" and row.inf and (row.scale or loss_scale or 1.0) > 1.0:
        return Cause(
            "loss-scale-overflow", 0.85, f"FP16 gradients at loss scale {row.scale or loss_scale:g} became Inf"
        )
    if row.kind == "grad_output" and output is not None and output.zero and row.non_finite == output.zero:
        why = f"exactly the {output.zero:,} zeros of the tensor have a non-finite gradient"
        return Cause("sqrt-gradient-at-zero", 0.6, why)
    return UNKNOWN
