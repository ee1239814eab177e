"""Aligns two lists of ops, and computes distances between tensors and the limits on them.

The alignment is a longest common subsequence of the ops' keys. Ops of one side only (the casts of autocast, the parts
of a decomposition, another optimizer's kernels) stay unpaired. In the first pass the key is op, module, source line and
shapes; the ops between its matches are aligned again without the lines, which an edit moves, then without the shapes of
operands. In each pass the n-th of several equal ops matches the n-th in the other list.

Distances are L2, relative to the larger tensor, estimated from sketches, with a standard deviation of about a quarter
of the value. An op in a format of unit roundoff ``u`` may round its result by ``u``, and a sum of ``n`` terms that is
accumulated in FP32 by ``sqrt(n)`` units of FP32. Differences of its operands may reach the result amplified.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from precdoctor.comparison.op_lists import Op, OpTensor
from precdoctor.comparison.summary import unit_roundoff

#: Indices into both lists; None on the side that has no such op.
Slot = tuple[int | None, int | None]
#: Allowed rounding error of a result, in unit roundoffs; as in ``comparison.rounding``.
_ROUNDINGS = 4.0
#: Factor by which a difference may grow in one op. Chosen empirically.
_AMPLIFIED = 8.0
_SINGLE = unit_roundoff("float32")
_ADDS = ("add", "sub", "rsub", "sum", "mean", "cumsum", "lerp", "addcmul", "addcdiv", "addmm", "baddbmm")
#: Distance of tensors whose numbers of NaN or infinities differ, or whose bits differ while their sketches are missing.
APART = math.inf


def _key_with_line(op: Op) -> Hashable:
    return _key_with_shapes(op), op.code or op.source


def _key_with_shapes(op: Op) -> Hashable:
    return (op.name, op.module, op.phase, tuple(x.shape for x in (*op.reads, *op.makes)))


def _key_with_results(op: Op) -> Hashable:
    return op.name, op.module, op.phase, tuple(x.shape for x in op.makes)


_PASSES: tuple[Callable[[Op], Hashable], ...] = (_key_with_line, _key_with_shapes, _key_with_results)


def align(a: Sequence[Op], b: Sequence[Op]) -> list[Slot]:
    """Every op of both lists once: the pairs in order; between two pairs the unpaired ops of ``a``, then of ``b``."""
    pairs = _matches(a, b, 0, 0, _PASSES)
    slots: list[Slot] = []
    at_a = at_b = 0
    for i, j in [*pairs, (len(a), len(b))]:
        slots += [(k, None) for k in range(at_a, i)]
        slots += [(None, k) for k in range(at_b, j)]
        if i < len(a):
            slots.append((i, j))
        at_a, at_b = i + 1, j + 1
    return slots


def _matches(
    a: Sequence[Op], b: Sequence[Op], first_a: int, first_b: int, passes: Sequence[Callable[[Op], Hashable]]
) -> list[tuple[int, int]]:
    if not (a and b and passes):
        return []
    keys_a, keys_b = (_numbered(map(passes[0], ops)) for ops in (a, b))
    pairs: list[tuple[int, int]] = []
    at_a = at_b = 0
    for block in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_matching_blocks():  # the last block is empty
        between_a, between_b = a[at_a : block.a], b[at_b : block.b]
        pairs += _matches(between_a, between_b, first_a + at_a, first_b + at_b, passes[1:])
        pairs += [(first_a + block.a + n, first_b + block.b + n) for n in range(block.size)]
        at_a, at_b = block.a + block.size, block.b + block.size
    return pairs


def _numbered(keys: Iterable[Hashable]) -> list[tuple[Hashable, int]]:
    """Each key with the number of equal keys before it."""
    counts: Counter[Hashable] = Counter()
    out = []
    for key in keys:
        out.append((key, counts[key]))
        counts[key] += 1
    return out


def distance(a: OpTensor, b: OpTensor) -> float | None:
    """Relative L2 distance, element by element in logical order; shapes may differ.

    Returns:
        0 for equal bits; infinite if the numbers of NaN or infinities differ, or the bits do and there is no sketch;
        None if it is unknown, as for tensors of different sizes.
    """
    if a.fingerprint is not None and a.fingerprint == b.fingerprint:
        return 0.0
    if a.numel != b.numel or (a.bad is None) != (b.bad is None):
        return None
    if a.bad != b.bad:
        return APART
    if a.sketch is None or b.sketch is None:
        if a.bad is not None and a.amax is None and b.amax is None:
            return 0.0  # both without a finite element, with equal numbers of NaN and infinities
        return None if a.fingerprint is None or b.fingerprint is None else APART
    size = max(a.norm or 0.0, b.norm or 0.0)
    apart = math.dist(a.sketch, b.sketch)
    if not math.isfinite(apart + size):  # sums of squares overflowed FP64
        return None
    return apart / size if size > 0 else 0.0


def roundoff(tensors: Sequence[OpTensor]) -> float:
    """Unit roundoff of the narrowest format among the tensors; that of FP32 if none is floating-point."""
    units = [_unit(x.dtype) for x in tensors if x.bad is not None]
    return max(units, default=_SINGLE)


@functools.cache
def _unit(dtype: str) -> float:
    return unit_roundoff(dtype.replace("complex128", "float64").replace("complex64", "float32"))


def limit(a: Op, b: Op, errors: Sequence[tuple[float, float]], size: float) -> float:
    """Largest relative distance of the results of ``a`` and ``b`` that formats and operands explain.

    ``errors`` has relative distance and norm of each operand; ``size`` is the norm of the result.
    """
    tensors = [*a.reads, *a.makes, *b.reads, *b.makes]
    own = _ROUNDINGS * (roundoff(tensors) + math.sqrt(terms(a)) * min(_SINGLE, roundoff(tensors)))
    passed = sum(apart for apart, _ in errors)
    plain = a.name.removeprefix("aten.").removeprefix("_foreach_").partition(".")[0].rstrip("_")
    if plain in _ADDS and size > 0 and math.isfinite(passed):  # cancellation leaves the operands' absolute differences
        passed = max(passed, sum(apart * norm for apart, norm in errors) / size)
    return own + _AMPLIFIED * passed


def terms(op: Op) -> float:
    """Estimated number of terms summed for one element of the result: for a matrix product its inner dimension."""
    operand_sizes = sorted((x.numel for x in op.reads if x.bad is not None), reverse=True)[:2]
    result_size = max((x.numel for x in op.makes), default=0)
    if not operand_sizes or not result_size:
        return 1.0
    plain = op.name.partition(".")[2]
    if len(operand_sizes) == 2 and any(word in plain for word in ("mm", "conv", "attention", "dot", "linear")):
        return max(1.0, math.sqrt(operand_sizes[0] * operand_sizes[1] / result_size))
    return max(1.0, operand_sizes[0] / result_size)
