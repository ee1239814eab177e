"""Detects sums that are really accumulated in half, and variances computed as the difference of two large moments.

Name and result dtype of an op show little, because kernels accumulate in wider formats. So a reduction is run again in
FP64 on its operands, and the error is what counts. A running total on one line gets an FP64 twin, to which the same
terms are added. Moments, which are small, keep their FP64 values until their difference is used. Outside of modules and
losses (gradients summed by hand, counts, averages) reductions and totals are measured in the same way, but without
their effect.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.effects import Effects, Error
from precdoctor.recording.deepscan.scan_facts import Event, Findings, op_reference, worst
from precdoctor.recording.deepscan.scanned_op import FLOATS, HALF, Call
from precdoctor.recording.model import static
from precdoctor.recording.model.tensor_leaves import version
from precdoctor.recording.ops.tensor_facts import dtype_name

_REDUCTIONS = op_names(
    "sum mean var std var_mean std_mean norm linalg_vector_norm logsumexp prod dot vdot mv addmv cumsum cumprod "
    "logcumsumexp embedding_dense_backward index_put _index_put_impl index_add scatter_add scatter_reduce "
    "index_reduce segment_reduce _embedding_bag_dense_backward mm bmm addmm baddbmm"
)
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
#: Maximum number of multiplications of a matrix product that is run again.
_MAX_PRODUCT = 1 << 22
#: Maximum number of reruns of a reduction at one place.
_MAX_PER_PLACE = 2
#: Relative errors (L2) are noted from here on, in half ulps of the dtype.
_NOTED_ULPS = 16.0
#: Least number of terms of a running total for its error to be measured; from there on four times per doubling.
_MIN_TERMS = 16
#: From this share of the added terms on, an error is followed however small it is relative to the total.
_SWAMPED = 0.5
#: Phases in which the effect of a wrong sum is followed; maximum number of elements of a total in other phases.
_FOLLOWED, _MAX_TOTAL = frozenset(("forward", "loss")), 1 << 18
#: Phases in which moments are followed: data may be normalised before the model.
_MOMENT_PHASES = _FOLLOWED | {"script"}
_MOMENTS = frozenset(("sum", "mean"))
_SQUARES = frozenset(("mul", "pow", "square"))
_DIFFERENCES = frozenset(("sub", "add", "rsub"))
#: Ops that use a variance; by then an epsilon has covered its error, or the error matters.
_USES = frozenset(("rsqrt", "sqrt", "div", "reciprocal", "pow", "log", "mul", "exp"))
#: If more bits cancel than this, FP64 has lost the difference as well: there is no better value to compare with.
_KNOWN_BITS = 44
_MAX_SHADOWS = 256


@dataclass
class _Total:
    """A running total on one line."""

    last: weakref.ref[Tensor]
    #: Version counter of ``last``: if another op writes to it (the state of a GRU), it is no total any more.
    version: int
    #: For an in-place total: its values after the last term, to see whether another op has written to it.
    seen: Tensor | None = None
    twin: Tensor | None = None
    #: The total's FP64 values before the second term.
    start: Tensor | None = None
    terms: int = 1
    #: The error that is followed, once the total is wrong beyond the rounding of its format.
    error: Error | None = None
    #: Whether the total was subtracted from something: what it did not take up may be kept (Kahan).
    compensated: bool = False


@dataclass
class _Moment:
    """A small tensor computed from reductions: its FP64 value and kind."""

    value: Tensor
    #: mean | mean-of-products | product | difference
    kind: str
    #: For a difference: its op, and the number of bits that each element lost.
    event: Event | None = None
    bits: Tensor | None = None


class Sums:
    """Examines reductions, running totals, and differences of moments."""

    def __init__(self, findings: Findings, effects: Effects) -> None:
        self._findings, self._effects = findings, effects
        self._places: Counter[Any] = Counter()
        self._totals: dict[Any, _Total] = {}
        self._moments: static.ByIdentity[Tensor, _Moment] = static.ByIdentity()
        self._products: static.ByIdentity[Tensor, bool] = static.ByIdentity()
        #: Results of scaling a total (``discount * total``): the total, and the result's FP64 values.
        self._scaled: static.ByIdentity[Tensor, tuple[weakref.ref[Tensor], Tensor]] = static.ByIdentity()

    def after(self, call: Call) -> None:
        if not call.results or call.results[0].dtype not in FLOATS:
            return
        if call.results[0].dtype in HALF:
            if call.plain_name in _REDUCTIONS:
                self._reduction(call)
            elif call.plain_name == "add":
                self._add_term(call)
            elif call.name == "mul":
                self._follow_scaled(call)
            elif call.plain_name in ("sub", "rsub"):
                if call.plain_name == "sub":  # a total may decrease: log-probabilities
                    self._add_term(call)
                self._note_compensation(call)
        if call.phase in _MOMENT_PHASES:
            self._follow_moments(call)

    def follows(self, name: str) -> bool:
        """Return whether there are moments to follow, or an op of this name makes one or its terms."""
        return len(self._moments) > 0 or name in _MOMENTS or name in _SQUARES

    @staticmethod
    def sums(name: str) -> bool:
        """Return whether an op of this name may be a sum, scale a total, or compensate one."""
        return name.rstrip("_") in _REDUCTIONS or name.rstrip("_") in ("add", "sub", "rsub", "mul")

    # --- one op ------------------------------------------------------------------------------------------------------

    def _reduction(self, call: Call) -> None:
        """Run a reduction again in FP64, and note or follow its error."""
        place: Any = (call.where, call.op)
        if call.plain_name in _PRODUCTS:  # how they accumulate depends on the kernel, not on the place
            if (size := _multiplications(call)) > _MAX_PRODUCT:
                return
            place = (call.op, size)
        if self._places[place] >= _MAX_PER_PLACE:
            return
        self._places[place] += 1
        exact = call.exact
        if exact is None:
            return
        result = call.results[0]
        error = _relative_error(result, exact[0])
        if error is None or error < _NOTED_ULPS * _half_ulp(result.dtype):
            return
        # Cancellation in the sum is no fault of the accumulation, so the error is also related to the sum of
        # magnitudes.
        magnitudes = call.again({id(x): call.before(x).detach().abs() for x in call.operands})
        if magnitudes is None:
            return
        off = float((result.detach().double() - _rounded(exact[0], result)).norm() / magnitudes[0].norm())
        terms = max((x.numel() for x in call.operands), default=0) / max(result.numel(), 1)
        data = {"dtype": dtype_name(result.dtype), "error": error, "error_of_magnitudes": off, "terms": terms}
        if call.phase in _FOLLOWED:
            self._effects.begin("reduction", self._findings.event_of(call), error, result, exact[0], **data)
        else:
            self._findings.add("reduction", call, error, **data)

    # --- running totals ----------------------------------------------------------------------------------------------

    def _add_term(self, call: Call) -> None:
        """Add a term to a running total: ``total = total + x`` or ``- x`` on one line reads the line's last result."""
        result, within = call.results[0], call.name in ("add_", "sub_")
        if call.phase not in _FOLLOWED and result.numel() > _MAX_TOTAL:
            return
        place = (call.where, call.op, call.phase, id(result) if within else None)
        total = self._totals.get(place)
        last = total.last() if total is not None else None
        if total is None or last is None or not self._continues(call, total, last):
            if len(self._totals) < _MAX_SHADOWS or place in self._totals:
                self._totals[place] = _Total(weakref.ref(result), version(result), _seen(result, within=within))
            return
        if total.twin is None:
            total.twin = total.start = call.before(last).detach().double()
        twins = {id(last): total.twin.clone() if within else total.twin}
        twins |= {id(x): s for x in call.operands if (s := self._scaled_total(x, last)) is not None}
        again = call.again(twins)
        if again is None:
            del self._totals[place]
            return
        total.twin, total.last, total.terms = again[0], weakref.ref(result), total.terms + 1
        total.version = version(result)
        total.seen = _seen(result, within=within)
        if total.error is not None:
            self._effects.carry(total.error, result, total.twin)
        due = total.terms >= _MIN_TERMS and total.terms % (1 << total.terms.bit_length() - 3) == 0
        if due and not total.compensated:
            self._judge_total(call, total, total.twin)

    def _follow_scaled(self, call: Call) -> None:
        """Follow a scaled total, ``discount * total``: a sum with it continues the total."""
        for total in self._totals.values():
            last = total.last()
            if last is None or not any(x is last for x in call.operands) or last.shape != call.results[0].shape:
                continue
            again = call.again({id(last): total.twin if total.twin is not None else last.detach().double()})
            if again is not None:
                self._scaled.tidy()
                self._scaled.put(call.results[0], (total.last, again[0]))

    def _scaled_total(self, x: Tensor, last: Tensor) -> Tensor | None:
        """Return the FP64 values of a tensor that is the scaled total ``last``; None if it is not."""
        found = self._scaled.get(x)
        return found[1] if found is not None and found[0]() is last else None

    def _continues(self, call: Call, total: _Total, last: Tensor) -> bool:
        """Return whether an op continues a total that nothing else has written to."""
        if not any(x is last or self._scaled_total(x, last) is not None for x in call.operands):
            return False
        if total.seen is None:
            return version(last) == total.version
        return torch.equal(call.before(last), total.seen)

    def _judge_total(self, call: Call, total: _Total, twin: Tensor) -> None:
        result = call.results[0]
        error, start = _relative_error(result, twin), total.start
        added = float((twin - start).norm()) if start is not None else 0.0
        lost = float((result.detach().double() - twin).norm()) / added if added > 0 else 0.0
        swamped = call.phase in _FOLLOWED and lost >= _SWAMPED
        if error is None or not (error >= _NOTED_ULPS * _half_ulp(result.dtype) or swamped):
            return
        data = {"dtype": dtype_name(result.dtype), "error": error, "terms": total.terms, "of_added": lost}
        weight = max(error, lost) if swamped else error
        if call.phase not in _FOLLOWED:
            self._findings.add("total", call, error, **data)
        elif total.error is None:
            event = self._findings.event_of(call)
            total.error = self._effects.begin("total", event, weight, result, twin, **data)
        elif weight >= total.error.weight:
            total.error.weight, total.error.data = weight, data

    def _note_compensation(self, call: Call) -> None:
        """Mark a total as compensated if a tensor of its shape minus the total is computed: that keeps what it lost."""
        if len({x.shape for x in call.operands}) > 1:
            return
        for total in self._totals.values():
            total.compensated |= any(x is total.last() and x is not call.results[0] for x in call.operands)

    # --- differences of moments --------------------------------------------------------------------------------------

    def _follow_moments(self, call: Call) -> None:
        """Follow moments through an op; judge their difference when it is used."""
        result = call.results[0]
        if call.plain_name in _SQUARES:
            self._products.put(result, True)
        if call.plain_name in _MOMENTS:
            self._new_moment(call, result)
            return
        given = {id(x): m for x in call.operands if (m := self._moments.get(x)) is not None}
        if not given:
            return
        difference = next((m for m in given.values() if m.kind == "difference"), None)
        used = difference is not None and call.plain_name in _USES
        if not used and result.numel() > 2 * max(m.value.numel() for m in given.values()):
            return
        again = call.again({key: m.value for key, m in given.items()})
        if again is None:
            return
        if used and difference is not None:
            self._judge(call, difference, again[0])
            return
        self._keep(result, self._made_of(call, given, again[0], difference))

    def _new_moment(self, call: Call, result: Tensor) -> None:
        """Keep the FP64 value of a mean or a sum, if it has several elements of two terms or more."""
        terms = call.operands[0] if call.operands else None
        if terms is None or result.numel() < 2 or 2 * result.numel() > terms.numel():
            return
        if (exact := call.exact) is not None:
            self._keep(result, _Moment(exact[0], "mean-of-products" if self._products.get(terms) else "mean"))

    def _made_of(self, call: Call, given: dict[int, _Moment], value: Tensor, difference: _Moment | None) -> _Moment:
        """Return the moment that an op makes of others; of a difference also its op and each element's lost bits."""
        kinds = {m.kind for m in given.values()}
        if call.plain_name in _SQUARES and kinds == {"mean"}:
            return _Moment(value, "product")
        several = len(given) > 1 and kinds <= {"mean-of-products", "difference"}  # x^2 - 2xy + y^2
        if call.plain_name in _DIFFERENCES and (several or kinds >= {"mean-of-products", "product"}):
            size = torch.stack([m.value.abs().broadcast_to(value.shape) for m in given.values()]).amax(0)
            lost = torch.log2(size / value.abs())
            lost = torch.where((value != 0) & (size > 0) & (lost < _KNOWN_BITS), lost, torch.nan)
            more = difference is None or difference.bits is None or lost.nanmedian() > difference.bits.nanmedian()
            if 2 * int(lost.isfinite().sum()) > value.numel() and more:
                return _Moment(value, "difference", self._findings.event_of(call, closely=True), lost)
        if difference is not None:
            return replace(difference, value=value)
        return _Moment(value, next(iter(kinds)))

    def _keep(self, x: Tensor, moment: _Moment) -> None:
        if len(self._moments) >= _MAX_SHADOWS:
            self._moments.tidy()
            if len(self._moments) >= _MAX_SHADOWS:
                self._moments.clear()
            self._products.tidy()
        self._moments.put(x, moment)

    def _judge(self, call: Call, difference: _Moment, value: Tensor) -> None:
        """Follow a wrong result of an op that uses a difference of moments."""
        result = call.results[0]
        seen = result.detach().double()
        known = torch.isfinite(value) & (value != 0)
        off = (seen - value).abs() / value.abs()
        wrong = known & ~(off <= 0.25)  # NaN is also wrong
        many, of = int(wrong.sum()), int(known.sum())
        bits = difference.bits
        if difference.event is None or bits is None or not many:
            return
        lost = bits.reshape(wrong.shape)[wrong] if bits.numel() == wrong.numel() else bits
        if not bool(lost.isfinite().any()):
            lost = bits
        self._effects.begin(
            "cancellation",
            difference.event,
            many / of,
            result,
            torch.where(wrong, value, seen),
            dtype=dtype_name(result.dtype),
            bits_lost=float(lost.nanmedian()),
            wrong=many,
            of=of,
            **worst(wrong, off.nan_to_num(torch.inf), seen, value),
            used_by=op_reference(call),
        )


def _seen(total: Tensor, *, within: bool) -> Tensor | None:
    """Return a copy of an in-place total; None for any other."""
    return total.detach().clone() if within else None


def _multiplications(call: Call) -> int:
    factors = [x for x in call.operands if x.dim() >= 2][-2:]
    return factors[0].numel() * factors[1].shape[-1] if len(factors) == 2 else 0


def _relative_error(seen: Tensor, exact: Tensor) -> float | None:
    """Return the relative L2 error beyond the rounding of the result's format, over elements that are finite in both.

    None if the exact values of these are all zero.
    """
    exact = _rounded(exact, seen)
    seen = seen.detach().double()
    kept = torch.isfinite(seen) & torch.isfinite(exact)
    norm = float(exact[kept].norm())
    return float((seen - exact)[kept].norm()) / norm if norm > 0 else None


def _rounded(exact: Tensor, like: Tensor) -> Tensor:
    """Return FP64 values rounded to a result's format: numbers outside its range are no error of the sum."""
    return exact.to(like.dtype).double()


def _half_ulp(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) / 2
