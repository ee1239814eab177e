"""Follows an overflow or a total underflow in FP64 until it does damage that no longer shows, or proves harmless.

An op that makes an infinity, or zeros in a quarter of its elements, where FP64 would not, leaves its FP64 values as a
shadow of the result.
Each op that reads the result is run again in FP64 on the shadow. If both results agree (a mask, a ``where`` guard, a
saturating function, a larger epsilon), nothing is lost and the trail ends. If the run's result is finite, but off by
more than half of the FP64 value, the damage is done and no longer visible: a fact is noted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.effects import Effects, Room, Shadows
from precdoctor.recording.deepscan.scan_facts import Event, Findings, op_reference, worst
from precdoctor.recording.deepscan.scanned_op import FLOATS, Call

#: Maximum number of trails per scan and per place, and of ops that a trail is followed through.
_MAX_TRAILS, _MAX_PER_PLACE, _MAX_HOPS = 64, 2, 64
#: Maximum number of shadows at a time; each is an FP64 tensor.
_MAX_SHADOWS = 128
#: Ops in which a wrong zero does harm: it is a factor of other numbers. Elsewhere an epsilon may still cover it.
_FACTORS = op_names("mul div mm bmm addmm baddbmm convolution addcmul addcdiv linear")
#: An error above the first share of the right value is damage, one below the second is none.
_DAMAGE, _SAME = 0.5, 1.0 / 16
#: Ops whose results can be too small for their format. Others give zeros on purpose (ReLU, dropout, masks).
_CAN_FLUSH = op_names(
    "mul div pow square exp exp2 expm1 sigmoid reciprocal rsqrt sqrt _softmax softmax _to_copy sum mean var prod "
    "cumprod norm linalg_vector_norm mm bmm addmm baddbmm addcmul addcdiv erfc sinh sin log1p"
)
#: An underflow is followed from this share of elements on that are zero and should not be.
_FLUSHED = 0.25
#: Ops that keep a number away from zero by adding a constant, or bounding it.
_GUARDS = op_names("clamp clamp_min add")


@dataclass(eq=False)
class _Trail:
    """An overflow or underflow that is followed: its kind, the event of its op, and the number of ops passed."""

    kind: str
    event: Event
    hops: int = 0
    over: bool = False
    #: The first op whose result is finite again.
    hidden_by: Event | None = None


class Trails:
    """All trails of one scan.

    Attributes:
        begun: number of overflows and underflows followed.
        lost: number of trails given up: too large, or through ops that cannot be run again.
    """

    def __init__(self, findings: Findings, effects: Effects, room: Room) -> None:
        self._findings, self._effects = findings, effects
        self._shadows: Shadows[_Trail] = Shadows(room, _MAX_SHADOWS)
        self._places: Counter[Any] = Counter()
        self.begun = 0
        self.lost = 0

    def after(self, call: Call) -> None:
        """Follow the shadows that an op of a forward pass or an optimizer has read, or begin a trail at the op.

        In an optimizer only 16-bit overflows begin one.
        """
        given = [(x, *found) for x in call.operands if (found := self._shadow(x)) is not None]
        if given:
            self._follow(call, given)
        elif call.results and self.begun < _MAX_TRAILS:
            self._begin(call)

    def _shadow(self, x: Tensor) -> tuple[Tensor, _Trail] | None:
        """Return the shadow and the trail of a tensor; None if it has none, or the trail is over."""
        found = self._shadows.get(x)
        return None if found is None or found[1].over else found

    def _put(self, x: Tensor, value: Tensor, trail: _Trail) -> None:
        """Give a tensor a shadow; give the trail up if there is no room."""
        self._shadows.tidy(lambda owner: owner.over)
        if not self._shadows.put(x, value, trail):
            self._lose(trail)

    def _lose(self, trail: _Trail) -> None:
        if not trail.over:
            trail.over = True
            self.lost += 1

    # --- begin -------------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        """Begin a trail if an op has made non-finite values or zeros that FP64 does not make of the same operands."""
        several = len(call.func._schema.returns) > 1  # further results only serve the op's own backward pass
        results, aside = call.results[:1] if several else call.results, call.phase == "optimizer"
        if aside and results[0].dtype == torch.float32:
            return
        counts = [c for x in results if (c := call.counts(x)) is not None and x.dtype in FLOATS]
        if len(counts) < len(results):
            return
        if any(c.bad for c in counts) and not _fills_with_nonfinite(call):
            kind = "overflow"
        elif not aside and counts[0].zero >= _FLUSHED * counts[0].numel and call.plain_name in _CAN_FLUSH:
            kind = "underflow"
        else:
            return
        place = (kind, call.where, call.op)
        if self._places[place] >= _MAX_PER_PLACE or any(c.bad for c in call.operand_counts()):
            return
        exact = call.exact
        if exact is None:
            return
        wide = [(x, value, _affected(kind, x, value)) for x, value in zip(results, exact, strict=not several)]
        many = sum(int(hit.sum()) for _, _, hit in wide)
        possible = sum(int((torch.isfinite(value) & (value != 0)).sum()) for _, value, _ in wide)
        if not many or (kind == "underflow" and many < _FLUSHED * possible):
            return
        self._places[place] += 1
        self.begun += 1
        event = self._findings.event_of(call, closely=True)
        sizes = torch.cat([value[hit].abs() for _, value, hit in wide])
        event["data"] |= {"exact_amax": float(sizes.max()), "exact_amin": float(sizes.min()), "affected": many}
        trail = _Trail(kind, event)
        for x, value, hit in wide:
            if bool(hit.any()):
                self._put(x, torch.where(hit, value, x.detach().double()), trail)

    # --- follow ------------------------------------------------------------------------------------------------------

    def _follow(self, call: Call, given: list[tuple[Tensor, Tensor, _Trail]]) -> None:
        """Run an op again on the shadows of its operands, and judge each result."""
        trail = given[0][2]
        trail.hops += 1
        if not call.results:
            return  # indices and comparisons: an infinity compares like the large FP64 value it stands for
        again = _unguarded(call, trail).again({id(x): value for x, value, _ in given})
        if again is None or trail.hops > _MAX_HOPS:
            self._lose(trail)
            return
        for number, (result, value) in enumerate(zip(call.results, again, strict=True)):
            left = self._judge(call, trail, number, result, value)
            if trail.over:
                return
            if left is not None:
                self._put(result, left, trail)
            else:
                self._shadows.drop(result)

    def _judge(self, call: Call, trail: _Trail, number: int, result: Tensor, value: Tensor) -> Tensor | None:
        """Return a shadow for one result; None if the run's result is as good, or the trail is over because of it."""
        if result.dtype not in FLOATS and result.dtype != torch.float64:
            self._lose(trail)
            return None
        limits = torch.finfo(result.dtype)
        seen, size = result.detach().double(), value.abs()
        known, finite = torch.isfinite(value), torch.isfinite(seen)
        if trail.hidden_by is None and trail.kind == "overflow" and bool(finite.all()):
            trail.hidden_by = op_reference(call)
        off = (seen - value).abs()
        wrong = known & finite & (size >= limits.tiny) & (size <= limits.max) & (off > _DAMAGE * size)
        # Elements below an ulp of the largest one do not count: any sum with that one loses them.
        wrong &= size >= limits.eps * torch.where(known, size, 0.0).max()
        if trail.kind == "underflow" and not _is_factor(call):
            wrong &= seen != 0
        if trail.kind == "overflow" and trail.hidden_by is None:
            wrong &= False  # the infinity is still visible, so nothing is hidden yet
        if bool(wrong.any()) and (alone := call.exact) is not None:
            wrong &= ~((alone[number] - value).abs() <= _DAMAGE * size)  # this op's own rounding did it, not the trail
        if bool(wrong.any()):
            self._note_damage(call, trail, number, wrong, value)
            return None
        affected = known & (~finite | (off > _SAME * size))
        return torch.where(affected, value, seen) if bool(affected.any()) else None

    def _note_damage(self, call: Call, trail: _Trail, number: int, wrong: Tensor, value: Tensor) -> None:
        """End a trail in damage: follow the effect of the wrong result."""
        trail.over = True
        result, many = call.results[number], int(wrong.sum())
        seen = result.detach().double()
        data = {
            "wrong": many,
            "of": int(value.numel()),
            **worst(wrong, value.abs(), seen, value),
            "hops": trail.hops,
            "hidden_by": trail.hidden_by,
            "shown_by": op_reference(call),
        }
        right = torch.where(wrong, value, seen)
        self._effects.begin(trail.kind, trail.event, many / value.numel(), result, right, **data)


def _unguarded(call: Call, trail: _Trail) -> Call:
    """Return the op with its guard against zero lowered from the least number of the run's format to FP64's.

    ``x.clamp(min=torch.finfo(x.dtype).tiny)`` means "not zero" in any format; in a wider one it would bound less.
    """
    if trail.kind != "underflow" or call.plain_name not in _GUARDS or not call.results:
        return call
    limits = torch.finfo(call.results[0].dtype)
    least = (limits.tiny, limits.smallest_normal, limits.smallest_normal * limits.eps)

    def wide(value: Any) -> Any:
        return torch.finfo(torch.float64).tiny if isinstance(value, float) and value in least else value

    return replace(call, args=tuple(map(wide, call.args)), kwargs={k: wide(v) for k, v in call.kwargs.items()})


def _affected(kind: str, result: Tensor, value: Tensor) -> Tensor:
    """Return where a result is non-finite (or, for an underflow, zero) and its FP64 value is not."""
    lost = (result == 0) & (value != 0) if kind == "underflow" else ~torch.isfinite(result)
    return torch.isfinite(value) & lost


def _is_factor(call: Call) -> bool:
    """Return whether tensors are multiplied or divided, element by element or as matrices."""
    return call.plain_name in _FACTORS and sum(x.numel() > 1 for x in call.operands) > 1


def _fills_with_nonfinite(call: Call) -> bool:
    """Return whether an op makes a mask: the infinity is one of its arguments."""
    values = [*call.args, *call.kwargs.values()]
    return any(isinstance(v, float) and not math.isfinite(v) for v in values)
