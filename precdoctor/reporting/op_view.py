"""Prints an op-by-op comparison of two runs: the first op that differs, its figures, and the tree of ops it reaches;
also its JSON section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from precdoctor.comparison.op_compare import Branch, OpComparison, branches, place_of, reason_of
from precdoctor.comparison.op_differences import Difference, ListComparison
from precdoctor.comparison.op_lists import Op, OpTensor
from precdoctor.diagnosis.claims.words import plural
from precdoctor.reporting.tables import Name, folded, grid, right, table
from precdoctor.reporting.text import clean, number
from precdoctor.runlog.atomic import jsonable

#: Most branches of the tree on a screen, deepest indentation, and most differences in the JSON report.
TOP, _DEPTH, JSON_OPS = 16, 6, 500
#: Most operands, and most results, shown of an op.
_TENSORS = 8


def print_ops(found: OpComparison, console: Console, *, concise: bool = False) -> None:
    """Print the comparison; ``concise`` leaves out the operands and the tree."""
    for name, path in (("A", found.a), ("B", found.b)):
        console.print(Text.assemble((f"{name}  ", "pd.label"), clean(path)), soft_wrap=True)
    for line in scope(found):
        console.print(Text(line, "pd.quiet"))
    console.print()
    style, *lines = verdict(found)
    console.print(Text(lines[0], style))
    for source in sources(found):
        console.print(Padding(Text(source, "pd.code"), (0, 0, 0, 2)))
    for line in lines[1:]:
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    if found.first is not None and found.origin is not None and not concise:
        _print_tensors(found.origin, console)
        _print_tree(found.first, console)
    for note in found.notes:
        console.print(Text(f"{clean(note[:1].upper() + note[1:])}.", "pd.near"))


def scope(found: OpComparison) -> list[str]:
    """One line per compared list; of many, the first few and those with differences, at most ``TOP``."""
    ranks = {x.rank for x in found.lists}
    shown = [x for n, x in enumerate(found.lists) if n < TOP // 2 or x.differences][:TOP]
    lines = []
    for x in shown:
        where = f"Step {x.step}" + (f", rank {x.rank}" if len(ranks) > 1 else "")
        beyond = sum(not d.explained for d in x.differences)
        words = f"{where}: {number(x.ops_a)} ops in A, {number(x.ops_b)} in B, {number(x.paired)} in both; "
        words += f"{number(len(x.differences))} differ" if x.differences else "none differs"
        lines.append(words + (f", {number(beyond)} beyond what is explained" if beyond else ""))
    if len(shown) < len(found.lists):
        lines.append(f"and {plural(len(found.lists) - len(shown), 'more list')}")
    return lines


def verdict(found: OpComparison) -> list[str]:
    """``[style, verdict, further sentences...]``."""
    first = found.first
    if first is None:
        return ["pd.good", "Nothing differs: every op of both runs gives the same bits."]
    where = f"step {first.step}" + (f", rank {first.rank}" if len({x.rank for x in found.lists}) > 1 else "")
    origin = first.origin
    if origin is None:
        given = first.given[0]
        what = clean(given.tensor.name or f"an operand of {given.op.name}")
        return ["pd.near", f"The runs were apart before {where}: {what} differs, and no op of the step made it."]
    op = origin.op
    phase = "" if op.phase in place_of(origin) else f", {op.phase}"
    lines = [clean(reason_of(origin))]
    before = first.differences.index(origin)
    if first.given and first.given[0].op.index <= op.index:
        name = first.given[0].tensor.name
        which = f"such as {clean(name)}" if name else f"as {clean(first.given[0].op.name)} read it"
        lines.append(f"What the step began with was different already, {which}.")
    elif before:
        lines.append(f"{plural(before, 'op')} before it differ within what formats and operands explain.")
    else:
        lines.append("All ops before it that both runs have are equal in every bit.")
    if (outcome := first.outcome) is not None and op.phase in ("forward", "loss"):
        lines.append(f"At the end of the forward pass the distance is {apart(outcome)} (relative L2).")
    if origin.explained:
        what = f"Nothing differs beyond what formats explain; the first bits differ at {where}: "
        return ["pd.good", f"{what}{clean(place_of(origin))}{phase}", *lines]
    return ["pd.strong", f"The runs part at {where}: {clean(place_of(origin))}{phase}", *lines]


def sources(found: OpComparison) -> list[str]:
    """File, line and code of the op that differs: one line, or one for each run if they differ; empty if none does."""
    lines: list[str] = []
    if (origin := found.origin) is None:
        return lines
    for op in (origin.a, origin.b):
        if op is not None and op.file is not None:
            code = f"  {clean(op.code)}" if op.code else ""
            name = f"{clean(op.name)} at " if op.name != origin.op.name else ""
            lines.append(f"{name}{clean(op.source)}{code}")
    return list(dict.fromkeys(lines))


def tensor_rows(difference: Difference) -> Iterator[tuple[str, OpTensor | None, OpTensor | None]]:
    """``(name, tensor in A, tensor in B)`` of operands and results; if one run lacks the op, its result comes last.

    Of two different ops only the results are given.
    """
    a, b = difference.a, difference.b
    if a is not None and b is not None and a.name != b.name:
        yield "result", difference.made_a, difference.made_b
        return
    for side in ("reads", "makes"):
        mine: tuple[OpTensor, ...] = getattr(a, side) if a is not None else ()
        theirs: tuple[OpTensor, ...] = getattr(b, side) if b is not None else ()
        if side == "makes" and (a is None or b is None):
            yield "result", difference.made_a, difference.made_b
            return
        for n in range(min(max(len(mine), len(theirs)), _TENSORS)):
            x, y = (given[n] if n < len(given) else None for given in (mine, theirs))
            one = x or y
            assert one is not None, "at least one side has so many"
            yield one.name or one.argument or ("result" if n == 0 else f"result {n}"), x, y


def runs_of(x: OpTensor | None, y: OpTensor | None) -> list[tuple[str, OpTensor]]:
    """``(run, tensor)`` of a tensor in A and in B, one of which may be absent; one row, ``A=B``, for equal bits."""
    if x is not None and y is not None and x.fingerprint is not None and x.fingerprint == y.fingerprint:
        return [("A=B", x)]
    return [(run, tensor) for run, tensor in (("A", x), ("B", y)) if tensor is not None]


def figures(x: OpTensor) -> tuple[str, ...]:
    """Dtype and shape, amax, norm and mean as text; en dashes for unknown figures."""
    bad = f" {number(sum(x.bad))} non-finite" if x.bad is not None and any(x.bad) else ""
    kind = f"{clean(x.dtype)} {list(x.shape)}{bad}"
    return (kind, *("–" if v is None else f"{v:.6g}" for v in (x.amax, x.norm, x.mean)))


def _print_tensors(difference: Difference, console: Console) -> None:
    shown = table(*folded("tensor", "", "dtype and shape"), *right("amax", "L2 norm", "mean"))
    for name, x, y in tensor_rows(difference):
        for at, (run, tensor) in enumerate(runs_of(x, y)):
            shown.add_row(Name(name) if at == 0 else "", run, *figures(tensor))
    console.print()
    console.print(Padding(shown, (0, 0, 0, 2)))


def _print_tree(first: ListComparison, console: Console) -> None:
    tree = branches(first)
    ops = sum(len(branch.ops) for branch in tree)
    if not tree:
        console.print("\nNo other op follows from it.")
        return
    console.print(f"\nWhat follows from it: {plural(ops, 'op')}, with the relative L2 distance at the end of each row")
    shown = grid(*folded("", ratio=1), *right("", ""))
    for branch in tree[:TOP]:
        shown.add_row(Text("  " * (1 + min(branch.depth, _DEPTH)) + row_of(branch)), apart(branch.end), growth(branch))
    console.print(shown)
    if len(tree) > TOP:
        console.print(Text(f"  and {number(len(tree) - TOP)} more rows; --html FILE has them all", "pd.quiet"))


def row_of(branch: Branch) -> str:
    """The label of a branch: ``blocks.1.ffn_norm: aten.rsqrt.default + 2 ops``."""
    op = branch.ops[0].op
    more = f" + {plural(len(branch.ops) - 1, 'op')}" if len(branch.ops) > 1 else ""
    return clean(f"{op.module or op.root or op.phase}: {op.name}{more}") + (f" ({op.phase})" if op.module else "")


def apart(difference: Difference) -> str:
    """The relative distance as text; an en dash if unknown."""
    return "–" if difference.error is None else f"{difference.error:.2g}"


def growth(branch: Branch) -> str:
    """The growth of the distance since the origin, as a factor; empty if unknown."""
    return "" if branch.growth is None else f"× {branch.growth:.2g}"


def ops_section(found: OpComparison) -> dict[str, Any]:
    """The ``compare_ops`` object of the JSON report."""
    first = found.first
    return {
        "a": found.a,
        "b": found.b,
        "equal": first is None,
        "lists": [
            {
                **{name: getattr(x, name) for name in ("step", "rank", "ops_a", "ops_b", "paired")},
                "differing": len(x.differences),
                "beyond": sum(not d.explained for d in x.differences),
                "apart_before": [{"op": g.op.name, "name": g.tensor.name, "error": jsonable(g.error)} for g in x.given],
            }
            for x in found.lists
        ],
        "step": first.step if first is not None else None,
        "rank": first.rank if first is not None else None,
        "first": _difference(first.first) if first is not None else None,
        "origin": _difference(found.origin),
        "following": [_difference(d) for _, d in (first.following if first is not None else [])][:JSON_OPS],
        "notes": list(found.notes),
    }


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "op_a": _op(found.a),
        "op_b": _op(found.b),
        "made_a": _tensor(found.made_a),
        "made_b": _tensor(found.made_b),
        **{name: jsonable(getattr(found, name)) for name in ("error", "limit", "explained", "reads_others")},
        "reason": reason_of(found),
        "parents": sorted(found.parents),
    }


def _op(op: Op | None) -> dict[str, Any] | None:
    names = ("index", "name", "phase", "root", "module", "file", "line", "code", "settings")
    return None if op is None else {name: getattr(op, name) for name in names}


def _tensor(x: OpTensor | None) -> dict[str, Any] | None:
    names = ("dtype", "shape", "amax", "norm", "mean", "bad", "fingerprint")
    return None if x is None else {name: jsonable(getattr(x, name)) for name in names}
