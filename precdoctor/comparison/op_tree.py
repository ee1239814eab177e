"""What follows from a difference, as a tree: ops as values flow, those of one module in a row as one entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.comparison.op_differences import Difference, ListComparison


@dataclass(frozen=True)
class Branch:
    """One or several ops in a row, of one module and phase.

    Attributes:
        depth: how many branchings lie above it; the largest part of the tree goes on at the depth of its parent.
        ops: the differences, in order.
        growth: the distance at its end over that at the origin; None where one of them is not known, or infinite.
    """

    depth: int
    ops: Sequence[Difference]
    growth: float | None

    @property
    def end(self) -> Difference:
        """The last op."""
        return self.ops[-1]


def branches(found: ListComparison, origin: Difference) -> list[Branch]:
    """The tree below ``origin``, depth first: what ends soon before what goes on."""
    following = found.following(origin)
    differences = dict(following)
    first = found.differences.index(origin)
    children: dict[int, list[int]] = {}
    for at, what in following:
        children.setdefault(max(p for p in what.parents if p == first or p in differences), []).append(at)
    sizes: dict[int, int] = {}
    for at, _ in reversed(following):  # children come after their parents
        sizes[at] = 1 + sum(sizes[child] for child in children.get(at, ()))
    out: list[Branch] = []
    waiting = _ordered(children.get(first, []), sizes, 0)
    while waiting:
        at, depth = waiting.pop()
        row = [at]
        while len(below := children.get(row[-1], [])) == 1 and _together(differences[row[-1]], differences[below[0]]):
            row += below
        ops = [differences[n] for n in row]
        out.append(Branch(depth, ops, _growth(origin, ops[-1])))
        waiting += _ordered(children.get(row[-1], []), sizes, depth)
    return out


def _ordered(children: Sequence[int], sizes: dict[int, int], depth: int) -> list[tuple[int, int]]:
    """A stack of children: on top those with the least below them, at the bottom the one that goes on."""
    ranked = sorted(children, key=lambda at: (-sizes[at], at))
    return [(at, depth + (n > 0)) for n, at in enumerate(ranked)]


def _together(a: Difference, b: Difference) -> bool:
    return (a.op.module, a.op.phase) == (b.op.module, b.op.phase)


def _growth(origin: Difference, end: Difference) -> float | None:
    if origin.error is None or end.error is None or not 0 < origin.error < float("inf"):
        return None
    return end.error / origin.error if end.error < float("inf") else None
