"""Tensors of the loss code that no graph and no replay knows: made without a gradient, outside every module.

What is known of them is the line that read them, the source text, and the variables of the functions that were running.
So the statement is evaluated again (``expressions.py``), then the one that assigned its bad variable, and so on, until
an op makes something bad of finite operands, or the value came from outside the text (a loader, a file).
"""

from __future__ import annotations

import ast
import math
import weakref
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.microscope.by_hand import run_writers
from precdoctor.recording.microscope.functions import Follower, function_of
from precdoctor.recording.microscope.makers import Making, expressions_in, loops_around, making_of, statement_at
from precdoctor.recording.microscope.pure import UnknownValueError
from precdoctor.recording.microscope.replay import Replay, same_bits
from precdoctor.recording.microscope.slicing import slice_back
from precdoctor.recording.microscope.tracer import External, Source, Tracer
from precdoctor.recording.microscope.weights import Gradients
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.ops.tensor_facts import NAN, NEG_INF, badness
from precdoctor.recording.scene.local_variables import Held, Variables
from precdoctor.recording.scene.state_restore import Autocast, RandomState

#: Seconds that evaluating may take: the user's functions may be slow, and training waits.
_SECONDS = 10.0
#: Assignments followed back from one to the next.
_MAX_STEPS = 12
#: Ops that put a constant somewhere.
_FILLS = frozenset(("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor"))


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
    tracer.seconds = _SECONDS
    done = Replay(None, tracer, micro_step=micro_step)
    body = function_of(place.code.co_filename, place.code)
    statement = statement_at(body, line.number) if body is not None else None
    made = Making(place, statement) if statement is not None else None
    noted: Tensor | None = None
    variable: str | None = None
    with torch.no_grad(), Autocast.off():
        for step in range(_MAX_STEPS):
            found = None
            if made is not None:
                gradients = Gradients(before) if before is not None else None
                follower = _follower(tracer, made.at, gradients)
                if gradients is not None and step == 0:
                    found = _bad_gradient(follower, tracer, made.at, gradients)
                else:
                    found = _bad_value(follower, tracer, made, variable)
            if found is None and variable is not None:
                done.named = External(_role(made), variable)
            if step == 0 and found is None and before is None and body is not None and statement is not None:
                found = _in_another_round(tracer, place, loops_around(body, line.number), statement)
                if found is not None:
                    done.bad_outputs = [("", badness(found.value), found.source)]
                    break
            if made is None or found is None:
                break
            noted = noted if noted is not None else found.kept
            if noted is not None and noted.shape == found.value.shape:
                done.compared, done.equal = 1, int(same_bits(noted, found.value))
            if variable is not None and _is_filled(tracer, found):
                done.named = External("literal", variable)
                break
            done.bad_outputs = [("", badness(found.value), found.source)]
            variable = _bad_variable(tracer, found.source)
            if variable is None:
                break
            known = made.at.values.get(variable)
            noted = known.value if isinstance(known, Held) else known if isinstance(known, Tensor) else None
            text = function_of(made.at.code.co_filename, made.at.code)
            made = making_of(made.at, text, made.statement, variable) if text is not None else None
    tracer.line = None
    return done


def _follower(tracer: Tracer, at: Variables, gradients: Gradients | None) -> Follower:
    return Follower(tracer, at.code.co_filename, ChainMap(dict(at.values), dict(at.globals)), gradients=gradients)


def _bad_gradient(follower: Follower, tracer: Tracer, at: Variables, gradients: Gradients) -> _Found | None:
    """The first bad gradient that the statements above come to; else the first bad value, where they are not known."""
    with tracer:
        for _ in run_writers(follower, at):
            for p, x in gradients.bad():
                return _Found(x, tracer.source(x), p.grad)
    return _first_bad(tracer, follower.evaluator.loose)


def _bad_value(follower: Follower, tracer: Tracer, made: Making, variable: str | None) -> _Found | None:
    """The first bad value the statement comes to; values it throws away by itself do not count."""
    whole: list[Tensor] = []
    evaluator = follower.evaluator
    with tracer:
        if made.writers and variable is not None:
            random, evaluator.draws = RandomState.now(), True
            try:
                for statement in (made.statement, *made.writers):
                    follower.attempt(statement)
            finally:
                random.restore()
            return _first_bad(tracer, _tensors(evaluator.assigned.get(variable)))
        for expression in expressions_in(made.statement):
            try:
                result = evaluator.value(expression)
            except UnknownValueError:
                continue
            whole += _tensors(result)
    return _first_bad(tracer, [*evaluator.loose, *whole])


def _in_another_round(tracer: Tracer, place: Variables, loops: list[ast.For], statement: ast.stmt) -> _Found | None:
    """What a statement makes non-finite of finite values in some round of the loops around it: few are noted."""
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    for loop in loops:
        first = len(tracer.records)
        with tracer:
            _follower(tracer, place, None).attempt(loop)
        for made in tracer.records[first:]:
            here = made.line is not None and made.line.file == place.code.co_filename and made.line.number in lines
            if here and made.suspect and made.op.split(".")[1] not in _FILLS:
                return _Found(torch.tensor(math.nan if made.bad_out & NAN else math.inf), (made.index,))
    return None


def _first_bad(tracer: Tracer, known: list[Tensor]) -> _Found | None:
    bad = [x for x in known if badness(x)]
    worst = [x for x in bad if badness(x) != NEG_INF] or bad
    return _Found(worst[0], tracer.source(worst[0])) if worst else None


def _tensors(value: Any) -> list[Tensor]:
    if issubclass(type(value), Tensor):
        return [value]
    several = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return [x for v in several for x in _tensors(v)]


def _role(made: Making | None) -> str:
    """What a bad variable is whose making is no arithmetic: data, unless a module made it, or the text an infinity."""
    if made is not None and any(_is_infinity(n, made.at) for n in ast.walk(made.statement)):
        return "literal"
    for node in ast.walk(made.statement) if made is not None else ():
        name = node.func if isinstance(node, ast.Call) else None
        value = made.at.values.get(name.id) if made is not None and isinstance(name, ast.Name) else None
        if issubclass(type(value() if type(value) is weakref.ref else value), nn.Module):
            return "variable"
    return "data"


def _is_infinity(node: ast.AST, at: Variables) -> bool:
    """``math.inf``, ``float("-inf")``, ``1e999``, or a name that stands for such a number."""
    match node:
        case ast.Attribute(attr="inf"):
            return True
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
            return text.strip().lstrip("+-").lower() in {"inf", "infinity"}
        case ast.Constant(value=float(number)):
            return math.isinf(number)
        case ast.Name(id=name):
            value = at.values.get(name, at.globals.get(name))
            return type(value) is float and math.isinf(value)
    return False


def _is_filled(tracer: Tracer, found: _Found) -> bool:
    """Whether a value is infinite because the code put infinities there, which may be no fault."""
    behind = slice_back(tracer.records, [found.source])
    if badness(found.value) & NAN or behind is None or behind.externals:
        return False
    return bool(behind.origins) and all(tracer.records[i].op.split(".")[1] in _FILLS for i in behind.origins)


def _bad_variable(tracer: Tracer, source: Source) -> str | None:
    """The variable the bad value came from; None when an op made it of finite operands."""
    if isinstance(source, External):
        return source.name or None
    found = slice_back(tracer.records, [source])
    if found is None or found.origins:
        return None
    return next((e.name for e, _ in found.externals if e.kind == "variable"), None)
