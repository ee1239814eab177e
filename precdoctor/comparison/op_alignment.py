"""Which op of one list is which of another: the longest common order, by what an op is and where it stands.

Ops of one side only (the casts of autocast, the parts of a decomposition, another optimizer's kernels) stay alone. The
first pass goes by op, module, source line and shapes; what lies between its matches is gone through again without the
lines, as after an edit, then without the shapes. In each pass the n-th of equal ops is the n-th of the other list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from precdoctor.comparison.op_lists import Op

#: Indices into both lists; None on the side that has no such op.
Slot = tuple[int | None, int | None]


def _strictly(op: Op) -> Hashable:
    return _loosely(op), op.code or op.source


def _loosely(op: Op) -> Hashable:
    return (op.name, op.module, op.phase, tuple(x.shape for x in (*op.reads, *op.makes)))


def _by_name(op: Op) -> Hashable:
    return op.name, op.module, op.phase, tuple(x.shape for x in op.makes)


_PASSES: tuple[Callable[[Op], Hashable], ...] = (_strictly, _loosely, _by_name)


def align(a: Sequence[Op], b: Sequence[Op]) -> list[Slot]:
    """Every op of both lists, once: pairs in order, and between two of them what is of ``a`` alone, then of ``b``."""
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
    found: list[tuple[int, int]] = []
    at_a = at_b = 0
    for block in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_matching_blocks():  # the last one is empty
        between_a, between_b = a[at_a : block.a], b[at_b : block.b]
        found += _matches(between_a, between_b, first_a + at_a, first_b + at_b, passes[1:])
        found += [(first_a + block.a + n, first_b + block.b + n) for n in range(block.size)]
        at_a, at_b = block.a + block.size, block.b + block.size
    return found


def _numbered(keys: Iterable[Hashable]) -> list[tuple[Hashable, int]]:
    """Each with how often it came before."""
    seen: Counter[Hashable] = Counter()
    out = []
    for key in keys:
        out.append((key, seen[key]))
        seen[key] += 1
    return out
