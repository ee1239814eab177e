"""Tensors of the loss code that no graph and no replay knows: made without a gradient, outside every module.

What is known of them is the line that read them, the source text, and the variables of the functions that were running.
So the statement is evaluated again (``expressions.py``), then the one that assigned its bad variable, and so on, until
an op makes something bad of finite operands, or the value came from outside the text (a loader, a file).
"""

from __future__ import annotations

import ast
import weakref
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.microscope.by_hand import run_writers
from precdoctor.recording.microscope.facts import NEG_INF, badness
from precdoctor.recording.microscope.frames import Line
from precdoctor.recording.microscope.functions import Follower, FunctionNode, function_of, names_in, statements_in
from precdoctor.recording.microscope.pure import UnknownValueError
from precdoctor.recording.microscope.replay import Replay, same_bits
from precdoctor.recording.microscope.slicing import slice_back
from precdoctor.recording.microscope.tracer import External, Source, Tracer
from precdoctor.recording.microscope.weights import Gradients
from precdoctor.recording.variables import Held, Variables

#: Assignments followed back from one to the next.
_MAX_STEPS = 12


@dataclass
class _Found:
    """A bad value that a statement came to."""

    value: Tensor
    source: Source
    #: What the run has in its place.
    kept: Tensor | None = None


def replay_statements(
    place: Variables,
    line: Line,
    *,
    micro_step: int,
    before: Mapping[Tensor, Tensor] | None = None,
    wanted: frozenset[int] = frozenset(),
    values: bool = True,
) -> Replay:
    """Evaluate the statement at ``line`` of a function again, and those that made what it read.

    Args:
        before: not that statement, but those above it that make gradients by hand; these are the gradients as the
            backward pass left them, as far as they are known.
        wanted: ops of which full facts are wanted, by their index in an earlier replay of the same place.
        values: let facts hold single values.
    """
    tracer = Tracer({}, wanted, values=values)
    done = Replay(None, tracer, micro_step=micro_step)
    at: Variables | None = place
    number: int | None = line.number
    noted: Tensor | None = None
    variable: str | None = None
    by_hand = before is not None
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(_MAX_STEPS):
            body = function_of(at.code.co_filename, at.code) if at is not None else None
            statement = _statement(body, number) if body is not None and number is not None else None
            gradients = Gradients(before) if before is not None else None
            found = None
            if at is not None and statement is not None:
                found = (_bad_gradient if by_hand else _bad_value)(tracer, at, statement, gradients)
            by_hand = False
            if found is None and variable is not None:
                done.named = External(_role(at, statement), variable)
            if at is None or body is None or statement is None or found is None:
                break
            noted = noted if noted is not None else found.kept
            if noted is not None and noted.shape == found.value.shape:
                done.compared, done.equal = 1, int(same_bits(noted, found.value))
            done.bad_outputs = [("", badness(found.value), found.source)]
            variable = _bad_variable(tracer, found.source)
            if variable is None:
                break
            known = at.values.get(variable)
            noted = known.value if isinstance(known, Held) else known if isinstance(known, Tensor) else None
            at, number = _maker(at, body, statement, variable)
    tracer.line = None
    return done


def _bad_gradient(tracer: Tracer, at: Variables, _statement: ast.stmt, gradients: Gradients | None) -> _Found | None:
    """The first bad gradient that the statements above come to; else the first bad value, where they are not known."""
    assert gradients is not None, "it is about these"
    follower = Follower(tracer, at.code.co_filename, ChainMap(dict(at.values), dict(at.globals)), gradients=gradients)
    with tracer:
        for _ in run_writers(follower, at):
            for p, x in gradients.bad():
                return _Found(x, tracer.source(x), p.grad)
    return _first_bad(tracer, follower.evaluator.loose)


def _bad_value(tracer: Tracer, at: Variables, statement: ast.stmt, gradients: Gradients | None) -> _Found | None:
    """The first bad value the statement comes to; values it throws away by itself do not count."""
    follower = Follower(tracer, at.code.co_filename, ChainMap(dict(at.values), dict(at.globals)), gradients=gradients)
    whole: list[Tensor] = []
    with tracer:
        for expression in _expressions(statement):
            try:
                result = follower.evaluator.value(expression)
            except UnknownValueError:
                continue
            whole += _tensors(result)
    return _first_bad(tracer, [*follower.evaluator.loose, *whole])


def _first_bad(tracer: Tracer, known: list[Tensor]) -> _Found | None:
    bad = [x for x in known if badness(x)]
    worst = [x for x in bad if badness(x) != NEG_INF] or bad
    return _Found(worst[0], tracer.source(worst[0])) if worst else None


def _tensors(value: Any) -> list[Tensor]:
    if issubclass(type(value), Tensor):
        return [value]
    several = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return [x for v in several for x in _tensors(v)]


def _role(at: Variables | None, statement: ast.stmt | None) -> str:
    """What a bad variable is whose making is no arithmetic: data, unless a module made it."""
    for node in ast.walk(statement) if at is not None and statement is not None else ():
        name = node.func if isinstance(node, ast.Call) else None
        value = at.values.get(name.id) if at is not None and isinstance(name, ast.Name) else None
        if issubclass(type(value() if type(value) is weakref.ref else value), nn.Module):
            return "variable"
    return "data"


def _bad_variable(tracer: Tracer, source: Source) -> str | None:
    """The variable the bad value came from; None when an op made it of finite operands."""
    if isinstance(source, External):
        return source.name or None
    found = slice_back(tracer.records, [source])
    if found is None or found.origins:
        return None
    return next((e.name for e, _ in found.externals if e.kind == "variable"), None)


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.Assign() | ast.Return() | ast.Expr() | ast.AugAssign() | ast.AnnAssign():
            return [statement.value] if statement.value is not None else []
        case ast.If() | ast.While():
            return [statement.test]
        case ast.For():
            return [statement.iter]
    return []


def _statement(body: FunctionNode, line: int) -> ast.stmt | None:
    """The innermost statement that spans the line."""
    found = [s for s in statements_in(body) if s.lineno <= line <= (s.end_lineno or s.lineno)]
    return found[-1] if found else None


def _maker(at: Variables, body: FunctionNode, statement: ast.stmt, name: str) -> tuple[Variables | None, int | None]:
    """Where the variable was assigned: above in the same function, in a loop further down, else by the caller."""
    all_of = [s for s in statements_in(body) if s is not statement and name in _assigned(s)]
    above = [s for s in all_of if s.lineno < statement.lineno]
    chosen = above[-1] if above else all_of[-1] if all_of else None
    if chosen is not None:
        return (at, chosen.lineno) if not isinstance(chosen, (ast.For, ast.With)) else (None, None)
    if isinstance(body, ast.FunctionDef) and name in {a.arg for a in ast.walk(body.args) if isinstance(a, ast.arg)}:
        return at.caller, at.caller.line if at.caller is not None else None
    return None, None


def _assigned(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Assign():
            return [n for t in statement.targets for n in names_in(t)]
        case ast.AugAssign() | ast.AnnAssign() | ast.For():
            return names_in(statement.target)
        case ast.With():
            return [n for i in statement.items if i.optional_vars is not None for n in names_in(i.optional_vars)]
    return []
