"""Which non-finite values an operation can make by itself: which ops may be origins, and which only pass values on.

Mathematics, not measurement (IEEE 754-2019, sections 6, 7 and 9.2): ``exp`` of any number, an infinity among them, is a
number or +Inf, so NaN behind it was NaN before it; ``tanh`` is bounded. Names are those of aten, without overloads.
"""

from __future__ import annotations

#: Kinds of non-finite values, as bits.
NAN, POS_INF, NEG_INF = 1, 2, 4


def _names(spaced: str) -> frozenset[str]:
    return frozenset(spaced.split())


#: They move values and compute none.
_MOVING = _names(
    "view _unsafe_view reshape _reshape_alias transpose t permute expand expand_as slice select unsqueeze squeeze "
    "detach alias split split_with_sizes chunk unbind narrow as_strided clone contiguous cat stack index gather unfold "
    "diagonal repeat flatten take index_select masked_select flip roll lift_fresh movedim swapaxes tril triu"
)
#: NaN comes out of them only where NaN went in, whatever else did: those of infinities are infinities or numbers.
_NAN_OF_NAN = _MOVING | _names(
    "exp exp2 expm1 special_exp2 special_expm1 sinh cosh sigmoid special_expit tanh atan arctan asinh erf special_erf "
    "erfc special_erfc relu relu6 leaky_relu hardtanh hardsigmoid clamp clamp_min clamp_max clip abs neg sign floor "
    "ceil round trunc square softplus elu celu selu log_sigmoid log_sigmoid_forward maximum minimum fmax fmin max min "
    "amax amin aminmax cummax cummin median sort topk where"
)
#: Bounded: no infinity comes out of them, but where they are given bounds of that kind.
_BOUNDED = _names(
    "sigmoid special_expit tanh sin cos atan arctan erf special_erf erfc special_erfc sign hardsigmoid softmax "
    "_softmax _safe_softmax"
)


def can_make(op: str, kinds: int) -> bool:
    """Whether an operation on real numbers can have made values of these kinds of operands that hold no NaN.

    Args:
        op: a name such as ``exp`` or ``_softmax``, an underscore of in-place spelling taken off.
        kinds: bits of ``NAN``, ``POS_INF`` and ``NEG_INF``.

    Returns:
        False where that is impossible; true also of operations that are not known here.
    """
    if kinds & NAN and op in _NAN_OF_NAN:
        return False
    return not (kinds & (POS_INF | NEG_INF) and op in _BOUNDED)
