"""Measures how much a wrong tensor changes the results it feeds, in FP64, up to the first op that dilutes the error.

A bias of 1e-8 that a cast flushes is lost completely, and added to activations of 1 it never mattered. So a fact about
a wrong tensor also states how wrong the final results are. Ops that read the tensor are run again in FP64, once on the
run's values and once on the right ones. A result as wrong as the tensor (a view, a product, a scaling) is followed in
its place. The first result that consists mostly of other contributions settles it: the error's share of that result is
the effect. Numbers that the result's format could not hold anyway do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.scan_facts import Event, Findings, op_reference
from precdoctor.recording.deepscan.scanned_op import Call
from precdoctor.recording.ops.dispatched_ops import tensors_in
from precdoctor.recording.ops.storage_notes import Notes

Owner = TypeVar("Owner")
#: Maximum number of errors per scan, of ops that an error is followed through, of shadows at a time.
_MAX_ERRORS, _MAX_HOPS, _MAX_SHADOWS = 64, 64, 64
#: An error is diluted in a result if its share there is below this part of its share of the tensor in which it arose.
_DILUTED = 0.5
#: Effects below this are no fact, and elements this close are right: an eighth of a BF16 ulp, more than any op in BF16
#: can resolve.
_NOTED = 2.0**-12
#: Least number of elements per row, and of rows, for rows to be judged separately.
_PER_ROW, _ROWS = 8, 8
#: Ops with an argument that is only added, and its position: its effect can be bounded without running them again.
_ADDED = {"addmm": 0, "baddbmm": 0, "addmv": 0, "convolution": 2}
_ADDITIONS = op_names("add sub")
#: The op behind ``item``.
_TO_NUMBER = "_local_scalar_dense"
_COMPARISONS = op_names("lt le gt ge eq ne")
#: Ops that read only a tensor's shape: ``backward`` begins with ``ones_like(loss)``.
_SHAPES = op_names("ones_like zeros_like full_like empty_like rand_like randn_like randint_like")


@dataclass
class Room:
    """Number of FP64 elements that all shadows of one scan together may still take."""

    left: int


class Shadows(Generic[Owner]):
    """The right values, in FP64, of tensors of the run, each with the owner that follows it.

    Args:
        room: shared with other shadows of the scan.
        most: maximum number of shadows at a time.
    """

    def __init__(self, room: Room, most: int) -> None:
        self._room, self._most = room, most
        self._held: dict[int, tuple[weakref.ref[Tensor], Tensor, Owner]] = {}

    def get(self, x: Tensor) -> tuple[Tensor, Owner] | None:
        """Return a tensor's FP64 values and their owner; None if it has no shadow."""
        found = self._held.get(id(x))
        return (found[1], found[2]) if found is not None and found[0]() is x else None

    def put(self, x: Tensor, value: Tensor, owner: Owner) -> bool:
        """Replace a tensor's shadow; return False, without a shadow, if there is no room."""
        self.drop(x)
        if len(self._held) >= self._most or value.numel() > self._room.left:
            return False
        self._room.left -= value.numel()
        self._held[id(x)] = (weakref.ref(x), value, owner)
        return True

    def drop(self, x: Tensor) -> None:
        self._drop(id(x))

    def tidy(self, over: Callable[[Owner], bool]) -> None:
        """Remove shadows whose tensors are gone or whose owners are ``over``."""
        for key in [k for k, (ref, _, owner) in self._held.items() if ref() is None or over(owner)]:
            self._drop(key)

    def _drop(self, key: int) -> None:
        """Remove a shadow by ``id`` of its tensor, and give its room back."""
        if (held := self._held.pop(key, None)) is not None:
            self._room.left += held[1].numel()


@dataclass(eq=False)
class Error:
    """A wrong tensor, the fact about it, and its effect.

    Attributes:
        share: the error's share of the tensor's magnitude, over the wrong elements.
        effect: the largest share of a final result; None if unknown.
        fed: the op that made that result.
        matters: false for a copy that no op has read so far: one made for a checkpoint does no harm.
    """

    kind: str
    event: Event
    weight: float
    data: dict[str, Any]
    share: float
    effect: float | None = None
    fed: Event | None = None
    hops: int = 0
    matters: bool = True

    def settle(self, effect: float, fed: Event) -> None:
        """Note the effect on a final result, if it is the largest so far."""
        if self.effect is None or effect > self.effect:
            self.effect, self.fed = effect, fed


@dataclass(eq=False)
class _CarriedErrors:
    """The errors that a tensor carries, the effect of each on it, and the op that made the tensor."""

    effects: dict[Error, float | None] = field(default_factory=dict)
    fed: Event | None = None
    #: Whether no op has read the tensor so far.
    unread: bool = True
    #: Whether the tensor is a view; it may serve autograd alone.
    view: bool = False


class Effects:
    """Follows all errors of one scan."""

    def __init__(self, findings: Findings, room: Room) -> None:
        self._findings = findings
        self._shadows: Shadows[_CarriedErrors] = Shadows(room, _MAX_SHADOWS)
        self._held: list[_CarriedErrors] = []
        self._errors: list[Error] = []
        #: Copies that no op has read yet.
        self._copies: Notes[Error] = Notes()

    @property
    def follows_some(self) -> bool:
        return bool(self._errors)

    @property
    def has_copies(self) -> bool:
        """Whether copies are watched for the first op that reads them."""
        return bool(self._copies)

    def watch_copy(self, error: Error, copy: Tensor) -> None:
        """Drop the fact about a copy unless an op reads its memory before the scan ends; views do not count."""
        error.matters = False
        self._copies.put(copy, error)

    def note_reads(self, args: Any, kwargs: Any) -> None:
        """Note the copies among an op's operands as read."""
        for x in tensors_in((args, kwargs)):
            if (error := self._copies.get(x)) is not None:
                error.matters = True
                self._copies.drop(x)

    def begin(self, kind: str, event: Event, weight: float, x: Tensor, right: Tensor, **data: Any) -> Error | None:
        """Follow a wrong tensor; the fact about it is noted when the scan ends.

        Args:
            event: from :meth:`Findings.event_of`, about the op that made the tensor wrong.
            weight: ranks the facts of one place.
            x: the tensor of the run.
            right: its right values, in FP64.

        Returns:
            The error; None if too many are followed already: the fact is then noted without an effect.
        """
        if len(self._errors) >= _MAX_ERRORS:
            self._findings.add_event(kind, event, weight, **data)
            return None
        error = Error(kind, event, weight, data, _shares(x.detach().double(), right, x.dtype)[0])
        self._errors.append(error)
        self.carry(error, x, right)
        return error

    def carry(self, error: Error, x: Tensor, right: Tensor) -> None:
        """Follow an error in this tensor from now on."""
        error.hops = 0
        known = self._shadows.get(x)
        before = known[1] if known is not None else _CarriedErrors()
        self._put(x, right, _CarriedErrors({error: error.effect, **before.effects}, before.fed, view=before.view))

    def _put(self, x: Tensor, right: Tensor, held: _CarriedErrors) -> None:
        """Give a tensor a shadow; settle its errors if there is no room."""
        self._shadows.tidy(lambda _: False)
        if (known := self._shadows.get(x)) is not None:
            known[1].unread = False
        if self._shadows.put(x, right, held):
            self._held.append(held)
        else:
            self._settle_all(held)

    def after(self, call: Call) -> None:
        """Follow the wrong tensors that an op has read."""
        given = [(x, *found) for x in call.operands if (found := self._shadows.get(x)) is not None]
        if not given or call.plain_name.startswith("new_") or call.plain_name in _SHAPES:
            return
        if not call.results:
            self._compare(call, given)
            return
        for _, _, held in given:
            held.unread = False
        if self._bounded(call, given):
            return
        errors = list(dict.fromkeys(e for _, _, held in given for e in held.effects))
        for error in errors:
            error.hops += 1
        right, seen = call.again({id(x): value for x, value, _ in given}), call.exact
        if right is None or seen is None or max(e.hops for e in errors) > _MAX_HOPS:
            for _, _, held in given:
                self._settle_all(held)
            return
        alone = dict.fromkeys(errors, right)
        if len(errors) > 1:
            alone = {e: call.again({id(x): v for x, v, h in given if e in h.effects}) or right for e in errors}
        several = len(call.func._schema.returns) > 1  # further results only serve the op's own backward pass
        for number, result in enumerate(call.results[:1] if several else call.results):
            effects = {e: _shares(seen[number], alone[e][number], result.dtype) for e in errors}
            joint = _shares(seen[number], right[number], result.dtype)
            if max(share for share, _ in effects.values()) < _DILUTED * joint[0]:
                effects = dict.fromkeys(errors, joint)  # factors of a product: correcting one alone changes nothing
            self._follow(call, result, right[number], effects)

    def _compare(self, call: Call, given: list[tuple[Tensor, Tensor, _CarriedErrors]]) -> None:
        """Settle errors at zero if a comparison (a check of arguments) has the same outcome on the right values.

        Errors that an epsilon made also end in a number without gradient that the script reads: ``atol + rtol * size``
        of an adaptive solver is no guard, and decides on the length of its next step.
        """
        if call.plain_name == _TO_NUMBER:
            for x, _, held in given:
                if not x.requires_grad and all(error.kind == "floor" for error in held.effects):
                    self._settle_at_zero(call, held)
            return
        right = call.decided({id(x): value for x, value, _ in given}) if call.plain_name in _COMPARISONS else None
        if right is None or not call.whole or not torch.equal(right, call.whole[0]):
            return
        for _, _, held in given:
            self._settle_at_zero(call, held)

    @staticmethod
    def _settle_at_zero(call: Call, held: _CarriedErrors) -> None:
        """Note that the errors of a tensor changed nothing through the op that has read it."""
        held.unread = False
        for error in held.effects:
            error.settle(0.0, op_reference(call))

    def _follow(self, call: Call, result: Tensor, right: Tensor, effects: dict[Error, tuple[float, float]]) -> None:
        """Follow the errors that a result carries; settle those that it dilutes."""
        held = _CarriedErrors(fed=op_reference(call), view=call.func.is_view)
        for error, (share, effect) in effects.items():
            if share >= _DILUTED * error.share:
                held.effects[error] = effect
            else:
                error.settle(effect, op_reference(call))
        if held.effects:
            self._put(result, right, held)
        else:
            self._shadows.drop(result)

    def _bounded(self, call: Call, given: list[tuple[Tensor, Tensor, _CarriedErrors]]) -> bool:
        """Settle errors at zero if the op only adds them and its result dwarfs them; return whether it did."""
        at, result = _ADDED.get(call.plain_name), call.results[0]
        if call.kwargs or (call.plain_name not in _ADDITIONS and (at is None or at >= len(call.args))):
            return False
        if any(at is not None and x is not call.args[at] for x, _, _ in given):
            return False
        size = result.detach().double().abs()
        off = ((right - call.before(x).detach().double()).abs() for x, right, _ in given)
        if any(bool((o > _NOTED * size).any()) for o in off):
            return False
        self._shadows.drop(result)
        for _, _, held in given:
            self._settle_at_zero(call, held)
        return True

    def _settle_all(self, held: _CarriedErrors) -> None:
        """Settle the errors of a tensor that cannot be followed further."""
        for error, effect in held.effects.items():
            if effect is not None and held.fed is not None:
                error.settle(effect, held.fed)

    def finish(self) -> None:
        """Note the facts whose errors had an effect, or an unknown one, once the scan is over."""
        for view in (False, True):
            for held in self._held:
                known = view and all(e.effect is not None for e in held.effects)
                if held.unread and held.view == view and not known:
                    self._settle_all(held)
        for error in self._errors:
            effect = error.effect
            if not error.matters:
                continue
            if effect is None:
                self._findings.add_event(error.kind, error.event, error.weight, **error.data)
            elif effect >= _NOTED:
                weight = min(error.weight, effect)
                self._findings.add_event(error.kind, error.event, weight, **error.data, effect=effect, fed=error.fed)
        self._errors, self._held = [], []
        self._copies.clear()


def _shares(seen: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return how wrong a result is: |right - seen| relative to |right| (:func:`_share`), over elements that differ.

    The second number counts no error of elements that the result's format cannot hold as normal numbers.

    Args:
        seen: FP64 result on the run's values.
        right: FP64 result on the right values.
        dtype: of the run's result.
    """
    size = right.abs()
    off = torch.where(torch.isfinite(seen), (right - seen).abs(), size)
    differ = torch.isfinite(right) & (off > _NOTED * size)
    size = torch.where(differ, size, 0.0)
    if not float(size.sum()):
        return (1.0, 0.0) if bool(differ.any()) else (0.0, 0.0)
    held = differ & (size >= torch.finfo(dtype).tiny)
    lost, of_it = (_share(_rows(torch.where(kept, off, 0.0)), _rows(size), size.shape) for kept in (differ, held))
    return lost, of_it


def _rows(x: Tensor) -> Tensor:
    return x.sum(-1) if x.dim() else x


def _share(off: Tensor, size: Tensor, shape: torch.Size) -> float:
    """Return the sum of ``off`` over the sum of ``size``, or that ratio in the median row if larger; at most 1.

    One row that is a thousand times larger dominates the sums; the median shows the effect on most samples or tokens.

    Args:
        off, size: sums over the rows of tensors of this shape.
    """
    whole = float(size.sum())
    share = float(off.sum()) / whole if whole > 0 else 1.0
    there = size > 0
    if shape and shape[-1] >= _PER_ROW and size.numel() >= _ROWS and int(there.sum()) * 2 > size.numel():
        share = max(share, float((off[there] / size[there]).median()))
    return min(1.0, share)
