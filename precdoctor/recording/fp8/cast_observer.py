"""The observer behind the dispatch mode: follows scalings and clamps, and makes a row of every cast to float8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from precdoctor.numerics.formats import Format
from precdoctor.recording import kernels
from precdoctor.recording.fp8.cast_scope import Call, running_node
from precdoctor.recording.fp8.provenance import History, bound, is_float, scalar, scaled
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.ops.dispatched_ops import storage_key
from precdoctor.recording.ops.storage_notes import Notes
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.cast_operand import FLOAT8, Operand, launcher
from precdoctor.recording.slots.slot_table import Entry

#: By maximum: a clamp to exactly this range is the first half of a cast to that format.
_MAXIMA: dict[float, Format] = {f.max: f for f in reversed(FLOAT8.values())}


class Observer:
    """Observes one module call or backward pass.

    Args:
        call: takes the number of the running autograd node; returns the call whose cast it is, None if not recorded.
        name: takes a call and a name; returns the name, with a number if it was given before.
        results: float8 tensors and the entries of their casts.
    """

    def __init__(
        self,
        recorder: Recorder,
        call: Callable[[int | None], Call | None],
        name: Callable[[Call, str], str],
        results: Notes[Entry],
    ) -> None:
        self._recorder = recorder
        self._call_of = call
        self._name = name
        self._results = results
        self._histories: Notes[History] = Notes()
        #: By slot: entries measured before a clamp that no cast has followed yet.
        self._pending: dict[int, Entry] = {}
        self.casts = 0
        self.before = guarded(recorder)(self._before)
        self.after = guarded(recorder)(self._after)
        self.written = guarded(recorder)(self._written)

    def close(self) -> None:
        """Discard entries measured before a clamp that turned out not to be half of a cast."""
        for slot in self._pending:
            self._recorder.slots.touched.pop(slot, None)
        self._pending.clear()

    # --- called by the mode ------------------------------------------------------------------------------------------

    def _before(self, what: str, args: Any, kwargs: Any) -> Any:
        """Handle an op before it runs. Returns the entry of a cast, the history after a clamp, else None."""
        x = args[0]
        if what == "convert" and (fmt := FLOAT8.get(kwargs.get("dtype"))) is not None:
            return self._cast(x, fmt)
        if what == "copy" and (fmt := FLOAT8.get(x.dtype)) is not None:
            return self._cast(args[1], fmt)
        if what == "clamp" and is_float(x):
            return self._clamp(x, *_limits(args, kwargs))
        return None

    def _after(self, what: str, args: Any, kwargs: Any, result: Any, before: Any) -> None:
        """Note the history of an op's result, or its cast; ``before``: the value of :meth:`_before`."""
        if what == "matmul":
            self._multiplied(args)
            self._note_product(args, kwargs)
        elif isinstance(before, Entry):
            self._results.put(result, before)
        elif isinstance(before, History):
            self._histories.put(result, before)
        elif what in ("mul", "div"):
            self._note(result, self._scaled(args[0], args[1], result, divide=what == "div"))
        elif what in ("convert", "copy"):
            source = args[1] if what == "copy" else args[0]
            if (entry := self._results.get(source)) is not None:
                self._results.put(result, entry)
            self._note(result, self._history(source) if is_float(result) and is_float(source) else None)
        elif what == "bound":
            data = max(args[:2], key=Tensor.numel)
            self._note(result, dataclasses.replace(self._history(data), whole=False) if is_float(data) else None)

    def _written(self, args: Any, kwargs: Any) -> None:
        """Delete the notes on tensors that an op has written to."""
        for x in (args[0] if args else None, kwargs.get("out")):
            if isinstance(x, Tensor):
                self._histories.drop(x)
                self._results.drop(x)

    # --- histories ---------------------------------------------------------------------------------------------------

    def _history(self, x: Tensor) -> History:
        if (found := self._histories.get(x)) is not None:
            return found
        return History(storage_key(x), self._recorder.names.full_name(x))

    def _scaled(self, a: Any, b: Any, result: Tensor, *, divide: bool) -> History | None:
        found = scaled(a, b, result, divide=divide)
        if found is None:
            return None
        history, by = self._history(found[0]), found[1]
        return history.by_parts(by, divide=divide) if isinstance(by, Tensor) else history.times(by)

    def _note(self, x: Tensor, history: History | None) -> None:
        if history is None:
            self._histories.drop(x)
        else:
            self._histories.put(x, history)

    def _clamp(self, x: Tensor, lower: Any, upper: Any) -> History:
        """Return the history of a clamp's result; measure its input if the bounds are those of a format."""
        history = self._history(x)
        limit = bound(lower, upper)
        fmt = _MAXIMA.get(limit) if limit is not None else None
        if fmt is None:
            return dataclasses.replace(history, whole=False)
        entry = self._measure(x, history, fmt)
        if entry is not None:
            self._pending[entry.slot] = entry
        return dataclasses.replace(history, measured=entry, whole=False)

    def _cast(self, x: Tensor, fmt: Format) -> Entry | None:
        """Return the entry of a cast: that of a clamp just before it, else a new one; None if the cast has no row."""
        if not is_float(x):
            return None
        history = self._history(x)
        entry, operand = history.measured, history.measured.operand if history.measured is not None else None
        if entry is None or operand is None or entry.slot not in self._pending or operand.fmt.max != fmt.max:
            return self._measure(x, history, fmt)
        del self._pending[entry.slot]
        operand.fmt = fmt
        return entry

    def _multiplied(self, args: Any) -> None:
        """Read the inverse scale of each operand from a product of float8 tensors."""
        newer = isinstance(args[2], (list, tuple))  # torch._scaled_mm_v2
        scales = [args[2], args[5]] if newer else [args[2], args[3]]
        for x, inverse in zip(args[:2], scales, strict=True):
            entry = self._results.get(x)
            operand = entry.operand if entry is not None else None
            if operand is None or operand.factors is not None or operand.by_parts:
                continue
            only = inverse[0] if isinstance(inverse, (list, tuple)) and len(inverse) == 1 else inverse
            if (value := scalar(only)) is not None:
                operand.factors = ((value, True),)

    def _note_product(self, args: Any, kwargs: Any) -> None:
        """Note how the product is accumulated: over how many terms, and whether in a narrow accumulator."""
        call = self._call_of(running_node())
        facts = self._recorder.facts
        if call is None or facts is None or args[0].dim() != 2:
            return
        sources = tuple(self._results.get(x) for x in args[:2])
        names = tuple(e.site.name if e is not None else None for e in sources)
        operands = [fmt.dtype if (fmt := FLOAT8.get(x.dtype)) else None for x in args[:2]]
        where = {"root": call.place.root, "module": call.place.module, "backward": call.backward}
        facts.fp8_product({**where, "operands": names, "dtypes": operands, "fast_accum": _fast(args, kwargs)},
                          terms=int(args[0].shape[1]))  # fmt: skip

    # --- rows --------------------------------------------------------------------------------------------------------

    def _measure(self, x: Tensor, history: History, fmt: Format) -> Entry | None:
        """Measure a tensor before its cast; None if the cast is in no recorded call."""
        recorder = self._recorder
        call = self._call_of(running_node())
        if call is None or not recorder.live:
            return None
        self.casts += 1
        known = _known_as(call, history)
        # An unknown tensor without factors may have been scaled and clipped by ops that are not followed.
        followed = known is not None or history.factors != ()
        factors = history.factors if followed else None
        operand = Operand(fmt, factors, history.whole and followed, by_parts=history.factors is None)
        name = self._name(call, known or ("grad_output" if call.backward else "cast"))
        entry = measure(recorder, call, name, x, operand)
        if entry is not None and history.parts is not None and (by := history.parts[0]()) is not None:
            block_scales(recorder, entry, by, inverse=history.parts[1])
        return entry

    def quantised(self, x: Tensor, scaled: Tensor, fmt: Format, multipliers: Tensor) -> tuple[Place, str] | None:
        """Record a call of a library's quantiser.

        Args:
            x: its input.
            scaled: the input times the scales, float32.
            fmt: the format of the elements.
            multipliers: the scales: one, or one per row or block.

        Returns:
            The module, and the operand's role there: ``weight``, ``input`` or ``grad_output``; None if not recorded.
        """
        recorder = self._recorder
        call = self._call_of(running_node())
        if call is None or not recorder.live:
            return None
        self.casts += 1
        history = self._history(x)
        name = self._name(call, _known_as(call, history) or ("grad_output" if call.backward else "cast"))
        by_parts = multipliers.numel() != 1
        operand = Operand(fmt, None if by_parts else ((scalar(multipliers), False),), whole=True, by_parts=by_parts)
        entry = measure(recorder, call, name, x, operand, scaled)
        if entry is not None and by_parts:
            block_scales(recorder, entry, multipliers, inverse=False)
        role = "weight" if history.parameter is not None else "grad_output" if call.backward else "input"
        return call.place, role


def _known_as(call: Call, history: History) -> str | None:
    """Return the name of the call's argument, or of the parameter, that a tensor began as; None for other tensors."""
    known = call.names.at(history.origin) if history.origin is not None else None
    if known is None and history.parameter is not None:  # another module's: relative to the casting module
        known = history.parameter.removeprefix(f"{call.place.module}.")
    return known


def block_scales(recorder: Recorder, operand: Entry, by: Tensor, *, inverse: bool) -> None:
    """Record the scales of an operand by row or block in a row of their own.

    ``by``: one multiplier per row or block; with ``inverse``, one divisor.
    """
    dense = tensor_leaves.plain(by) if recorder.options.takes("block_scale") else None
    if dense is None:
        return
    with kernels.apart_from_user_modes():
        dense = dense.detach().float()
        dense = dense.reciprocal() if inverse else dense
    place, _, name, call, phase, _, evaluating = operand.site
    recorder.measure(
        place, "block_scale", name, dense, dense, call=call, phase=phase, evaluating=evaluating, restart=True
    )


def measure(
    recorder: Recorder, call: Call, name: str, x: Tensor, operand: Operand, scaled: Tensor | None = None
) -> Entry | None:
    """Measure ``scaled``, by default ``x``, into the row of a cast of ``x``; None if the cast is not recorded."""
    dense = tensor_leaves.plain(x if scaled is None else scaled)
    kind = "fp8_operand" if operand.fmt.bits == 8 else "subbyte_operand"
    if dense is None:
        return None
    entry = recorder.measure(
        call.place, kind, name, x, dense, call=call.number, phase=call.phase, evaluating=call.evaluating,
        restart=True, launch=launcher(operand.fmt),
    )  # fmt: skip
    if entry is not None:
        entry.operand = operand
        entry.reached_by_backward = entry.reached_by_backward or call.backward
    return entry


def _fast(args: Any, kwargs: Any) -> bool:
    """Return ``use_fast_accum``, the last argument of both forms of ``torch._scaled_mm``."""
    position = 11 if isinstance(args[2], (list, tuple)) else 7
    return bool(args[position] if len(args) > position else kwargs.get("use_fast_accum", False))


def _limits(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the bounds of a clamp or a hard tanh; None for a missing one."""
    lower = args[1] if len(args) > 1 else kwargs.get("min", kwargs.get("min_val"))
    upper = args[2] if len(args) > 2 else kwargs.get("max", kwargs.get("max_val"))
    return lower, upper
