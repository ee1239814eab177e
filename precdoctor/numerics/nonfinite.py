"""Which ops can make a non-finite value by themselves, and which only propagate one from their operands.

This is mathematics (IEEE 754-2019, sections 6, 7 and 9.2), not measurement: ``exp`` of any number or infinity is a
number or +Inf, so a NaN after it was a NaN before it; ``tanh`` is bounded. Op names are those of aten, without
overloads.
"""

from __future__ import annotations

#: Kinds of non-finite values, as bits.
NAN, POS_INF, NEG_INF = 1, 2, 4


def op_names(spaced: str) -> frozenset[str]:
    """Split one string of space-separated names into a set."""
    return frozenset(spaced.split())


def plain_name(op: str) -> str:
    """Return ``masked_fill`` for ``aten.masked_fill_.Scalar``."""
    return (op.split(".")[1] if "." in op else op).rstrip("_")


#: Ops that move values and compute none.
_MOVING = op_names(
    "view _unsafe_view reshape _reshape_alias transpose t permute expand expand_as slice select unsqueeze squeeze "
    "detach alias split split_with_sizes chunk unbind narrow as_strided clone contiguous cat stack index gather unfold "
    "diagonal repeat flatten take index_select masked_select flip roll lift_fresh movedim swapaxes tril triu"
)
#: Ops whose result has a NaN only if an operand has one: they turn infinities into infinities or numbers. This excludes
#: ``leaky_relu``: with a slope of 0 it multiplies -Inf by 0.
_NAN_OF_NAN = _MOVING | op_names(
    "exp exp2 expm1 special_exp2 special_expm1 sinh cosh sigmoid special_expit tanh atan arctan asinh erf special_erf "
    "erfc special_erfc relu relu6 hardtanh hardsigmoid clamp clamp_min clamp_max clip abs neg sign floor "
    "ceil round trunc square softplus elu celu selu log_sigmoid log_sigmoid_forward maximum minimum fmax fmin max min "
    "amax amin aminmax cummax cummin median sort topk where"
)
#: Bounded ops: their result holds no infinity (unless an infinite bound is passed).
_BOUNDED = op_names(
    "sigmoid special_expit tanh sin cos atan arctan erf special_erf erfc special_erfc sign hardsigmoid softmax "
    "_softmax _safe_softmax"
)


#: Ops that write a constant: an infinity among their results may be intended, as in a mask.
FILLS = op_names(
    "masked_fill full full_like new_full fill scalar_tensor where masked_scatter lift_fresh_copy triu tril"
)


def can_make(op: str, kinds: int) -> bool:
    """Whether an op could have made values of these kinds from operands without NaN.

    Args:
        op: a name such as ``exp`` or ``_softmax``, without the underscore of an in-place op.
        kinds: bits of ``NAN``, ``POS_INF`` and ``NEG_INF``.

    Returns:
        False if it is impossible; True also for ops not listed here.
    """
    if kinds & NAN and op in _NAN_OF_NAN:
        return False
    return not (kinds & (POS_INF | NEG_INF) and op in _BOUNDED)
