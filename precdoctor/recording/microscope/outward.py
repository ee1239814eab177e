"""Loss code evaluated whole from its text, where the graph it left does not hold what went into the bad operation.

Unlike ``unseen.py``, which begins with the statement that read something bad and goes back, this begins outside: with
the statement of a caller, or what ``backward`` was called of. Calls of top-level modules give what they gave in the
run; a variable whose value was not kept (it had a graph) is made again by the statements that made it.
"""

from __future__ import annotations

import ast
import contextlib
from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.microscope.functions import Follower, FunctionNode, function_of
from precdoctor.recording.microscope.makers import changed_by, expressions_in, preceding, statement_at, withs_around
from precdoctor.recording.microscope.pure import UnknownValueError
from precdoctor.recording.microscope.replay import Replay, same_bits
from precdoctor.recording.microscope.tracer import External, Tracer
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.ops.tensor_facts import NAN, badness
from precdoctor.recording.scene.local_variables import DROPPED, Variables
from precdoctor.recording.scene.loss_graph import LossGraph
from precdoctor.recording.scene.state_restore import Autocast
from precdoctor.recording.scene.step_snapshot import RootCall

_SECONDS = 10.0
#: Texts tried for one bad loss.
_MAX_AIMS = 8
#: Methods that start a backward pass, and that scale what they are given for one.
_BACKWARDS = frozenset(("backward", "manual_backward"))
_SCALES = frozenset(("scale", "scale_loss"))


@dataclass(frozen=True)
class Aim:
    """Text that came to the bad value: a statement of a function, and the expressions of it that count."""

    at: Variables
    body: FunctionNode
    statement: ast.stmt
    expressions: tuple[ast.expr, ...]


def aims(places: Sequence[tuple[Variables, Line]], running: Variables | None) -> list[Aim]:
    """Texts to try: of the functions that were running as the bad operation was met, then of those that run now."""
    found: list[Aim] = []
    for place, line in places[:1]:
        at: Variables | None = place
        number = line.number
        while at is not None:
            found += _aim_at(at, number)
            at = at.caller
            number = at.line if at is not None else 0
    while running is not None:
        found += _aim_before(running)
        running = running.caller
    chosen = {id(a.statement): a for a in reversed(found)}
    return [a for a in found if chosen.get(id(a.statement)) is a][:_MAX_AIMS]


def _aim_at(at: Variables, line: int | None) -> list[Aim]:
    body = function_of(at.code.co_filename, at.code)
    statement = statement_at(body, line) if body is not None else None
    if body is None or statement is None:
        return []
    return [Aim(at, body, statement, tuple(map(_derived, expressions_in(statement))))]


def _aim_before(at: Variables) -> list[Aim]:
    """What ``backward`` was called of last, above the line a function is at."""
    body = function_of(at.code.co_filename, at.code)
    for statement in reversed(preceding(body, at.line)) if body is not None and at.line is not None else ():
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (given := _derived(node)) is not node and body is not None:
                return [Aim(at, body, statement, (given,))]
    return []


def _derived(expression: ast.expr) -> ast.expr:
    """What a backward pass is of: ``loss`` of ``scaler.scale(loss).backward()``; other expressions as they are."""
    match expression:
        case ast.Call(func=ast.Attribute(attr=name), args=[given, *_]) if name in _BACKWARDS:
            return given  # accelerator.backward(loss)
        case ast.Call(func=ast.Attribute(attr="backward", value=owner)):
            match owner:
                case ast.Call(func=ast.Attribute(attr=scale), args=[given]) if scale in _SCALES:
                    return given
            return owner
    return expression


def replay_outward(
    aim: Aim, calls: Sequence[RootCall], graph: LossGraph, *, wanted: frozenset[int] = frozenset(), values: bool = True
) -> Replay:
    """Evaluate a text; ``bad_outputs`` is empty where it cannot be evaluated, or comes to something else than the run.

    Args:
        calls: of top-level modules in this step.
        graph: of the loss, for what it came to and in which micro-step.
        wanted: ops of which full facts are wanted, by their index in an earlier replay of the same text.
        values: let facts hold single values.
    """
    tracer = Tracer({}, wanted, values=values)
    tracer.seconds = _SECONDS
    done = Replay(None, tracer, micro_step=graph.micro_step)
    at = aim.at
    follower = Follower(tracer, at.code.co_filename, ChainMap(dict(at.values), dict(at.globals)))
    evaluator = follower.evaluator
    evaluator.outputs = Outputs(calls, graph.micro_step)
    evaluator.remake = _Remaking(follower, aim)
    found: list[Tensor] = []
    with torch.no_grad(), Autocast.off(), contextlib.ExitStack() as contexts:
        try:
            for each in withs_around(aim.body, aim.statement):
                follower.enter(each, contexts)
        except UnknownValueError:
            return done
        contexts.enter_context(tracer)
        for expression in aim.expressions:
            with contextlib.suppress(UnknownValueError):
                found += _tensors(evaluator.value(expression))
    tracer.line = None
    kinds = badness(graph.value)
    for x in found:
        if (bad := badness(x)) and bad & NAN == kinds & NAN:
            done.bad_outputs = [("loss", bad, tracer.source(x))]
            done.compared, done.equal = 1, int(x.shape == graph.value.shape and same_bits(x, graph.value))
            break
    return done


def _tensors(value: Any) -> Iterator[Tensor]:
    if type(value) in (list, tuple):
        for each in value:
            yield from _tensors(each)
    elif issubclass(type(value), Tensor) and (value.is_floating_point() or value.is_complex()):
        yield value


class _Remaking:
    """Makes a variable of the outermost function again, by the statements above that have changed it."""

    def __init__(self, follower: Follower, aim: Aim) -> None:
        self._follower = follower
        self._aim = aim
        self._running = [aim.statement]
        self._busy: set[str] = set()

    def __call__(self, name: str) -> bool:
        """Whether its value is known now."""
        if name in self._busy:
            return False
        self._busy.add(name)
        try:
            for statement in changed_by(self._aim.at, self._aim.body, self._running[-1], name):
                self._running.append(statement)
                self._follower.attempt(statement)
                self._running.pop()
        finally:
            self._busy.discard(name)
        return self._follower.evaluator.assigned.get(name, DROPPED) is not DROPPED


class Outputs:
    """What calls of top-level modules came to in the run.

    Args:
        calls: of the step.
        micro_step: the one the text belongs to.
    """

    def __init__(self, calls: Sequence[RootCall], micro_step: int) -> None:
        self._calls = [c for c in calls if c.micro_step == micro_step]
        self._used: set[int] = set()

    def of(self, tracer: Tracer, module: nn.Module, lines: tuple[str, range]) -> Any:
        """What the next call of a module at one of these lines gave, as a copy; null where that is not known."""
        own = unwrap(module)
        fitting = [c for c in self._calls if unwrap(c.module) is own and c.outputs]
        here = [c for c in fitting if c.line is not None and c.line.file == lines[0] and c.line.number in lines[1]]
        call = next((c for c in here or fitting if id(c) not in self._used), None)
        if call is None or any(x._version != version for _, x, version in call.outputs):
            return None
        self._used.add(id(call))
        copies: dict[str, Tensor] = {}
        for name, x, _ in call.outputs:
            with tracer.aside():
                copies[name] = x.detach().clone()
            tracer.note(copies[name], External("argument", f"{call.root} output {name}".strip()))
        return _nested(copies)


def _nested(parts: dict[str, Tensor]) -> Any:
    """A tensor, a tuple or a dictionary of such, as far as the names of its leaves tell."""
    if list(parts) == [""]:
        return parts[""]
    if any("." in name for name in parts):
        return None
    if list(parts) == [str(i) for i in range(len(parts))]:
        return tuple(parts.values())
    return parts
