"""Detects casts that lose much of a tensor, or what distinguishes its samples, and integers that wrap round."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from precdoctor.numerics import EXP_MIN
from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording import kernels
from precdoctor.recording.deepscan.effects import Effects
from precdoctor.recording.deepscan.scan_facts import Event, Findings, op_reference, worst
from precdoctor.recording.deepscan.scanned_op import Call, beside_channels
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.ops.dispatched_ops import tensors_in
from precdoctor.recording.ops.storage_notes import Notes
from precdoctor.recording.ops.tensor_facts import dtype_name
from precdoctor.recording.process import attach

#: Significant bits, including the leading one: integers up to 2 to this power are exact.
_BITS = {torch.float16: 11, torch.bfloat16: 8}
_INDEX_BITS = {**_BITS, torch.float32: 24}
#: A cast is examined from this share of the non-zero elements on that become zero, maximal or infinite.
_SUSPICIOUS = 0.1
#: A loss is noted from this share of the tensor's sum of magnitudes on.
_NOTED = 0.1
#: Share of the sum of magnitudes that does not belong to its bulk.
_TAIL = 0.01
#: Maximum number of elements of integer tensors; number of first elements checked for being integers.
_MAX_INTEGERS, _PEEK = 1 << 20, 64
#: Maxima of FP8 formats.
_FP8_LIMITS = frozenset((57344.0, 448.0, 240.0))
_INTEGERS = (torch.int16, torch.int32, torch.int64)
#: Integer formats that overflow by mistake; in wider ones arithmetic wraps round on purpose (hashes).
_NARROW = (torch.uint8, torch.int8, torch.int16)
_WRAPS = op_names("add sub rsub mul neg")
#: Wrapped integers are noted from this share of the elements on, if they are read as floats.
_WRAPPED = 0.01
#: Ops that take integers as indices; maximum number of integer tensors watched until such an op reads them.
_LOOKUPS, _MAX_INDICES = op_names("embedding index index_select gather one_hot _embedding_bag nll_loss_forward"), 64
#: Ops whose results have no more distinct values than their integer operands: offsets, hashes, bucket numbers.
_SHIFTS = op_names("add sub rsub mul bitwise_xor clamp clamp_min clamp_max minimum maximum clone where masked_fill "
                "remainder fmod")  # fmt: skip
#: Ops that shift integers held as floats into the range where floats are exact: ``x - first``.
_MOVES = op_names("add sub rsub")
#: A channel is gone if its error has this share of its energy: the rest is below the noise.
_GONE = 0.5
#: From this share of flushed elements on, the effect of an FP8 cast is followed even if their magnitude is negligible.
_MANY = 0.25
#: Least number of channels.
_CHANNELS = 4
#: Least number of samples of data whose features are examined; a feature is noted from this share of its variance on
#: that is rounding error.
_SAMPLES, _ROUNDED = 16, 0.1

#: Least, median and largest.
_Range = tuple[int, int, int]


class Casts:
    """Examines every narrowing cast of a forward pass and of the code around it, and narrow integer arithmetic."""

    def __init__(self, findings: Findings, effects: Effects) -> None:
        self._findings, self._effects = findings, effects
        #: Integers cast from floats with too few bits, until they are used as indices.
        self._indices: Notes[tuple[Event, dict[str, Any]]] = Notes()
        #: Of a shifted float tensor: the range of its inexact integers before the shift.
        self._shifted_ranges: Notes[_Range] = Notes()
        #: Integers that wrapped round, until they are read as floats.
        self._wrapped: Notes[tuple[Event, dict[str, Any]]] = Notes()
        #: The last result of a clamp to the range of an FP8 format, and the clamp's operand.
        self._clamped: tuple[weakref.ref[Tensor], Tensor] | None = None

    @staticmethod
    def wraps(name: str, whole: Sequence[Tensor]) -> bool:
        """Return whether an op of this name makes narrow integers that may have wrapped round."""
        return bool(whole) and whole[0].dtype in _NARROW and name in (*_WRAPS, "_to_copy")

    def _watch_wrapped(self, call: Call) -> None:
        """Watch a result of integer arithmetic, or of a cast to integers, if enough of its elements wrapped round."""
        result, source = call.whole[0], call.args[0] if call.args else None
        if result.layout is not torch.strided or result.is_meta or not 1 < result.numel() <= _MAX_INTEGERS:
            return
        if len(self._wrapped) >= _MAX_INDICES:
            return
        if call.name == "_to_copy":
            if not isinstance(source, Tensor) or source.dtype == torch.bool:
                return
            limits, exact = torch.iinfo(result.dtype), source.detach().to(result.device, torch.float64)
            wrong = (exact.trunc() < limits.min) | (exact.trunc() > limits.max)
        else:
            wide = [x.detach().long() if isinstance(x, Tensor) else x for x in call.args]
            if any(isinstance(x, float) for x in wide):
                return
            try:
                exact = call.func(*wide, **call.kwargs)
            except (RuntimeError, TypeError) as error:
                attach.let_through(error)
                return
            wrong = exact != result.long()
        many = int(wrong.sum())
        if many < _WRAPPED * result.numel():
            return
        kinds = {"from": dtype_name(source.dtype) if isinstance(source, Tensor) else "", "to": dtype_name(result.dtype)}
        data = {**kinds, "numel": result.numel(), "wrapped": many,
                **worst(wrong, exact.double().abs().nan_to_num(), result, exact)}  # fmt: skip
        self._wrapped.put(result, (self._findings.event_of(call), data))

    def _read_wrapped(self, call: Call) -> None:
        """Note wrapped integers that an op reads to compute floats."""
        for x in tensors_in((call.args, call.kwargs)):
            if not x.is_floating_point() and (known := self._wrapped.get(x)) is not None:
                event, data = known
                share = data["wrapped"] / data["numel"]
                self._findings.add_event("cast", event, share, **data, read_by=op_reference(call))

    def _follow_lookups(self, call: Call) -> None:
        """Follow integers read from floats of too few bits; note a fact once they are used as indices."""
        if call.name == "_to_copy":
            self._watch_indices(call)
        elif call.name in _MOVES and call.results:
            self._note_shift(call)
        elif self._indices and call.name in _SHIFTS:
            self._follow_indices(call)
        elif self._indices and call.plain_name in _LOOKUPS:
            for x in tensors_in((call.args, call.kwargs)):
                if (known := self._indices.get(x)) is not None:
                    self._indices.drop(x)
                    self._findings.add_event("cast", known[0], 1.0, **known[1], read_by=op_reference(call))

    def expects(self, name: str) -> bool:
        """Return whether an op of this name may read integers that are watched."""
        if self._wrapped and name in ("_to_copy", "div", "mul", "sub"):
            return True
        return bool(self._indices) and (name in _LOOKUPS or name in _SHIFTS)

    def _follow_indices(self, call: Call) -> None:
        """Watch the result if an op computes integers from watched ones."""
        if not call.whole or call.whole[0].dtype not in _INTEGERS:
            return
        for x in tensors_in((call.args, call.kwargs)):
            if (known := self._indices.get(x)) is not None and len(self._indices) < _MAX_INDICES:
                self._indices.put(call.whole[0], known)

    def _note_shift(self, call: Call) -> None:
        """Remember the range of integers held in 16-bit floats before an op shifts them."""
        source, result = call.args[0], call.results[0]
        if not isinstance(source, Tensor) or source.dtype not in _BITS or result.numel() > source.numel():
            return
        if len(self._shifted_ranges) < _MAX_INDICES and _holds_integers(source, _BITS[source.dtype]):
            self._shifted_ranges.put(result, _range(source))

    def _watch_indices(self, call: Call) -> None:
        """Watch the result of a cast to integers from floats that cannot hold all integers in its range."""
        source, result = call.args[0], call.whole[0] if call.whole else None
        if not isinstance(source, Tensor) or source.dtype not in _INDEX_BITS or result is None:
            return
        if result.dtype not in _INTEGERS or not 1 < result.numel() <= _MAX_INTEGERS:
            return
        if len(self._indices) >= _MAX_INDICES:
            return
        least, median, largest = self._shifted_ranges.get(source) or _range(result)
        if least < 0 or largest <= 2 ** _INDEX_BITS[source.dtype]:
            return
        if largest - least >= _MAX_INTEGERS:  # count distinct values in a stretch that holds the median
            least = max(least, min(median, largest + 1 - _MAX_INTEGERS))
            largest = min(largest, least + _MAX_INTEGERS - 1)
        whole = torch.arange(least, largest + 1, device=result.device)
        exist = int(torch.unique(whole.to(source.dtype).double()).numel())
        data = {
            "from": dtype_name(source.dtype),
            "to": dtype_name(result.dtype),
            "numel": result.numel(),
            "distinct_before": int(whole.numel()),
            "distinct_after": exist,
            "largest": float(largest),
            "least": float(least),
        }
        self._indices.put(result, (self._findings.event_of(call), data))

    def after(self, call: Call) -> None:
        """Examine an op of a forward pass or of the code around it."""
        self._follow_lookups(call)
        if self.wraps(call.name, call.whole):
            self._watch_wrapped(call)
        elif self._wrapped and call.results:
            self._read_wrapped(call)
        if call.name in ("clamp", "clamp_max") and call.results and call.args[-1] in _FP8_LIMITS:
            self._clamped = weakref.ref(call.results[0]), call.args[0].detach()
            return
        if call.name == "arange" and call.results and call.results[0].dtype in _BITS:
            self._note_equal_integers(call, None, call.results[0])
            return
        if call.name not in ("_to_copy", "copy_") or not call.results:
            return
        source, result = call.args[1 if call.name == "copy_" else 0], call.results[0]
        if not isinstance(source, Tensor) or source.layout is not torch.strided or source.dtype == result.dtype:
            return
        if source.dtype in _INTEGERS:
            if result.dtype in _BITS:
                self._note_equal_integers(call, source, result)
        elif source.is_floating_point() and _is_narrower(result.dtype, source.dtype):
            self._range(call, source, result)
            if result.dtype in _BITS and _holds_integers(source, _BITS[result.dtype]):
                self._note_equal_integers(call, source, result)
            elif result.dtype in _BITS and not source.requires_grad and call.phase in ("script", "forward"):
                self._note_rounded_features(call, source.detach(), result.detach())

    def _range(self, call: Call, source: Tensor, result: Tensor) -> None:
        """Note how much of a tensor's sum of magnitudes a cast has flushed, saturated or overflowed."""
        if result.dtype == torch.bfloat16:
            return  # same exponent range as FP32
        narrow, clamped, self._clamped = result.element_size() == 1, self._clamped, None
        cut = narrow and clamped is not None and clamped[0]() is source
        source = clamped[1] if clamped is not None and cut else source
        before, after = call.counts(source), call.counts(result)
        if before is None or after is None or before.numel == before.zero:
            return
        flushed = after.zero - before.zero
        clipped = after.bad - before.bad + (after.at_max - before.at_max if narrow else 0)
        if max(flushed, clipped) < _SUSPICIOUS * (before.numel - before.zero) or source.numel() > call.limit:
            return
        x, y = source.detach().to(result.device, torch.float64), result.detach().double()
        kept = torch.isfinite(x) & (y != -torch.inf)  # a huge negative number is a mask; as -Inf it still is one
        lost = torch.where(torch.isfinite(y), (x - y).abs(), x.abs())[kept].sum()
        whole = x[kept].abs().sum()
        share = float(lost / whole) if float(whole) > 0 else 0.0
        channels = _channels_gone(x, y) if narrow else 0.0
        nonzero = before.numel - before.zero
        if share < _NOTED and not channels and not (narrow and flushed >= _MANY * nonzero):
            return
        counted = {"nonzero": nonzero, "flushed": flushed, "clipped": clipped, "lost": share}
        if share < _NOTED:  # few elements hold the magnitude: follow only those that were flushed
            kept &= (y == 0) & (x != 0)
        if narrow:
            counted["channels"] = channels
        sizes = {"amax": before.amax, "amin_nonzero": before.amin_nonzero, "bulk": _bulk(source)}
        measured = {**_kinds(source, result), "numel": result.numel(), **counted, **sizes}
        event, weight = self._findings.event_of(call), max(share, channels)
        if call.phase in ("script", "forward", "loss"):
            error = self._effects.begin("cast", event, weight, result, torch.where(kept, x, y), **measured)
            if error is not None and call.phase == "script" and call.name == "_to_copy":
                self._effects.watch_copy(error, result)
        else:
            self._findings.add_event("cast", event, weight, **measured)

    def _note_rounded_features(self, call: Call, source: Tensor, result: Tensor) -> None:
        """Note a cast of data after which what distinguishes the samples is mostly rounding error in some feature.

        A feature is an index of the last dimension, of images a channel. Its mean is large beside its deviation:
        degrees of longitude in one town, years, pressures.
        """
        feature = 1 if source.dim() == 4 else source.dim() - 1
        others = [d for d in range(source.dim()) if d != feature]
        if not others or not _SAMPLES * source.shape[feature] <= source.numel() <= _MAX_INTEGERS:
            return
        x, error = source.double(), result.to(source.device).double() - source.double()
        energy = (x - x.mean(others, keepdim=True)).square().sum(others)
        lost = (error - error.mean(others, keepdim=True)).square().sum(others) / energy
        lost = torch.where(torch.isfinite(lost) & (energy > 0), lost, 0.0)
        at, many = int(lost.argmax()), int((lost >= _ROUNDED).sum())
        if not many:
            return
        values = x.select(feature, at)
        self._findings.add(
            "cast", call, float(lost[at]), **_kinds(source, result), numel=source.numel(),
            features=lost.numel(), features_rounded=many, feature=at, spread_lost=min(1.0, float(lost[at])),
            mean=float(values.mean()), deviation=float(values.std()),
            values_before=int(torch.unique(values).numel()),
            values_after=int(torch.unique(result.select(feature, at).double()).numel()),
        )  # fmt: skip

    def _note_equal_integers(self, call: Call, source: Tensor | None, result: Tensor) -> None:
        """Note a cast of integers, or an ``arange`` in half, that makes different integers equal."""
        if not 1 < result.numel() <= _MAX_INTEGERS:
            return
        largest = float(result.detach().double().abs().max())
        if largest <= 2.0 ** _BITS[result.dtype]:
            return
        before = result.numel() if source is None else int(torch.unique(source.detach()).numel())
        after = int(torch.unique(result.detach().float()).numel())
        if after < before:
            counts = {"distinct_before": before, "distinct_after": after, "largest": largest}
            kinds = _kinds(source, result)
            self._findings.add("cast", call, 1 - after / before, **kinds, numel=result.numel(), **counts)


def _range(x: Tensor) -> _Range:
    """Return least, median and largest of integers in any format."""
    whole = x.detach().long()
    return int(whole.min()), int(whole.median()), int(whole.max())


def _channels_gone(x: Tensor, y: Tensor) -> float:
    """Return the share of channels that lose half their energy in a cast; in the worst dimension."""
    shares = [0.0]
    for others in beside_channels(x):
        energy = x.square().sum(others)
        if energy.numel() < _CHANNELS or not bool(energy.isfinite().all()):
            continue
        gone = (x - y).square().sum(others) >= _GONE * energy
        shares.append(float((gone & (energy > 0)).sum()) / max(int((energy > 0).sum()), 1))
    return max(shares)


def _bulk(x: Tensor) -> float:
    """Return the power of two above which 99 % of a tensor's sum of magnitudes lies; it must not be all zero."""
    ints, _ = kernels.measured(x.detach())
    counts = ints[at.HIST + 1 : at.HIST + at.HIST_WIDTH]
    first = int(counts.nonzero()[0][0])
    mass = counts[first:] * 2.0 ** np.arange(first + EXP_MIN, first + EXP_MIN + counts.size - first)
    below = int((mass.cumsum() <= _TAIL * mass.sum()).sum())
    return float(2.0 ** (first + below + EXP_MIN))


def _kinds(source: Tensor | None, result: Tensor) -> dict[str, Any]:
    """Return source and target format of a cast, as an event names them."""
    return {"from": "integers" if source is None else dtype_name(source.dtype), "to": dtype_name(result.dtype)}


def _is_narrower(to: torch.dtype, source: torch.dtype) -> bool:
    """Return whether a cast goes to fewer bits, or to a smaller maximum."""
    return to.is_floating_point and (to.itemsize < source.itemsize or torch.finfo(to).max < torch.finfo(source).max)


def _holds_integers(x: Tensor, bits: int) -> bool:
    """Return whether a float tensor holds integers only (counts, positions), some beyond 2 to the power of ``bits``.

    False from 2^24 on, where every FP32 number is an integer.
    """
    if not 1 < x.numel() <= _MAX_INTEGERS:
        return False
    flat = x.detach().flatten()
    first = flat[:_PEEK]
    if not bool((first == first.trunc()).all()):
        return False
    largest = float(flat.abs().max())
    return 2.0**bits < largest < 2.0**24 and bool((flat == flat.trunc()).all())
