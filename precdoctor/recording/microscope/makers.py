"""Which statements of a function's text made the value that a variable has at a line of it."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.recording.microscope.functions import FunctionNode, function_of, names_in, statements_in
from precdoctor.recording.ops.source_lines import is_foreign
from precdoctor.recording.scene.local_variables import Variables

#: Functions of the user's looked into for whether they write to what they are given.
_MAX_DEPTH = 3
#: What a loop over batches calls.
_TRAINING = frozenset(("backward", "manual_backward", "step", "zero_grad", "training_step"))


@dataclass(frozen=True)
class Making:
    """Where a variable got its value: its assignment, and what has changed it since."""

    at: Variables
    statement: ast.stmt
    writers: tuple[ast.stmt, ...] = ()


def making_of(at: Variables, body: FunctionNode, statement: ast.stmt, name: str) -> Making | None:
    """Where the variable was assigned: above in the same function, in a loop further down, else by the caller."""
    all_of = [s for s in statements_in(body) if s is not statement and name in _assigned(s)]
    above = [s for s in all_of if s.lineno < statement.lineno]
    chosen = above[-1] if above else all_of[-1] if all_of else None
    if chosen is not None:
        if isinstance(chosen, (ast.For, ast.With)):
            return None
        changing = [s for s in preceding(body, statement.lineno) if _changes(s, name, at)]
        afresh = max((i for i, s in enumerate(changing) if _makes_afresh(s, name)), default=None)
        if afresh is not None and len(changing) > afresh + 1:
            return Making(at, changing[afresh], tuple(changing[afresh + 1 :]))
        return Making(at, chosen)
    if isinstance(body, ast.FunctionDef) and name in {a.arg for a in ast.walk(body.args) if isinstance(a, ast.arg)}:
        return called_at(at.caller) if at.caller is not None else None
    return None


def called_at(caller: Variables) -> Making | None:
    """The statement a function is at."""
    body = function_of(caller.code.co_filename, caller.code)
    statement = statement_at(body, caller.line) if body is not None else None
    return Making(caller, statement) if statement is not None else None


def statement_at(body: FunctionNode, line: int | None) -> ast.stmt | None:
    """The innermost statement that spans the line."""
    if line is None:  # code without lines
        return None
    found = [s for s in statements_in(body) if s.lineno <= line <= (s.end_lineno or s.lineno)]
    return found[-1] if found else None


def preceding(body: FunctionNode, line: int) -> list[ast.stmt]:
    """What has run before a line, statement by statement: within the innermost loop around it, else the function."""
    before: list[ast.stmt] = []
    block: list[ast.stmt] = body.body
    while block:
        here = next((s for s in block if s.lineno <= line <= (s.end_lineno or s.lineno)), None)
        if here is None:
            break
        before = [] if isinstance(here, (ast.For, ast.While)) else [*before, *block[: block.index(here)]]
        inner = [b for b in (getattr(here, name, None) for name in ("body", "orelse", "finalbody")) if b]
        block = next((b for b in inner if b[0].lineno <= line <= (b[-1].end_lineno or b[-1].lineno)), [])
    return before


def loops_around(body: FunctionNode, line: int) -> list[ast.For]:
    """The ``for`` loops a line stands in, innermost first, as far out as they train nothing."""
    around = [
        s for s in statements_in(body) if isinstance(s, ast.For) and s.lineno <= line <= (s.end_lineno or s.lineno)
    ]
    found: list[ast.For] = []
    for loop in reversed(around):
        if any(isinstance(n, ast.Attribute) and n.attr in _TRAINING for n in ast.walk(loop)):
            break
        found.append(loop)
    return found


def changed_by(at: Variables, body: FunctionNode, statement: ast.stmt, name: str) -> list[ast.stmt]:
    """The statements before one, within the innermost loop around it, that came to what a variable is there."""
    changing = [s for s in preceding(body, statement.lineno) if _changes(s, name, at)]
    afresh = max((i for i, s in enumerate(changing) if _makes_afresh(s, name)), default=0)
    return changing[afresh:]


def withs_around(body: FunctionNode, statement: ast.stmt) -> list[ast.With]:
    """The ``with`` statements one stands in, outermost first."""
    last = statement.end_lineno or statement.lineno
    around = [s for s in statements_in(body) if isinstance(s, ast.With) and s is not statement]
    return [s for s in around if s.lineno <= statement.lineno and last <= (s.end_lineno or s.lineno)]


def expressions_in(statement: ast.stmt) -> list[ast.expr]:
    """The expressions a statement evaluates first: its value, its test, what it loops over."""
    match statement:
        case ast.Assign() | ast.Return() | ast.Expr() | ast.AugAssign() | ast.AnnAssign():
            return [statement.value] if statement.value is not None else []
        case ast.If() | ast.While():
            return [statement.test]
        case ast.For():
            return [statement.iter]
    return []


def _changes(statement: ast.stmt, name: str, at: Variables) -> bool:
    """Whether a statement may assign a variable, or write to its value."""
    return any(
        (isinstance(n, ast.stmt) and name in _assigned(n))
        or name in _written(n)
        or _hands_on(n, name, at.globals, _MAX_DEPTH)
        for n in ast.walk(statement)
    )


def _makes_afresh(statement: ast.stmt, name: str) -> bool:
    """Whether a statement assigns a variable whatever that was before."""
    value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
    return value is not None and name in _assigned(statement) and name not in names_in(value)


def _written(node: ast.AST) -> Iterator[str]:
    """Names of variables that are written to in place."""
    match node:
        case ast.AugAssign(target=target) | ast.Subscript(ctx=ast.Store(), value=target):
            yield from names_in(target)[:1]
        case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method.endswith("_") and method[:1] != "_":
            yield from names_in(owner)[:1]
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "out":
                yield from names_in(keyword.value)


def _hands_on(node: ast.AST, name: str, names: Mapping[str, Any], depth: int) -> bool:
    """Whether a function of the user's is given the variable, and writes to what it is given."""
    if depth == 0 or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    positions = [i for i, a in enumerate(node.args) if isinstance(a, ast.Name) and a.id == name]
    function = names.get(node.func.id)
    if not positions or type(function) is not types.FunctionType or is_foreign(function.__code__.co_filename):
        return False
    body = function_of(function.__code__.co_filename, function.__code__)
    if not isinstance(body, ast.FunctionDef):
        return False
    given = [body.args.args[i].arg for i in positions if i < len(body.args.args)]
    inside = [n for s in body.body for n in ast.walk(s)]
    return any(g in _written(n) or _hands_on(n, g, function.__globals__, depth - 1) for n in inside for g in given)


def _assigned(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Assign():
            return [n for t in statement.targets for n in _bound(t)]
        case ast.AnnAssign() | ast.For():
            return _bound(statement.target)
        case ast.With():
            return [n for i in statement.items if i.optional_vars is not None for n in _bound(i.optional_vars)]
    return []


def _bound(target: ast.expr) -> list[str]:
    """Names of variables that get a value: not those of what is written to."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [n for t in target.elts for n in _bound(t)]
    if isinstance(target, ast.Starred):
        return _bound(target.value)
    return [target.id] if isinstance(target, ast.Name) else []
