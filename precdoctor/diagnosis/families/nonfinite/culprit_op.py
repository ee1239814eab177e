"""Which op of an examined incident is to blame: the first that made something bad of finite operands, masks aside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from precdoctor.diagnosis.survey.op_facts import NAN, NEG_INF, POS_INF, Examined, Op
from precdoctor.numerics.nonfinite import can_make


def _names(spaced: str) -> frozenset[str]:
    return frozenset(spaced.split())


#: What a value is called that only an op knows which nobody ran again.
_UNKNOWN = "unknown"

#: Ops that put a constant somewhere: what they write was chosen by a person.
_FILLS = _names("masked_fill full full_like new_full fill scalar_tensor where masked_scatter lift_fresh_copy triu tril")


#: Products and normalisations of features; what a person means as a mask does not go in here.
_ARITHMETIC = _names(
    "mm addmm bmm mv addmv dot linear mkldnn_linear convolution _convolution mkldnn_convolution cudnn_convolution "
    "native_layer_norm native_batch_norm native_group_norm _native_batch_norm_legit mul div exp log sqrt square pow"
)


@dataclass(frozen=True)
class Blame:
    """The op that made the first bad value, or the tensor from before the step that brought it."""

    op: Op
    #: ``weight``, ``buffer``, ``batch``, ``argument``, ``data``, ``variable``, ``literal`` (an infinity in the text) or
    #: ``constant`` (of loss code), and its name, when the op only read it.
    external: tuple[str, str] | None = None
    #: A mask of ``-inf``, or another infinity put there on purpose, that the op turned into something worse.
    mask: Op | tuple[str, str] | None = None

    @property
    def of_target(self) -> bool:
        """Whether it is what a loss function compares with: data, although no module ever sees it."""
        constant = self.external is not None and self.external[0] == "constant"
        return constant and any(o.argument == "target" and o.bad for o in self.op.operands)


def blame(examined: Examined) -> Blame | None:
    """The first in order of execution; None when the ops in the log are not enough to say.

    They are not where something bad went in before that of which nobody knows what it was: what is told of later ops is
    what became of it.
    """
    found = [b for i in examined.origins if (b := _of_op(examined, examined.ops[i])) is not None]
    for kind, name, index in examined.externals:
        if kind != _UNKNOWN and (op := examined.ops.get(index)) is not None:
            b = _of_external(examined, op, (kind, name))
            found += [b] if b is not None else []
    first = min(found, key=lambda b: b.op.index, default=None)
    dark = [index for kind, _, index in examined.externals if kind == _UNKNOWN]
    dark += [i for i in examined.origins if _only_passes_on(examined.ops[i])]
    if first is None or min(dark, default=math.inf) <= first.op.index:
        return None
    return None if first.external is None and _only_passes_on(first.op) else first


def _only_passes_on(op: Op) -> bool:
    """Whether an origin cannot be one: no number and no infinity gives such a result (``exp`` is never NaN)."""
    real = not any(r.dtype.startswith("complex") for r in (*op.operands, *op.results))
    return op.phase == "forward" and real and not can_make(op.short, op.bad_out)


def _of_op(examined: Examined, op: Op) -> Blame | None:
    if op.bad_out == NEG_INF and op.short in _FILLS:
        turned = _turning_point(examined, op.index)
        return Blame(turned, mask=op) if turned is not None else None
    if op.bad_out and not op.bad_out & NAN and op.short in _FILLS and not op.finite_in_fp64:
        turned = _first_nan(examined, op.index)  # +Inf for "no path yet", "outside": the code's own
        return Blame(turned, mask=op) if turned is not None else Blame(op)
    return Blame(op)


def _of_external(examined: Examined, op: Op, external: tuple[str, str]) -> Blame | None:
    kinds = [b for b, maker in zip(op.bad_in, op.makers, strict=False) if maker == external]
    if external[0] == "literal":
        turned = op if op.bad_out & NAN else _first_nan(examined, op.index)
        return Blame(turned, mask=external) if turned is not None else None
    if external[0] == "argument" and kinds and all(k == NEG_INF for k in kinds):
        behind = (examined.ops[i] for i in examined.path if i >= op.index)
        turned = next((o for o in behind if o.bad_out & NAN), None)  # +Inf would be -(-Inf): the model's own doing
        return Blame(turned, mask=external) if turned is not None else Blame(op, external=external)
    if external[0] != "argument" and kinds and all(k == NEG_INF for k in kinds) and not _computes_with(op):
        turned = op if op.bad_out & (NAN | POS_INF) else _turning_point(examined, op.index)
        return Blame(turned, mask=external) if turned is not None else None
    return Blame(op, external=external)


def _computes_with(op: Op) -> bool:
    """Whether an op takes what it reads for numbers, not for a mask: masks are added, compared and normalised."""
    return bool(op.bad_out & (NAN | POS_INF)) and op.short in _ARITHMETIC


def _turning_point(examined: Examined, after: int) -> Op | None:
    """The first op behind a mask whose result is worse than a mask, or sums up a row that holds nothing else."""
    later = [examined.ops[i] for i in examined.path if i > after]
    if not any(map(_is_worse, later)):
        return None
    return next(op for op in later if _is_worse(op) or _empties(op))


def _first_nan(examined: Examined, after: int) -> Op | None:
    """The first op behind infinities that makes NaN of them."""
    return next((examined.ops[i] for i in examined.path if i > after and examined.ops[i].bad_out & NAN), None)


def _is_worse(op: Op) -> bool:
    return bool(op.bad_out & (NAN | POS_INF))


def _empties(op: Op) -> bool:
    """The logarithm of a sum over nothing is ``-inf`` by definition, and no mask any more."""
    return op.short == "logsumexp" and bool(op.bad_out)
