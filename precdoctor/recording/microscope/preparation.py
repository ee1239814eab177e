"""The code between a data loader and the model, evaluated again: what made a finite batch non-finite on the way.

The loop over the loader still runs when a step is examined. Its variables are given what the loader delivered, and the
statements above are evaluated from their text until they come to the argument the model was called with.
"""

from __future__ import annotations

import ast
import functools
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.microscope.functions import Follower, function_of, statements_in
from precdoctor.recording.microscope.makers import preceding, statement_at
from precdoctor.recording.microscope.replay import Replay, same_bits
from precdoctor.recording.microscope.tracer import Tracer
from precdoctor.recording.ops.tensor_facts import badness
from precdoctor.recording.process import attach
from precdoctor.recording.scene.deliveries import Deliveries
from precdoctor.recording.scene.local_variables import DROPPED, Variables
from precdoctor.recording.scene.state_restore import Autocast
from precdoctor.recording.scene.step_snapshot import RootCall

#: Seconds that evaluating may take.
_SECONDS = 10.0

_Again = tuple[Replay, Callable[..., Replay]]


def prepared(done: Replay, deliveries: Deliveries, running: Variables | None, *, values: bool) -> _Again | None:
    """The replay of what made an argument non-finite, and how to run it again; null where the loader's data was so."""
    found, call = done.slice(), done.call
    if found is None or found.origins or call is None or any(e.kind != "batch" for e, _ in found.externals):
        return None
    if deliveries.facts()["data_is_finite"] is not True:
        return None
    names = {e.name for e, _ in found.externals}
    arguments = [x for name, x, version in call.versions if name in names and x._version == version]
    while running is not None:
        for fields in deliveries.fields():
            again = functools.partial(_replay, call, running, fields, arguments, values=values)
            try:
                first = again()
                if (made := first.slice() if first.bad_outputs else None) is not None and made.origins:
                    return first, again
            except Exception as error:  # noqa: BLE001 - text can say anything; the answer without it stands
                attach.let_through(error)
        running = running.caller
    return None


def _replay(
    call: RootCall,
    at: Variables,
    fields: Mapping[str, Tensor],
    arguments: list[Tensor],
    *,
    wanted: frozenset[int] = frozenset(),
    values: bool = True,
) -> Replay:
    tracer = Tracer({}, wanted, values=values)
    tracer.seconds = _SECONDS
    done = Replay(call, tracer, micro_step=call.micro_step)
    body = function_of(at.code.co_filename, at.code)
    statement = statement_at(body, at.line) if body is not None else None
    if body is None or statement is None:
        return done
    around = [s for s in statements_in(body) if isinstance(s, ast.For) and s.lineno < at.line <= (s.end_lineno or 0)]
    given = _given(around[-1].target, fields) if around else {}
    if not given:
        return done
    follower = Follower(tracer, at.code.co_filename, ChainMap(given, dict(at.values), dict(at.globals)))
    with torch.no_grad(), Autocast.off(), tracer:
        for each in (*preceding(body, at.line), statement):
            follower.attempt(each)
            assigned = [x for x in follower.evaluator.assigned.values() if type(x) is Tensor]
            with tracer.aside():
                met = next((x for x in (*follower.evaluator.loose, *assigned) if _is_one(x, arguments)), None)
            if met is not None:
                done.bad_outputs = [("", badness(met), tracer.source(met))]
                done.compared, done.equal = 1, int(any(x.shape == met.shape and same_bits(x, met) for x in arguments))
                break
    tracer.line = None
    return done


def _given(target: ast.expr, fields: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the variables of a loop over a loader were, as far as the names of the batch's fields tell."""
    match target:
        case ast.Name(id=name):
            return {name: _nest(fields)}
        case ast.Tuple(elts=[ast.Name(), (ast.Tuple() | ast.List()) as batch]):  # enumerate
            return _given(batch, fields)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            own = {e.id: fields.get(str(i)) for i, e in enumerate(elements) if isinstance(e, ast.Name)}
            return {name: x for name, x in own.items() if x is not None}
    return {}


def _nest(fields: Mapping[str, Tensor]) -> Any:
    """The batch itself: a tensor, a list (what is no floating-point tensor in it is unknown) or a dictionary."""
    if "" in fields:
        return fields[""]
    if all(name.isdecimal() for name in fields):
        return [fields.get(str(i), DROPPED) for i in range(max(map(int, fields)) + 1)]
    return dict(fields)


def _is_one(x: Tensor, arguments: list[Tensor]) -> bool:
    """Whether it is an argument's non-finite elements that a tensor holds."""
    if type(x) is not Tensor or not x.is_floating_point() or not badness(x):
        return False
    return any(a.shape == x.shape and torch.equal(a.isfinite().cpu(), x.isfinite().cpu()) for a in arguments)
