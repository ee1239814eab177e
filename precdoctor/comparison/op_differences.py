"""Where two lists of ops part, beyond what formats explain, and what follows from it.

An op that both lists have is compared with its counterpart, result by result. Of the ops that one list has alone only
those results count that an op of both reads, and states that stay: not the inside of compiled code or of a
decomposition. Such a result is compared with the nearest one of its size: of the other list's own ops in the same gap,
else of the whole other list. A result that the other list also has, in every bit, differs in nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from precdoctor.comparison.op_alignment import APART, Slot, align, distance, limit, roundoff
from precdoctor.comparison.op_lists import Op, OpTensor

#: Results of ops of one list only that are further apart than this are no counterparts of each other.
_NEAR: Final = 0.5
#: Units of roundoff per square root of an op that other ops in a gap may add up to, and what the gap may amplify.
_PER_OP, _AMPLIFIED = 4.0, 8.0
#: Units of roundoff between a tensor and its cast.
_CAST: Final = 2.0
#: Results of one size that one is held against.
_MOST: Final = 4096
#: Pairs of results of one size in a gap that are tried; of more, as of an optimizer's weights, the order decides.
_MOST_PAIRS: Final = 1 << 16
#: Differences that one is said to follow from.
_MOST_PARENTS: Final = 16


@dataclass(frozen=True)
class Difference:
    """An op whose result differs.

    Attributes:
        a, b: the op in either list; None where it has no counterpart.
        made_a, made_b: its result that differs most, or the nearest one of the other list.
        error: their relative L2 distance; None where nothing was near.
        limit: how large it may be, by format and by what went in.
        reads_others: its operands are other tensors of the run than those of its counterpart.
        parents: positions, in the list of differences, of those that this one follows from.
    """

    a: Op | None
    b: Op | None
    made_a: OpTensor | None
    made_b: OpTensor | None
    error: float | None
    limit: float
    reads_others: bool
    parents: frozenset[int]

    @property
    def op(self) -> Op:
        """In A, or else in B."""
        found = self.a or self.b
        assert found is not None, "one of them is there"
        return found

    @property
    def explained(self) -> bool:
        """Whether format and operands explain it."""
        return not self.reads_others and self.error is not None and self.error <= self.limit


@dataclass(frozen=True)
class Given:
    """A tensor that no op of the step has made, and that differs: the runs were apart before."""

    op: Op
    tensor: OpTensor
    error: float | None


@dataclass(frozen=True)
class ListComparison:
    """Two lists of one step and rank.

    Attributes:
        ops_a, ops_b: how many ops each has.
        paired: how many both have.
        differences: in order of execution.
        given: what differed before the step, as ops read it.
    """

    step: int
    rank: int
    ops_a: int
    ops_b: int
    paired: int
    differences: tuple[Difference, ...]
    given: tuple[Given, ...]

    @property
    def first(self) -> Difference | None:
        """The first op with a result that differs in a bit."""
        return self.differences[0] if self.differences else None

    @property
    def beyond(self) -> Difference | None:
        """The first one that differs by more than is explained."""
        return next((d for d in self.differences if not d.explained), None)

    @property
    def origin(self) -> Difference | None:
        """What to look at: the first one beyond what is explained, else the first one."""
        return self.beyond or self.first

    def following(self, origin: Difference) -> list[tuple[int, Difference]]:
        """Positions and differences of what follows from one of them, in order of execution."""
        reached = {self.differences.index(origin)}
        for at, found in enumerate(self.differences):
            if not reached.isdisjoint(found.parents):
                reached.add(at)
        return [(at, self.differences[at]) for at in sorted(reached)[1:]]

    def outcome(self, origin: Difference) -> Difference | None:
        """The last op of the forward pass, or of the loss, that follows from it."""
        forward = [d for _, d in self.following(origin) if d.op.phase in ("forward", "loss") and d.error is not None]
        return forward[-1] if forward else None


def compare_lists(a: Sequence[Op], b: Sequence[Op], step: int = 0, rank: int = 0) -> ListComparison:
    """Hold list ``b`` against list ``a``."""
    return _Comparer(a, b).run(step, rank)


class _Side:
    """What is known of one list."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.prints: set[int] = set()
        self._by_size: dict[int, dict[int, OpTensor]] = {}
        #: By op: of those that read its results, index and what they read.
        self._readers: dict[int, list[tuple[int, OpTensor]]] = {}
        for op in ops:
            for x in op.reads:
                if x.producer is not None:
                    self._readers.setdefault(x.producer, []).append((op.index, x))
            for x in (*op.reads, *op.makes):
                if x.fingerprint is not None:
                    self.prints.add(x.fingerprint)
                    self._by_size.setdefault(x.numel, {}).setdefault(x.fingerprint, x)
        self.paired: set[int] = set()
        #: By fingerprint: how far it is from its counterpart; by op: the differences that its results come from.
        self.errors: dict[int, float] = {}
        self.sources: dict[int, frozenset[int]] = {}

    def nearest(self, x: OpTensor) -> tuple[float | None, OpTensor | None]:
        """Of all tensors of the list that have as many elements; views of other shapes hold them in the same order."""
        return _nearest(x, itertools.islice(self._by_size.get(x.numel, {}).values(), _MOST))

    def leaves(self, op: Op, x: OpTensor) -> bool:
        """Whether an op of both lists reads this result of one that the other list has not, or it is a state."""
        readers = self._readers.get(op.index, [])
        if op.is_compiled:
            return True
        if not readers:
            return op.name.partition(".")[2].partition(".")[0].endswith("_")
        return any(index in self.paired and _is_view_of(read, x) for index, read in readers)

    def error_of(self, x: OpTensor) -> float:
        return self.errors.get(x.fingerprint, 0.0) if x.fingerprint is not None else 0.0

    def has(self, x: OpTensor) -> bool:
        return x.fingerprint is None or x.fingerprint in self.prints


def _is_view_of(read: OpTensor, made: OpTensor) -> bool:
    """Whether what an op read is what another one made, in whatever shape, or a part of it."""
    if read.numel < made.numel:
        return True
    same = (read.numel, read.amax, read.bad) == (made.numel, made.amax, made.bad)
    return read.fingerprint == made.fingerprint or same


def _nearest(x: OpTensor, among: Iterable[OpTensor]) -> tuple[float | None, OpTensor | None]:
    best: tuple[float | None, OpTensor | None] = (None, None)
    for other in among:
        apart = distance(x, other)
        if apart is not None and math.isfinite(apart) and (best[0] is None or apart < best[0]):
            best = (apart, other)
    return best


def _nearest_pairs(a: Sequence[OpTensor], b: Sequence[OpTensor]) -> list[tuple[float, int, int]]:
    """Distances and positions of those that belong together, the nearest first; each is in one pair at most."""
    sizes: dict[int, tuple[list[int], list[int]]] = {}
    for side, tensors in enumerate((a, b)):
        for at, x in enumerate(tensors):
            sizes.setdefault(x.numel, ([], []))[side].append(at)
    apart = []
    for mine, theirs in sizes.values():
        few = len(mine) * len(theirs) <= _MOST_PAIRS
        for i, j in itertools.product(mine, theirs) if few else zip(mine, theirs, strict=False):
            if (found := distance(a[i], b[j])) is not None and found <= _NEAR:
                apart.append((found, i, j))
    pairs: list[tuple[float, int, int]] = []
    taken: tuple[set[int], set[int]] = (set(), set())
    for found, i, j in sorted(apart):
        if i not in taken[0] and j not in taken[1]:
            taken[0].add(i)
            taken[1].add(j)
            pairs.append((found, i, j))
    return pairs


class _Comparer:
    """One comparison."""

    def __init__(self, a: Sequence[Op], b: Sequence[Op]) -> None:
        self._a, self._b = _Side(a), _Side(b)
        self._slots: list[Slot] = align(a, b)
        self._found: list[Difference] = []
        self._given: list[Given] = []

    def run(self, step: int, rank: int) -> ListComparison:
        a, b = self._a, self._b
        for i, j in self._slots:
            if i is not None and j is not None:
                a.paired.add(a.ops[i].index)
                b.paired.add(b.ops[j].index)
        for alone, slots in itertools.groupby(self._slots, lambda slot: None in slot):
            if alone:
                mine = list(slots)
                self._gap([a.ops[i] for i, _ in mine if i is not None], [b.ops[j] for _, j in mine if j is not None])
            else:
                for i, j in slots:
                    assert i is not None
                    assert j is not None
                    self._pair(a.ops[i], b.ops[j])
        sizes = len(a.ops), len(b.ops)
        return ListComparison(step, rank, *sizes, len(a.paired), tuple(self._found), tuple(self._given))

    # --- ops of both lists -------------------------------------------------------------------------------------------

    def _pair(self, a: Op, b: Op) -> None:
        others = self._reads_others(a, b)
        errors = self._errors_in(a, b, reordered=others)
        worst: Difference | None = None
        for x, y in zip(a.makes, b.makes, strict=False):
            apart = distance(x, y)
            if not apart and (apart is None or x.dtype != y.dtype or x.fingerprint == y.fingerprint):
                continue  # equal, or nothing is known
            most = limit(a, b, errors, max(x.norm or 0.0, y.norm or 0.0))
            found = Difference(a, b, x, y, apart, most, others, self._parents(a, b))
            self._note(x, y, apart)
            if worst is None or _excess(found) > _excess(worst):
                worst = found
        self._add(worst, [a], [b])

    def _errors_in(self, a: Op, b: Op, *, reordered: bool) -> list[tuple[float, float]]:
        """How far each operand is apart, and its norm."""
        errors = []
        for x, y in zip(a.reads, b.reads, strict=False):
            apart = distance(x, y)
            if x.producer is None and y.producer is None and apart != 0.0 and not self._b.has(x):
                self._given.append(Given(a, x, apart))
            known = max(self._a.error_of(x), self._b.error_of(y))
            apart = known if apart is None or reordered else apart
            made = max((m.numel for m in a.makes), default=1)
            spread = math.sqrt(max(1.0, made / max(x.numel, 1)))  # a broadcast operand counts as often as it is used
            errors.append((apart, max(x.norm or 0.0, y.norm or 0.0) * spread))
        return errors

    def _reads_others(self, a: Op, b: Op) -> bool:
        """Whether operands differ that the other list also has: the op reads them in another place, or others."""
        mine, theirs = ({x.fingerprint for x in op.reads if x.numel > 1} for op in (a, b))
        apart = [x for x in a.reads if x.numel > 1 and x.fingerprint not in theirs]
        apart_b = [y for y in b.reads if y.numel > 1 and y.fingerprint not in mine]
        return bool(apart and apart_b) and all(map(self._b.has, apart)) and all(map(self._a.has, apart_b))

    # --- ops of one list ---------------------------------------------------------------------------------------------

    def _gap(self, a: list[Op], b: list[Op]) -> None:
        casts = self._casts(self._a, a) if not b else self._casts(self._b, b) if not a else set()
        left_a, left_b = (
            [(op, x) for op in ops for x in op.makes if (side.leaves(op, x) or id(x) in casts) and not other.has(x)]
            for side, other, ops in ((self._a, self._b, a), (self._b, self._a, b))
        )
        inside: set[int] = set()
        for ops, others, left, other in ((a, b, left_a, self._b), (b, a, left_b, self._a)):
            if any(op.is_compiled for op in others):  # code that was compiled in parts: any result may be that of one
                kept = {id(x) for _, x in left}
                more = [(op, x) for op in ops for x in op.makes if id(x) not in kept and not other.has(x)]
                left.extend(more)
                inside |= {id(x) for _, x in more}
        most = self._gap_limit(a, b)
        found: list[tuple[int, Difference]] = []
        used: set[int] = set()
        for apart, i, j in _nearest_pairs([x for _, x in left_a], [y for _, y in left_b]):
            (op_a, x), (op_b, y) = left_a[i], left_b[j]
            self._note(x, y, apart)
            if apart == 0:
                used |= {id(x), id(y)}
                continue
            what = Difference(op_a, op_b, x, y, apart, most, reads_others=False, parents=self._parents(op_a, op_b))
            found.append((op_a.index, what))
        used |= inside | {id(x) for _, d in found for x in (d.made_a, d.made_b)}
        found += [(op.index, self._alone(op, x, most, of_a=True)) for op, x in left_a if id(x) not in used]
        found += [(op.index, self._alone(op, y, most, of_a=False)) for op, y in left_b if id(y) not in used]
        found = [f for f in found if f[1].error != 0]
        for _, what in sorted(found, key=lambda f: (f[1].a is None, f[0])):
            self._add(what, [what.a] if what.a else [], [what.b] if what.b else [])
        for side, ops in ((self._a, a), (self._b, b)):  # what stays inside hands on where it comes from
            for op in ops:
                if op.index not in side.sources:
                    side.sources[op.index] = self._sources(side, op)

    def _casts(self, side: _Side, ops: Sequence[Op]) -> set[int]:
        """Of ops that the other list has nothing in place of: results that are what was read, in another format."""
        found = set()
        for op in ops:
            for x in op.makes:
                apart, near = _nearest(x, op.reads)
                if apart is not None and near is not None and apart <= _CAST * roundoff([near, x]):
                    if x.fingerprint is not None:
                        side.errors[x.fingerprint] = apart + side.error_of(near)
                    if apart > 0:
                        found.add(id(x))
        return found

    def _alone(self, op: Op, x: OpTensor, most: float, *, of_a: bool) -> Difference:
        """A result without a counterpart: a cast of what the op reads, or near to some tensor of the other list."""
        side, other = (self._a, self._b) if of_a else (self._b, self._a)
        parents = self._sources(side, op)
        apart, near = _nearest(x, op.reads)
        if apart is not None and near is not None and apart <= (cast := _CAST * roundoff([near, x])):
            most, known = cast, side.error_of(near)
        else:
            apart, near = other.nearest(x)
            most += _AMPLIFIED * sum(map(side.error_of, op.reads))
            known = 0.0
            if apart is not None and apart > most:
                apart, near = None, None
        if x.fingerprint is not None and apart is not None:
            side.errors[x.fingerprint] = apart + known
        if of_a:
            return Difference(op, None, x, near, apart, most, reads_others=False, parents=parents)
        return Difference(None, op, near, x, apart, most, reads_others=False, parents=parents)

    def _gap_limit(self, a: Sequence[Op], b: Sequence[Op]) -> float:
        tensors = [x for op in (*a, *b) for x in (*op.reads, *op.makes)]
        entering = [self._a.error_of(x) for op in a for x in op.reads] + [
            self._b.error_of(x) for op in b for x in op.reads
        ]
        own = _PER_OP * math.sqrt(max(len(a), len(b), 1)) * roundoff(tensors)
        return own + _AMPLIFIED * max(entering, default=0.0)

    # --- what follows from what --------------------------------------------------------------------------------------

    def _note(self, x: OpTensor, y: OpTensor, apart: float | None) -> None:
        for side, tensor in ((self._a, x), (self._b, y)):
            if tensor.fingerprint is not None:
                side.errors[tensor.fingerprint] = APART if apart is None else apart

    def _add(self, found: Difference | None, a: Iterable[Op], b: Iterable[Op]) -> None:
        if found is not None:
            self._found.append(found)
            for side, ops in ((self._a, a), (self._b, b)):
                side.sources |= {op.index: frozenset((len(self._found) - 1,)) for op in ops}

    def _parents(self, a: Op, b: Op) -> frozenset[int]:
        return self._sources(self._a, a) | self._sources(self._b, b)

    @staticmethod
    def _sources(side: _Side, op: Op) -> frozenset[int]:
        """The latest differences that operands come from."""
        found = [side.sources.get(x.producer, frozenset()) for x in op.reads if x.producer is not None]
        return frozenset(sorted(frozenset().union(*found))[-_MOST_PARENTS:])


def _excess(found: Difference) -> float:
    if found.error is None or not found.limit:
        return math.inf
    return found.error / found.limit if math.isfinite(found.limit) else 0.0
