"""Detects constants that decide a result: an epsilon or a clamp bound larger than the numbers that it should protect.

``rsqrt(var + eps)``, ``x / norm.clamp_min(eps)`` and ``log(p + eps)`` guard against zeros. If a quarter of the non-zero
numbers are below the constant, it decides their results. The op that reads them (a division, a logarithm) is run again
in FP64 on the numbers without it, and the wrong result is followed to its effect. Ops that normalise have their epsilon
inside; they are run again without it.

In the optimizer only roots count, as in ``m / (v.sqrt() + eps)``, whose quotient is of order one without the constant.
A constant beside a curvature, as in ``gradient / (fisher + damping)``, limits the step and is meant to decide.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.effects import Effects
from precdoctor.recording.deepscan.scan_facts import Event, Findings, op_reference, worst
from precdoctor.recording.deepscan.scanned_op import Call
from precdoctor.recording.model import static

_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
#: Ops that keep a number above a constant, ops through which that number is followed, and ops that read it.
_GUARDS, _PASSES = op_names("add clamp clamp_min maximum"), op_names("sqrt _to_copy clone mul add lerp mean sum")
_READS = op_names("rsqrt reciprocal div log pow")
#: Ops that may be a guard, or read one.
FOLLOWED = _GUARDS | {f"{name}_" for name in _GUARDS} | _READS | {"sqrt"}
#: Ops whose result is a root if an operand is one, as for a bias correction.
_OF_ROOTS = op_names("mul div clone _to_copy maximum")
#: Ops that normalise, and the index of the result that is the reciprocal standard deviation.
_NORMS = {"native_layer_norm": 2, "native_batch_norm": 2, "native_group_norm": 2, "_fused_rms_norm": 1}
#: The largest constant that counts as a guard; a smaller one in data code, where 0.1 may be a width or an offset.
_LARGEST, _LARGEST_IN_DATA = 0.1, 0.01
#: Least share of the non-zero numbers that must be below the constant; a result with a larger relative error is wrong.
_NOTED, _WRONG = 0.25, 0.5
#: Maximum number of guarded tensors at a time, and of elements of one.
_MAX_HELD, _MAX_ELEMENTS = 64, 1 << 20
#: Replaces an epsilon to run an op without one.
_LEAST = 1e-300
#: Phases in which the effect of a wrong result is followed.
_FOLLOWED = frozenset(("script", "forward", "loss"))


@dataclass
class _Guarded:
    """A result of a guard: its value without the constant, facts about the guard, whether a root is guarded."""

    value: Tensor
    event: Event
    data: dict[str, Any]
    root: bool = True


@dataclass
class _Place:
    """The guards on a line of optimizer code, all tensors together."""

    event: Event
    data: dict[str, Any]
    wrong: int = 0


class Floors:
    """Examines guards and the ops that read them; :meth:`finish` notes those in optimizers."""

    def __init__(self, findings: Findings, effects: Effects) -> None:
        self._findings, self._effects = findings, effects
        self._held: static.ByIdentity[Tensor, _Guarded] = static.ByIdentity()
        #: Roots in optimizer code, and results of elementwise ops on them.
        self._roots: static.ByIdentity[Tensor, bool] = static.ByIdentity()
        #: By op and line of optimizer code: the wrong results; the number of guarded elements that are not zero.
        self._places: dict[Any, _Place] = {}
        self._guarded: Counter[Any] = Counter()

    @staticmethod
    def guards(name: str, args: Any) -> bool:
        """Return whether an in-place op is a guard, so that the number without the constant must be copied before."""
        return name in ("add_", "clamp_", "clamp_min_") and _constant(name.rstrip("_"), args, {}) is not None

    def after(self, call: Call) -> None:
        """Examine an op that has run."""
        if not call.results:
            return
        if call.name in _NORMS and call.phase in _FOLLOWED:
            self._norm(call)
            return
        if call.phase not in _FOLLOWED:
            self._note_root(call)
        given = {id(x): known for x in call.operands if (known := self._held.get(x)) is not None}
        if given:
            self._read(call, given)
        elif call.plain_name in _GUARDS:
            self._begin(call)

    def _note_root(self, call: Call) -> None:
        """Note a root, or the result of an op on one; an in-place op keeps what its target is."""
        known = call.plain_name in _OF_ROOTS and any(self._roots.get(x) for x in call.operands)
        if known or _is_root(call):
            self._roots.put_if_room(call.results[0], True, _MAX_HELD)

    def _begin(self, call: Call) -> None:
        """Keep the value without the constant if the op is a guard that decides much of its result."""
        result = call.results[0]
        constant = _constant(call.plain_name, call.args, call.kwargs)
        floats = constant is not None and {call.args[0].dtype, result.dtype} <= _FLOATS
        if constant is None or not floats or result.numel() > _MAX_ELEMENTS:
            return
        if call.phase == "script" and constant > _LARGEST_IN_DATA:
            return
        if call.name != call.plain_name and id(call.args[0]) not in call.swapped:
            return
        x = call.before(call.args[0])
        counts = call.counts(x)
        if counts is None or counts.bad or counts.amin_nonzero is None:
            return
        if call.phase not in _FOLLOWED:
            self._guarded[_place(call)] += counts.numel - counts.zero
        if counts.amin_nonzero >= constant:
            return
        value = x.detach().double()
        below, there = (value > 0) & (value < constant), value > 0
        decided, of = int(below.sum()), int(there.sum())
        if decided < _NOTED * of or bool((value < 0).any()):
            return
        data = {"constant": constant, "decided": decided, "nonzero": of, "median": float(value[there].median())}
        event = self._findings.event_of(call)
        root = call.phase in _FOLLOWED or self._roots.get(call.args[0]) is not None
        guarded = _Guarded(torch.where(there, value, result.detach().double()), event, data, root)
        self._held.put_if_room(result, guarded, _MAX_HELD)

    def _read(self, call: Call, given: dict[int, _Guarded]) -> None:
        """Run an op that reads a guarded tensor again without the constant; judge it, or follow its result."""
        guarded = next(iter(given.values()))
        reads = call.plain_name in _READS
        if call.plain_name == "div":
            reads = len(call.args) > 1 and id(call.args[1]) in given
        elif call.plain_name == "pow":
            reads = isinstance(call.args[1], (int, float)) and call.args[1] < 0
        if not reads and not call.func.is_view and call.plain_name not in _PASSES:
            return
        again = call.again({key: g.value for key, g in given.items()})
        if again is None:
            return
        if reads and (call.phase in _FOLLOWED or (guarded.root and _is_elementwise(call))):
            self._judge(call, guarded.event, guarded.data, again[0])
        elif not reads and again[0].numel() <= _MAX_ELEMENTS:
            made = replace(guarded, value=again[0], root=guarded.root or _is_root(call))
            self._held.put_if_room(call.results[0], made, _MAX_HELD)

    def _norm(self, call: Call) -> None:
        """Judge an op that normalises if its epsilon exceeds many of its variances."""
        at = next((i for i, a in enumerate(call.func._schema.arguments) if a.name == "eps"), len(call.args))
        eps = call.args[at] if at < len(call.args) else None
        spread = call.results[_NORMS[call.name]] if len(call.results) > _NORMS[call.name] else None
        if not isinstance(eps, float) or spread is None or call.results[0].numel() > _MAX_ELEMENTS:
            return
        counts = call.counts(spread)
        if counts is None or counts.amax is None or counts.amax**2 * eps < 1 - _WRONG**2:
            return
        alone = replace(call, args=(*call.args[:at], _LEAST, *call.args[at + 1 :])).exact
        if alone is None:
            return
        variance = alone[_NORMS[call.name]].reciprocal().square()
        mean = alone[1] if _NORMS[call.name] == 2 else torch.zeros_like(variance)
        noise = (float(torch.finfo(call.operands[0].dtype).eps) * mean).square()
        there = variance > 4 * torch.maximum(noise, torch.full_like(noise, 10 * _LEAST))
        below = there & (variance < eps)
        of = int(there.sum())
        if not of or int(below.sum()) < _NOTED * of:
            return
        data = {"constant": eps, "decided": int(below.sum()), "nonzero": of, "median": float(variance[there].median())}
        self._judge(call, self._findings.event_of(call), data, alone[0])

    def _judge(self, call: Call, event: Event, data: dict[str, Any], exact: Tensor) -> None:
        """Note a fact if the constant has made a good part of a result wrong."""
        seen = call.results[0].detach().double()
        size = exact.abs()
        known = torch.isfinite(exact) & (size > 0) & torch.isfinite(seen)
        wrong = known & ((seen - exact).abs() > _WRONG * size)
        many, of = int(wrong.sum()), int(known.sum())
        if call.phase not in _FOLLOWED:
            place = event["op"], event.get("file"), event.get("line")
            noted = self._places.setdefault(place, _Place(event, {**data, "read_by": op_reference(call)}))
            noted.wrong += many
        elif many >= _NOTED * of and many:
            self._effects.begin(
                "floor", event, many / of, call.results[0], torch.where(wrong, exact, seen), wrong=many, of=of,
                **worst(wrong, size, seen, exact), read_by=op_reference(call), **data,
            )  # fmt: skip

    def finish(self) -> None:
        """Note the facts of optimizer code, once the window is over."""
        for key, place in self._places.items():
            of = self._guarded[key]
            if place.wrong and place.wrong >= _NOTED * of:
                self._findings.add_event("floor", place.event, place.wrong / of, **place.data, wrong=place.wrong, of=of)
        self._places = {}


def _is_root(call: Call) -> bool:
    power = call.args[1] if call.plain_name == "pow" and len(call.args) > 1 else None
    return call.plain_name == "sqrt" or (isinstance(power, float) and 0.0 < power < 1.0)


def _is_elementwise(call: Call) -> bool:
    """Return whether two tensors of one shape are divided, as moments are; a factor per unit may be bounded later."""
    shapes = {x.shape for x in call.operands}
    return call.plain_name == "div" and len(call.operands) == 2 and len(shapes) == 1 and 1 not in call.results[0].shape


def _place(call: Call) -> tuple[Any, ...]:
    line = call.where.line
    return (call.op, line.shown, line.number) if line is not None else (call.op, None, None)


def _constant(name: str, args: Any, kwargs: Any) -> float | None:
    """Return the constant above which an op keeps its operand; None if it is no guard."""
    if not args or not isinstance(args[0], Tensor):
        return None
    given = args[1] if len(args) > 1 else kwargs.get("min", kwargs.get("other"))
    if isinstance(given, Tensor):
        same = given.numel() == 1 or (
            name == "maximum" and given.numel() > 0 and bool((given == given.flatten()[0]).all())
        )
        if not same or given.requires_grad or args[0].numel() == 1:
            return None
        given = float(given.detach().flatten()[0])
    if not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 < given <= _LARGEST:
        return None
    return float(given)
