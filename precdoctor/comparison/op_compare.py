"""Compares two runs op by op, for ``compare --ops``, on the steps whose ops both runs have recorded.

Also builds the tree of ops that a difference reaches, following the flow of values. Consecutive ops of one module are
one branch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.comparison.compare import FIRST_DIFFERENCE
from precdoctor.comparison.op_differences import Difference, ListComparison, compare_lists
from precdoctor.comparison.op_lists import listed, read_ops
from precdoctor.diagnosis.claims.finding import (
    Diagnosis,
    Finding,
    Location,
    Phase,
    RuleOutcome,
    Severity,
    Source,
    Status,
)
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.engine import describe, describe_recorder, view_of
from precdoctor.diagnosis.survey.rows import grouped
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import IncomparableRunsError
from precdoctor.runlog.reader import Run

_PHASES = {"recompute": Phase.BACKWARD, "script": Phase.DATA}


@dataclass(frozen=True)
class OpComparison:
    """The result of ``compare A B --ops``; A is the reference.

    Attributes:
        a, b: the runs' paths.
        lists: the compared lists, ordered by step and rank.
        notes: remarks, one sentence each.
        diagnosis: the finding, in the form that every report takes.
    """

    a: str
    b: str
    lists: tuple[ListComparison, ...]
    notes: tuple[str, ...]
    diagnosis: Diagnosis

    @property
    def first(self) -> ListComparison | None:
        """Of the first step with a difference: the first list with an unexplained one, else its first list; None if all
        lists are equal.
        """
        return _first(self.lists)

    @property
    def origin(self) -> Difference | None:
        """The difference to report, of :attr:`first`; None if there is none."""
        return None if self.first is None else self.first.origin


def _first(lists: Sequence[ListComparison]) -> ListComparison | None:
    differing = [x for x in lists if x.differences or x.given]
    step = differing[0].step if differing else None
    return next((x for x in differing if x.step == step and x.beyond), differing[0] if differing else None)


def compare_ops(a: Run, b: Run) -> OpComparison:
    """Compare the ops of run ``b`` with those of run ``a``, the reference.

    Raises:
        NothingRecordedError: a run holds no list of ops, or no training step.
        IncomparableRunsError: no step and rank is listed in both runs.
        RunUnreadableError: a list is damaged or cannot be read.
    """
    keys_a, keys_b = listed(a), listed(b)
    common = [key for key in keys_a if key in set(keys_b)]
    if not common:
        steps = " and ".join(", ".join(map(str, sorted({s for s, _ in keys}))) for keys in (keys_a, keys_b))
        raise IncomparableRunsError(
            f"{b.path} cannot be compared with {a.path} op by op: no step is listed in both (steps {steps}); "
            "record both with the same --ops"
        )
    lists = tuple(compare_lists(read_ops(a, key), read_ops(b, key), *key) for key in common)
    found = _first(lists)
    view = view_of(b)
    code, name = FIRST_DIFFERENCE.code, FIRST_DIFFERENCE.name
    ops = sum(x.paired for x in lists)
    if found is None:
        reason = f"{plural(ops, 'op')} of {plural(len(lists), 'list')} equal in every bit"
        outcome = RuleOutcome(code, name, Status.PASSED, reason)
    else:
        outcome = RuleOutcome(code, name, Status.FAILED, f"step {found.step}")
    run = {**describe(view), "compared_with": describe(view_of(a))}
    findings = [] if found is None else [_finding(found)]
    diagnosis = Diagnosis(run=run, findings=findings, rules=(outcome,), recorder=describe_recorder(view))
    return OpComparison(str(a.path), str(b.path), lists, tuple(_notes(a, b, lists)), diagnosis)


def _notes(a: Run, b: Run, lists: Sequence[ListComparison]) -> list[str]:
    notes = []
    for name, run in (("first", a), ("second", b)):
        if any(e["data"].get("complete") is False for e in RunView(run).events_of("ops")):
            notes.append(f"a list of the {name} run is cut: it holds the first ops of the step only")
    if any(d.op.is_compiled or (d.b is not None and d.b.is_compiled) for x in lists for d in x.differences):
        notes.append("compiled code is one op: what happens inside is not listed")
    return notes


def place_of(difference: Difference) -> str:
    """Op and module: ``aten.add.Tensor in blocks.1.norm``, with the op of B if that is another one."""
    op, other = difference.op, difference.b
    name = op.name if other is None or other.name == op.name else f"{op.name} ({other.name} in B)"
    return f"{name} in {op.module or op.root or f'the {op.phase} code'}"


def _finding(found: ListComparison) -> Finding:
    code, name = FIRST_DIFFERENCE.code, FIRST_DIFFERENCE.name
    origin = found.origin
    if origin is None:
        given = found.given[0]
        what = given.tensor.name or f"an operand of {given.op.name}"
        location = Location(root=given.op.root or None, module=given.op.module, rank=found.rank, step=found.step)
        message = f"{what} differs although no op of the step has made it."
        return Finding(code, name, Severity.INFO, 1.0, f"the runs were apart before step {found.step}: {what}", message,
                       location)  # fmt: skip
    op, beyond = origin.op, not origin.explained
    source = Source(op.file, op.line, op.code) if op.file is not None and op.line is not None else None
    location = Location(
        root=op.root or None,
        module=op.module,
        phase=_PHASES.get(op.phase) or Phase(op.phase),
        rank=found.rank,
        step=found.step,
        op=op.name,
        source=source,
    )
    title = f"{'the runs part' if beyond else 'the first bits differ'} at step {found.step}: {place_of(origin)}"
    return Finding(
        code,
        name,
        Severity.WARNING if beyond else Severity.INFO,
        1.0,
        title,
        reason_of(origin),
        location,
        evidence={"relative_error": origin.error, "limit": origin.limit, "explained": origin.explained},
    )


def reason_of(difference: Difference) -> str:
    """How the op differs between the runs, and whether its format explains it, in one or two sentences."""
    a, b, error = difference.a, difference.b, difference.error
    if a is None or b is None:
        only = "A" if b is None else "B"
        op, near = difference.op, difference.made_b if b is None else difference.made_a
        if difference.explained and near is not None and any(near is x for x in op.reads):
            made = op.makes[0].dtype
            return f"Only {only} runs this op: it casts {near.dtype} to {made} and rounds by {error:.2g} (relative L2)."
        if difference.explained:
            return f"Only {only} runs this op; its result is within {error:.2g} of a tensor of the other run."
        return f"Only {only} runs this op, and the other run has no tensor like its result."
    if difference.reads_others:
        return "It reads other tensors in B than in A: the code computes in another order, or from other values."
    outcome = "cannot be compared" if error is None else f"differ by {error:.2g} (relative L2)"
    where = "within" if difference.explained else "beyond"
    limit = f"{where} the limit {difference.limit:.2g} of its format and operands"
    if a.settings != b.settings and a.name == b.name:
        return f"{_arguments(a.settings, b.settings)} Its results {outcome}, {limit}."
    return f"Its results {outcome}, {limit}."


def _arguments(a: str | None, b: str | None) -> str:
    """A sentence on the non-tensor arguments that differ; ``a`` and ``b`` are JSON from the logs, possibly invalid."""
    try:
        ours, theirs = ({} if x is None else dict(json.loads(x)) for x in (a, b))
    except (TypeError, ValueError, RecursionError):
        return f"Its arguments are {a} in A and {b} in B."
    absent = "not given"
    pairs = {name: (ours.get(name, absent), theirs.get(name, absent)) for name in {**ours, **theirs}}
    changes = (f"`{name}` is {x} in A and {y} in B" for name, (x, y) in pairs.items() if x != y)
    return f"Argument {', '.join(changes)}."


@dataclass(frozen=True)
class Branch:
    """A branch of the tree: consecutive differences of one module and phase.

    Attributes:
        depth: indentation. The child with the largest subtree has its parent's depth, the other children one more.
        ops: the differences, in order.
        growth: distance at the end of the branch over that at the origin; None if either is unknown or infinite.
    """

    depth: int
    ops: Sequence[Difference]
    growth: float | None

    @property
    def end(self) -> Difference:
        """The last difference of the branch."""
        return self.ops[-1]


def branches(found: ListComparison) -> list[Branch]:
    """The branches of the tree below the origin, depth first; smaller subtrees before larger ones."""
    origin, following = found.origin, found.following
    if origin is None:
        return []
    differences = dict(following)
    first = found.differences.index(origin)
    known = {first, *differences}
    children = grouped((max(p for p in what.parents if p in known), at) for at, what in following)
    sizes: dict[int, int] = {}
    for at, _ in reversed(following):  # children come after their parents
        sizes[at] = 1 + sum(sizes[child] for child in children.get(at, ()))
    out: list[Branch] = []
    waiting = _ordered(children.get(first, []), sizes, 0)
    while waiting:
        at, depth = waiting.pop()
        row = [at]
        while len(below := children.get(row[-1], [])) == 1 and _same_place(differences[row[-1]], differences[below[0]]):
            row += below
        ops = [differences[n] for n in row]
        out.append(Branch(depth, ops, _growth(origin, ops[-1])))
        waiting += _ordered(children.get(row[-1], []), sizes, depth)
    return out


def _ordered(children: Sequence[int], sizes: dict[int, int], depth: int) -> list[tuple[int, int]]:
    """``(child, depth)`` as a stack: the child with the smallest subtree is last, and so popped first."""
    ranked = sorted(children, key=lambda at: (-sizes[at], at))
    return [(at, depth + (n > 0)) for n, at in enumerate(ranked)]


def _same_place(a: Difference, b: Difference) -> bool:
    return (a.op.module, a.op.phase) == (b.op.module, b.op.phase)


def _growth(origin: Difference, end: Difference) -> float | None:
    if origin.error is None or end.error is None or not 0 < origin.error < float("inf"):
        return None
    return end.error / origin.error if end.error < float("inf") else None
