"""What becomes of an overflow or a total underflow inside a module: followed in FP64 until it is seen, or harmless.

An op that makes an infinity, or mostly zeros, where FP64 would not, leaves the FP64 values behind as a shadow of its
result. Each op that reads the tensor is run again in FP64 on the shadow. Where both come to the same (a mask, a guard
of ``where``, a saturating function, an epsilon that is larger), nothing is lost and the trail ends. Where the run's
result is finite, and off by more than half of what FP64 says, the damage has been done and nobody sees it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.deepscan.effects import Effects, Room, Shadows
from precdoctor.recording.deepscan.scan_facts import Event, Findings, said, worst
from precdoctor.recording.deepscan.scanned_op import Call, names

#: Trails followed per scan and from one line, and ops a trail is followed through.
_MAX_TRAILS, _MAX_PER_PLACE, _MAX_HOPS = 64, 2, 64
#: Shadows held at a time; each is an FP64 tensor.
_MAX_SHADOWS = 128
#: Where a zero that should be none does harm: as a factor of other numbers. Elsewhere an epsilon may still cover it.
_FACTORS = names("mul div mm bmm addmm baddbmm convolution addcmul addcdiv linear")
#: Off by more than this share of the right value is damage; by less than the second one it is none.
_DAMAGE, _SAME = 0.5, 1.0 / 16
#: Ops whose results can be too small for their format. Others give zeros on purpose (ReLU, dropout, masks).
_CAN_FLUSH = names(
    "mul div pow square exp exp2 expm1 sigmoid reciprocal rsqrt sqrt _softmax softmax _to_copy sum mean var prod "
    "cumprod norm linalg_vector_norm mm bmm addmm baddbmm addcmul addcdiv erfc sinh sin log1p"
)
#: Share of the elements that are zero and should not be, from which on an underflow is followed.
_FLUSHED = 0.25
#: Ops that keep a number away from zero by another one.
_GUARDS = names("clamp clamp_min add")
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32))


class _Trail:
    def __init__(self, kind: str, event: Event) -> None:
        self.kind = kind
        self.event = event
        self.hops = 0
        self.over = False
        #: The first op whose result is finite again.
        self.hidden_by: Event | None = None


class Trails:
    """All trails of one scan.

    Attributes:
        begun: overflows and underflows that were followed.
        lost: of those that had to be given up: too large, or ops that cannot be run again.
    """

    def __init__(self, findings: Findings, effects: Effects, room: Room) -> None:
        self._findings, self._effects = findings, effects
        self._shadows: Shadows[_Trail] = Shadows(room, _MAX_SHADOWS)
        self._places: dict[Any, int] = {}
        self.begun = 0
        self.lost = 0

    def after(self, call: Call) -> None:
        """An op of a forward pass has run, or one on gradients, of which overflows in half count."""
        given = [(x, *found) for x in call.operands if (found := self._shadow(x)) is not None]
        if given:
            self._follow(call, given)
        elif call.results and self.begun < _MAX_TRAILS:
            self._begin(call)

    def _shadow(self, x: Tensor) -> tuple[Tensor, _Trail] | None:
        found = self._shadows.get(x)
        return None if found is None or found[1].over else found

    def _put(self, x: Tensor, value: Tensor, trail: _Trail) -> None:
        self._shadows.tidy(lambda owner: owner.over)
        if not self._shadows.put(x, value, trail):
            self._lose(trail)

    def _lose(self, trail: _Trail) -> None:
        if not trail.over:
            trail.over = True
            self.lost += 1

    # --- where it begins ---------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        several = len(call.func._schema.returns) > 1  # what else they return is for their own backward pass
        results, aside = call.results[:1] if several else call.results, call.phase == "optimizer"
        if aside and results[0].dtype == torch.float32:
            return
        counts = [c for x in results if (c := call.counts(x)) is not None and x.dtype in _FLOATS]
        if len(counts) < len(results):
            return
        if any(c.bad for c in counts) and not _fills_with_nonfinite(call):
            kind = "overflow"
        elif not aside and counts[0].zero >= _FLUSHED * counts[0].numel and call.plain_name in _CAN_FLUSH:
            kind = "underflow"
        else:
            return
        place = (kind, call.where, call.op)
        if self._places.get(place, 0) >= _MAX_PER_PLACE or any(c.bad for c in call.operand_counts()):
            return
        exact = call.exact()
        if exact is None:
            return
        wide = [(x, value, _affected(kind, x, value)) for x, value in zip(results, exact, strict=not several)]
        many = sum(int(hit.sum()) for _, _, hit in wide)
        possible = sum(int((torch.isfinite(value) & (value != 0)).sum()) for _, value, _ in wide)
        if not many or (kind == "underflow" and many < _FLUSHED * possible):
            return
        self._places[place] = self._places.get(place, 0) + 1
        self.begun += 1
        event = self._findings.event_of(call, closely=True)
        sizes = torch.cat([value[hit].abs() for _, value, hit in wide])
        event["data"] |= {"exact_amax": float(sizes.max()), "exact_amin": float(sizes.min()), "affected": many}
        trail = _Trail(kind, event)
        for x, value, hit in wide:
            if bool(hit.any()):
                self._put(x, torch.where(hit, value, x.detach().double()), trail)

    # --- where it goes -----------------------------------------------------------------------------------------------

    def _follow(self, call: Call, given: list[tuple[Tensor, Tensor, _Trail]]) -> None:
        trail = given[0][2]
        trail.hops += 1
        if not call.results:
            return  # indices and comparisons: what an infinity is compared with, it is larger than in FP64, too
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
        """What is left to follow of one result; None when the run's is as good as the shadow's."""
        if result.dtype not in _FLOATS and result.dtype != torch.float64:
            self._lose(trail)
            return None
        limits = torch.finfo(result.dtype)
        seen, size = result.detach().double(), value.abs()
        known, finite = torch.isfinite(value), torch.isfinite(seen)
        if trail.hidden_by is None and trail.kind == "overflow" and bool(finite.all()):
            trail.hidden_by = said(call)
        off = (seen - value).abs()
        wrong = known & finite & (size >= limits.tiny) & (size <= limits.max) & (off > _DAMAGE * size)
        # A unit in the last place of the largest element: what is smaller is lost in any sum with it.
        wrong &= size >= limits.eps * torch.where(known, size, 0.0).max()
        if trail.kind == "underflow" and not _is_factor(call):
            wrong &= seen != 0
        if trail.kind == "overflow" and trail.hidden_by is None:
            wrong &= False  # it still shows
        if bool(wrong.any()) and (alone := call.exact()) is not None:
            wrong &= ~((alone[number] - value).abs() <= _DAMAGE * size)  # by the rounding of this op, not before it
        if bool(wrong.any()):
            self._tell(call, trail, number, wrong, value)
            return None
        affected = known & (~finite | (off > _SAME * size))
        return torch.where(affected, value, seen) if bool(affected.any()) else None

    def _tell(self, call: Call, trail: _Trail, number: int, wrong: Tensor, value: Tensor) -> None:
        trail.over = True
        result, many = call.results[number], int(wrong.sum())
        seen = result.detach().double()
        data = {
            "wrong": many,
            "of": int(value.numel()),
            **worst(wrong, value.abs(), seen, value),
            "hops": trail.hops,
            "hidden_by": trail.hidden_by,
            "shown_by": said(call),
        }
        right = torch.where(wrong, value, seen)
        self._effects.begin(trail.kind, trail.event, many / value.numel(), result, right, **data)


def _unguarded(call: Call, trail: _Trail) -> Call:
    """The op with the least number of the run's format, where it guards against zero, replaced by that of FP64.

    ``x.clamp(min=torch.finfo(x.dtype).tiny)`` means "not zero" in any format: a wider one would have let more through.
    """
    if trail.kind != "underflow" or call.plain_name not in _GUARDS or not call.results:
        return call
    limits = torch.finfo(call.results[0].dtype)
    least = (limits.tiny, limits.smallest_normal, limits.smallest_normal * limits.eps)

    def wide(value: Any) -> Any:
        return torch.finfo(torch.float64).tiny if isinstance(value, float) and value in least else value

    return replace(call, args=tuple(map(wide, call.args)), kwargs={k: wide(v) for k, v in call.kwargs.items()})


def _affected(kind: str, result: Tensor, value: Tensor) -> Tensor:
    """Where a result is not finite, or zero, and its FP64 value is."""
    lost = (result == 0) & (value != 0) if kind == "underflow" else ~torch.isfinite(result)
    return torch.isfinite(value) & lost


def _is_factor(call: Call) -> bool:
    """Whether tensors are multiplied or divided element by element, or as matrices."""
    return call.plain_name in _FACTORS and sum(x.numel() > 1 for x in call.operands) > 1


def _fills_with_nonfinite(call: Call) -> bool:
    """A mask being made: the infinity is an argument."""
    values = [*call.args, *call.kwargs.values()]
    return any(isinstance(v, float) and not math.isfinite(v) for v in values)
