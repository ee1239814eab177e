"""Reads in the source which lines may have made a value that no replay reaches: one that was made without a gradient.

From the names that a statement reads, the search follows assignments backwards within the function, and the ``return``
statements of functions of the same file that they call. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import linecache
from collections import deque
from collections.abc import Collection, Iterator
from typing import TypeAlias

from precdoctor.recording.ops.source_lines import Line

#: Functions and methods that can make NaN or infinity of finite numbers.
_RISKY = frozenset(
    (
        *("acos", "acosh", "arccos", "arccosh", "arcsin", "arctanh", "asin", "atanh", "cosh", "digamma", "div"),
        *("divide", "erfinv", "exp", "exp2", "expm1", "float_power", "lgamma", "log", "log10", "log1p", "log2"),
        *("log_softmax", "logit", "logsumexp", "normalize", "pow", "reciprocal", "rsqrt", "sinh", "softmax", "sqrt"),
        *("std", "std_mean", "true_divide", "var", "var_mean"),
    )
)
_RISKY_OPERATORS = (ast.Div, ast.Pow)
#: Lines to return, statements to follow, and characters of a file to read, at most.
_MOST_LINES, _MOST_STATEMENTS, _MOST_TEXT = 3, 32, 1 << 19
_Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def risky_lines(line: Line, computed: Collection[int], *, own: bool) -> list[Line]:
    """Return the lines that may have made what the statement at ``line`` reads: at most three, the closest first.

    Args:
        line: a line of the statement; without its source the result is empty.
        computed: numbers of the lines of that file whose ops a replay has computed, so that they made nothing unseen.
        own: whether the statement may have made it itself; its lines then come last.
    """
    tree = _parsed(line.file)
    if tree is None:
        return []
    functions = [f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
    by_name = {f.name: f for f in functions}
    scope: _Scope = min((f for f in functions if _holds(f, line.number)), key=_span, default=tree)
    simple = (s for s in _own(scope) if isinstance(s, ast.stmt) and not hasattr(s, "body"))
    first = next((s for s in simple if _holds(s, line.number)), None)
    if first is None:
        return []
    waiting: deque[tuple[ast.stmt, _Scope]] = deque([(first, scope)])
    followed: set[int] = {id(first)}
    found: dict[int, None] = {}
    while waiting and len(followed) < _MOST_STATEMENTS:
        reader, scope = waiting.popleft()
        makers = [(m, scope) for m in _assignments(reader, scope)]
        called = [by_name[n] for n in _called(reader) if n in by_name]
        makers += [(r, f) for f in called for r in _own(f) if isinstance(r, ast.Return)]
        for maker, place in makers:
            if id(maker) not in followed and not any(_holds(maker, number) for number in computed):
                followed.add(id(maker))
                found.update(dict.fromkeys(_risks(maker)))
                waiting.append((maker, place))
    if own:
        found.update(dict.fromkeys(_risks(first)))
    return [Line(line.file, number) for number in list(found)[:_MOST_LINES]]


def _parsed(file: str) -> ast.Module | None:
    source = linecache.getlines(file)
    if not source or sum(map(len, source)) > _MOST_TEXT:
        return None
    try:
        return ast.parse("".join(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _holds(node: ast.stmt, number: int) -> bool:
    return node.lineno <= number <= (node.end_lineno or node.lineno)


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``scope``, without those inside functions and classes of its own."""
    waiting = deque(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.popleft()
        yield node
        if not isinstance(node, _NESTED):
            waiting.extend(ast.iter_child_nodes(node))


def _assignments(reader: ast.stmt, scope: _Scope) -> list[ast.stmt]:
    """Return the statements of the scope that last assigned the names that ``reader`` reads, the closest first."""
    functions = {id(n.func) for n in _own(reader) if isinstance(n, ast.Call)}
    read = (n for n in _own(reader) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    names = {n.id for n in read if id(n) not in functions}
    if isinstance(reader, ast.AugAssign) and isinstance(reader.target, ast.Name):
        names.add(reader.target.id)
    last: dict[str, ast.stmt] = {}
    for statement in sorted((s for s in _own(scope) if isinstance(s, ast.stmt)), key=lambda s: s.lineno):
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and statement.lineno < reader.lineno:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            assigned = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            last.update(dict.fromkeys(assigned & names, statement))
    return sorted(last.values(), key=lambda s: -s.lineno)


def _called(statement: ast.stmt) -> list[str]:
    """Return the names of the functions and methods that a statement calls."""
    return [name for n in _own(statement) if isinstance(n, ast.Call) and (name := _name_of(n.func))]


def _name_of(function: ast.expr) -> str:
    """Return the last part of a called name; empty for other expressions."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _risks(statement: ast.stmt) -> Iterator[int]:
    """Yield the lines of the statement's risky operations: no division by a literal, no literal power."""
    if isinstance(statement, ast.AugAssign) and _is_risky(statement.op, statement.value):
        yield statement.lineno
    for node in _own(statement):
        if isinstance(node, ast.BinOp):
            risky = _is_risky(node.op, node.right)
        else:
            risky = isinstance(node, ast.Call) and _name_of(node.func).removesuffix("_") in _RISKY
        if risky and isinstance(node, ast.expr):
            yield node.lineno


def _is_risky(operator: ast.operator, right: ast.expr) -> bool:
    return isinstance(operator, _RISKY_OPERATORS) and not isinstance(right, ast.Constant)
