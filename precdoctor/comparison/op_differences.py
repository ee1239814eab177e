"""Finds the ops whose results differ between two lists, whether formats explain it, and what follows from it.

A paired op is compared with its counterpart, result by result. Of the unpaired ops in a gap between two pairs, only
results count that a paired op reads, and states written in place; intermediate results of compiled code or of a
decomposition do not. Such a result is compared with the nearest tensor of equal size: among the results of the other
list in the same gap, else in the whole other list. A result whose bits also occur in the other list is no difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from precdoctor.comparison.op_alignment import APART, Slot, align, distance, limit, roundoff
from precdoctor.comparison.op_lists import Op, OpTensor

#: Largest relative distance at which two results of unpaired ops can be counterparts.
_NEAR: Final = 0.5
#: Limit in a gap of ``n`` ops: the first times sqrt(n) unit roundoffs, plus the second times the largest distance of an
#: operand.
_PER_OP, _AMPLIFIED = 4.0, 8.0
#: Largest distance between a tensor and its cast, in unit roundoffs.
_CAST: Final = 2.0
#: Most tensors of one size among which the nearest is looked for.
_MOST_CANDIDATES: Final = 4096
#: Most pairs of results of one size in a gap to compare; if there are more (an optimizer's weights), results are paired
#: in order.
_MOST_PAIRS: Final = 1 << 16
#: Most parents of a difference; the latest are kept.
_MOST_PARENTS: Final = 16


@dataclass(frozen=True)
class Difference:
    """An op whose result differs.

    Attributes:
        a, b: the op in either list; None in the list that has no counterpart.
        made_a, made_b: the result that differs most, in either list; for an unpaired op, its result and the nearest
            tensor of the other list (for a cast, the operand), or None.
        error: relative L2 distance of these two; None if it is unknown, or nothing was near.
        limit: the largest distance that format and operands explain.
        reads_others: the op reads other tensors than its counterpart, and all these occur in both lists.
        parents: positions, in the list of differences, of the differences that reach its operands.
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
        """The op in A; if A has none, in B."""
        found = self.a or self.b
        assert found is not None, "one of them is there"
        return found

    @property
    def explained(self) -> bool:
        """Whether format and operands explain the difference."""
        return not self.reads_others and self.error is not None and self.error <= self.limit


@dataclass(frozen=True)
class PriorDifference:
    """A tensor that differs although no op of the step made it: the runs differed before the step."""

    op: Op
    tensor: OpTensor
    error: float | None


@dataclass(frozen=True)
class ListComparison:
    """The comparison of two lists of ops, of one step and rank.

    Attributes:
        ops_a, ops_b: number of ops in each list.
        paired: number of ops that both lists have.
        differences: the ops that differ, in order of execution.
        given: tensors that differed before the step, in the order in which ops read them.
    """

    step: int
    rank: int
    ops_a: int
    ops_b: int
    paired: int
    differences: tuple[Difference, ...]
    given: tuple[PriorDifference, ...]

    @property
    def first(self) -> Difference | None:
        """The first op with a result that differs in a bit."""
        return self.differences[0] if self.differences else None

    @property
    def beyond(self) -> Difference | None:
        """The first difference that format and operands do not explain; None if all are explained."""
        return next((d for d in self.differences if not d.explained), None)

    @property
    def origin(self) -> Difference | None:
        """The difference to report: the first unexplained one, else the first one; None if there is none."""
        return self.beyond or self.first

    @property
    def following(self) -> list[tuple[int, Difference]]:
        """``(position, difference)`` of each difference that :attr:`origin` reaches, in order of execution."""
        if self.origin is None:
            return []
        reached = {self.differences.index(self.origin)}
        for at, found in enumerate(self.differences):
            if not reached.isdisjoint(found.parents):
                reached.add(at)
        return [(at, self.differences[at]) for at in sorted(reached)[1:]]

    @property
    def outcome(self) -> Difference | None:
        """The last difference of the forward pass, or of the loss, that :attr:`origin` reaches; None if none is."""
        forward = [d for _, d in self.following if d.op.phase in ("forward", "loss") and d.error is not None]
        return forward[-1] if forward else None


def compare_lists(a: Sequence[Op], b: Sequence[Op], step: int = 0, rank: int = 0) -> ListComparison:
    """Compare list ``b`` with list ``a``, the reference."""
    return _Comparer(a, b).run(step, rank)


class _Side:
    """One of the two lists, with its tensors and readers indexed, and the distances found so far."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.prints: set[int] = set()
        self._by_size: dict[int, dict[int, OpTensor]] = {}
        #: By index of an op: ``(index of the reading op, operand)`` for each read of its results.
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
        #: By fingerprint of a tensor: its distance from its counterpart.
        self.errors: dict[int, float] = {}
        #: By index of an op: positions of the latest differences that reach its results.
        self.sources: dict[int, frozenset[int]] = {}

    def nearest(self, x: OpTensor) -> tuple[float | None, OpTensor | None]:
        """``(distance, tensor)`` of the nearest tensor with as many elements as ``x``; shapes may differ."""
        return _nearest(x, itertools.islice(self._by_size.get(x.numel, {}).values(), _MOST_CANDIDATES))

    def leaves(self, op: Op, x: OpTensor) -> bool:
        """Return whether result ``x`` of an unpaired op counts: a paired op reads it, it is a state written in place,
        or the op is compiled code.
        """
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
    """Return whether operand ``read`` is result ``made``, a view of it, or a part of it."""
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
    """``(distance, index in a, index in b)`` of counterparts, the nearest first; no tensor is in two pairs."""
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
    used: tuple[set[int], set[int]] = (set(), set())
    for found, i, j in sorted(apart):
        if i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            pairs.append((found, i, j))
    return pairs


class _Comparer:
    """Compares two lists; keeps the differences found so far."""

    def __init__(self, a: Sequence[Op], b: Sequence[Op]) -> None:
        self._a, self._b = _Side(a), _Side(b)
        self._slots: list[Slot] = align(a, b)
        self._found: list[Difference] = []
        self._given: list[PriorDifference] = []

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
                continue  # equal, or the distance is unknown
            most = limit(a, b, errors, max(x.norm or 0.0, y.norm or 0.0))
            difference = Difference(a, b, x, y, apart, most, others, self._parents(a, b))
            self._record_distance(x, y, apart)
            if worst is None or _excess(difference) > _excess(worst):
                worst = difference
        self._add(worst, [a], [b])

    def _errors_in(self, a: Op, b: Op, *, reordered: bool) -> list[tuple[float, float]]:
        """``(relative distance, norm)`` of each operand. Operands that differed before the step go to ``_given``."""
        errors = []
        for x, y in zip(a.reads, b.reads, strict=False):
            apart = distance(x, y)
            if x.producer is None and y.producer is None and apart != 0.0 and not self._b.has(x):
                self._given.append(PriorDifference(a, x, apart))
            recorded = max(self._a.error_of(x), self._b.error_of(y))
            apart = recorded if apart is None or reordered else apart
            result_size = max((m.numel for m in a.makes), default=1)
            spread = math.sqrt(max(1.0, result_size / max(x.numel, 1)))  # a broadcast operand counts once per use
            errors.append((apart, max(x.norm or 0.0, y.norm or 0.0) * spread))
        return errors

    def _reads_others(self, a: Op, b: Op) -> bool:
        """Return whether the op reads other tensors in B than in A, and all these occur in both lists.

        The operands are then reordered or replaced, not computed differently.
        """
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
            if any(op.is_compiled for op in others):  # any result of this side may be one of the compiled code
                kept = {id(x) for _, x in left}
                more = [(op, x) for op in ops for x in op.makes if id(x) not in kept and not other.has(x)]
                left.extend(more)
                inside |= {id(x) for _, x in more}
        most = self._gap_limit(a, b)
        indexed: list[tuple[int, Difference]] = []
        used: set[int] = set()
        for apart, i, j in _nearest_pairs([x for _, x in left_a], [y for _, y in left_b]):
            (op_a, x), (op_b, y) = left_a[i], left_b[j]
            self._record_distance(x, y, apart)
            if apart == 0:
                used |= {id(x), id(y)}
                continue
            what = Difference(op_a, op_b, x, y, apart, most, reads_others=False, parents=self._parents(op_a, op_b))
            indexed.append((op_a.index, what))
        used |= inside | {id(x) for _, d in indexed for x in (d.made_a, d.made_b)}
        indexed += [(op.index, self._alone(op, x, most, of_a=True)) for op, x in left_a if id(x) not in used]
        indexed += [(op.index, self._alone(op, y, most, of_a=False)) for op, y in left_b if id(y) not in used]
        indexed = [f for f in indexed if f[1].error != 0]
        for _, what in sorted(indexed, key=lambda f: (f[1].a is None, f[0])):
            self._add(what, [what.a] if what.a else [], [what.b] if what.b else [])
        for side, ops in ((self._a, a), (self._b, b)):  # ops inside the gap pass on the sources of their operands
            for op in ops:
                if op.index not in side.sources:
                    side.sources[op.index] = self._sources(side, op)

    def _casts(self, side: _Side, ops: Sequence[Op]) -> set[int]:
        """``id`` of the results that are a rounding cast of an operand, in a gap where the other list has no ops."""
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
        """The difference of a result without counterpart: compared with an operand, if it is a cast of that, else with
        the nearest tensor of the other list.
        """
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
        entering = [side.error_of(x) for side, ops in ((self._a, a), (self._b, b)) for op in ops for x in op.reads]
        own = _PER_OP * math.sqrt(max(len(a), len(b), 1)) * roundoff(tensors)
        return own + _AMPLIFIED * max(entering, default=0.0)

    # --- distances and parents ---------------------------------------------------------------------------------------

    def _record_distance(self, x: OpTensor, y: OpTensor, apart: float | None) -> None:
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
        """Positions of the latest differences that reach the op's operands, at most ``_MOST_PARENTS``."""
        found = [side.sources.get(x.producer, frozenset()) for x in op.reads if x.producer is not None]
        return frozenset(sorted(frozenset().union(*found))[-_MOST_PARENTS:])


def _excess(found: Difference) -> float:
    if found.error is None or not found.limit:
        return math.inf
    return found.error / found.limit if math.isfinite(found.limit) else 0.0
