"""Gradients that the user's own code makes or changes between the backward pass and the optimizer.

Clipping sample by sample, noise, normalising, projections: no graph and no module knows of these. They are evaluated
from their text as loss code is (``unseen.py``), beginning with the variables of the functions that run as the optimizer
steps, and with the gradients that the replay of the backward pass came to.
"""

from __future__ import annotations

import ast
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from precdoctor.recording.microscope.functions import Follower, FunctionNode, function_of, names_in
from precdoctor.recording.microscope.makers import preceding
from precdoctor.recording.ops.source_lines import is_foreign
from precdoctor.recording.scene.local_variables import Variables

#: Functions of the user's looked into for whether they write to gradients.
_MAX_DEPTH = 3


def writers(body: FunctionNode, line: int, names: Mapping[str, Any]) -> list[ast.stmt]:
    """Statements that may write to gradients: after the last ``backward`` before the line, within the loop around it.

    Args:
        body: the function that runs.
        line: where it is.
        names: its variables, and those of its module.
    """
    before = preceding(body, line)
    last = max((i for i, s in enumerate(before) if _calls_backward(s)), default=-1)
    return [s for s in before[last + 1 :] if _writes(s, names, _MAX_DEPTH)]


def _calls_backward(statement: ast.stmt) -> bool:
    calls = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call))
    return any(isinstance(f, ast.Attribute) and f.attr in {"backward", "manual_backward"} for f in calls)


def _writes(statement: ast.AST, names: Mapping[str, Any], depth: int) -> bool:
    return any(_is_write(node, statement) or _calls_writer(node, names, depth) for node in ast.walk(statement))


def _is_write(node: ast.AST, statement: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="grad", ctx=ast.Store()):
            return True
        case ast.AugAssign(target=ast.Name(id=name)):
            return any(isinstance(s, ast.For) and name in names_in(s.target) for s in ast.walk(statement))
        case ast.AugAssign() | ast.Subscript(ctx=ast.Store()):
            return True
        case ast.Call(func=ast.Attribute(attr=name)):
            return name.endswith("_") and not name.startswith("__")
    return False


def _calls_writer(node: ast.AST, names: Mapping[str, Any], depth: int) -> bool:
    if depth == 0 or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    function = names.get(node.func.id)
    if type(function) is not types.FunctionType:
        return False
    file = function.__code__.co_filename
    body = function_of(file, function.__code__) if not is_foreign(file) else None
    inside = body.body if body is not None else ()
    return any(_writes(s, function.__globals__, depth - 1) for s in inside)


def run_writers(follower: Follower, place: Variables) -> Iterator[ast.stmt]:
    """Evaluate them one after the other; those that cannot be are passed over."""
    body = function_of(place.code.co_filename, place.code)
    if body is None or place.line is None:
        return
    for statement in writers(body, place.line, ChainMap(dict(place.values), dict(place.globals))):
        follower.attempt(statement)
        yield statement
