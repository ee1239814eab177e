"""The dispatch mode of a scan: runs every op as it is, then examines its operands and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.deepscan import cancellation, floors, op_audit
from precdoctor.recording.deepscan.cancellation import Differences
from precdoctor.recording.deepscan.cast_losses import Casts
from precdoctor.recording.deepscan.effects import Effects, Room
from precdoctor.recording.deepscan.floors import Floors
from precdoctor.recording.deepscan.micro_steps import MicroSteps
from precdoctor.recording.deepscan.op_audit import Audit
from precdoctor.recording.deepscan.repeats import Repeats
from precdoctor.recording.deepscan.saturation import Saturation
from precdoctor.recording.deepscan.scan_facts import Coverage, Event, Findings
from precdoctor.recording.deepscan.scanned_op import HALF, Call, Where
from precdoctor.recording.deepscan.sums import Sums
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.deepscan.trails import Trails
from precdoctor.recording.deepscan.window_mode import WindowMode
from precdoctor.recording.model import static
from precdoctor.recording.ops.dispatched_ops import (
    OVERWRITING,
    UNINITIALISED,
    is_out_variant,
    op_name,
    sequence_number,
    tensors_in,
    written_by,
)
from precdoctor.recording.ops.source_lines import op_lines
from precdoctor.recording.ops.tensor_facts import dtype_name

#: Maximum number of ops examined per scan (rollouts and long recurrences make millions), and of ops of the script and
#: the optimizer.
MAX_OPS, _MAX_ASIDE = 20_000, 50_000
#: Data code is followed in FP64 up to this many ops of script and optimizer, and results up to this many elements.
_MAX_FOLLOWED_ASIDE, _MAX_DATA = 2_000, 1 << 20
#: Maximum time of one scan, in ns: evaluation and data code may run inside it.
_MAX_NS = 60 * 10**9
#: Phases in which ops are examined as forward ops; and phases in which only states, sums, casts and differences are.
_FORWARD, _STAGES_ASIDE = frozenset(("forward", "loss")), frozenset(("script", "optimizer"))
#: Ops that are followed in code of the script, by name.
_FOLLOWED_ASIDE = cancellation.FOLLOWED | floors.FOLLOWED | op_audit.CHAINS
#: Maximum number of optimizers whose states are named.
_MAX_OPTIMIZERS = 16
#: Maximum number of names listed of weights whose gradients are zero.
_MAX_NAMES = 8
#: Bytes of an element of a shadow.
_FP64 = 8


class ScanMode(WindowMode):
    """Examines every op of a step.

    Args:
        memory: maximum size in bytes of the FP64 operands of one op, and of all shadows together.
        values: whether single operand values may be kept.
        targets: weights of the models.

    Attributes:
        ops: number of ops examined.
    """

    most_micro_steps: int = 2

    def __init__(self, memory: int, *, values: bool, targets: Targets | None = None) -> None:
        super().__init__()
        self.ops = 0
        self._ops_aside = 0
        self.coverage = Coverage()
        self._findings = Findings(values=values)
        self._limit = memory // _FP64
        room = Room(self._limit)
        self._effects = Effects(self._findings, room)
        self.trails = Trails(self._findings, self._effects, room)
        self._audit, self._differences = Audit(self._findings), Differences(self._findings, self._effects)
        self._casts, self._sums = Casts(self._findings, self._effects), Sums(self._findings, self._effects)
        self._floors, self._saturation = Floors(self._findings, self._effects), Saturation(self._findings)
        self._repeats = Repeats(self._findings)
        self._micro_steps = MicroSteps(self._findings, targets or Targets())
        #: Samples of the states that the running in-place op writes to, from before it.
        self._samples_before: list[Tensor | None] = []
        self._stepped: static.ByIdentity[torch.optim.Optimizer, bool] = static.ByIdentity()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer, so that its states can be named."""
        if len(self._stepped) < _MAX_OPTIMIZERS:
            self._stepped.put(optimizer, True)

    def backward_entered(self) -> None:
        """Check, as ``backward`` begins, whether gradients of the last micro-step were dropped."""
        self.guarded(lambda: self._micro_steps.backward_begins(self.micro_step))

    def backward_left(self) -> None:
        """Watch the gradients that ``backward`` has computed, unless its ops could not be seen."""
        if not self.changes_gradients:
            self.guarded(lambda: self._micro_steps.backward_ended(self.micro_step))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped and still exist."""
        return self._stepped.keys()

    @property
    def full(self) -> bool:
        """Whether a limit was reached, so that no further op is examined."""
        return self.ops >= MAX_OPS or self._ops_aside >= _MAX_ASIDE or self.spent_ns >= _MAX_NS

    def facts(self, targets: Targets | None = None) -> list[Event]:
        """Return the facts as events, once the scan is over."""
        targets = targets or Targets()
        self._effects.finish()
        self._audit.finish(targets)
        self._floors.finish()
        self._repeats.finish()
        self._micro_steps.finish()
        events = self._findings.events()
        if ends := [e for e in events if e["data"]["kind"] in ("flush", "closed")]:
            zero = targets.zero_gradients()
            for event in ends:
                event["data"] |= {"zero_gradients": len(zero), "zero_gradients_of": zero[:_MAX_NAMES]}
        return events

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.cannot_look or self.full:
            return func(*args, **kwargs)
        phase = self.phase()
        if self._effects.has_copies and not func.is_view:
            self.guarded(lambda: self._effects.note_reads(args, kwargs))
        if self._micro_steps.watches and phase != "backward":
            self.guarded(lambda: self._micro_steps.note_use(op_name(func), args, kwargs))
        if phase not in _STAGES_ASIDE:
            swapped = self.guarded(lambda: self._before(func, args, kwargs))
            sequence = sequence_number()
            result = func(*args, **kwargs)
            if swapped is not None:
                self.guarded(lambda: self._look(func, args, kwargs, swapped, sequence, result))
            return result
        return self._run_aside(func, args, kwargs, phase)

    def _run_aside(self, func: Any, args: Any, kwargs: Any, phase: str) -> Any:
        """Run an op of the script or an optimizer; examine what it does to states, sums and data."""
        self._ops_aside += 1
        if phase == "script" and func.is_view and self._effects.follows_some:
            return self._run_view(func, args, kwargs, phase)
        swapped = self.guarded(lambda: self._before_aside(func, args, kwargs))
        result = func(*args, **kwargs)
        if swapped is not None:
            self.guarded(lambda: self._look_aside(func, args, kwargs, phase, swapped, result))
        return result

    def _run_view(self, func: Any, args: Any, kwargs: Any, phase: str) -> Any:
        """Run a view op in data code, and follow it in case it is a view of a wrong tensor."""
        result = func(*args, **kwargs)

        def look() -> None:
            results = [x for x in tensors_in(result) if x.is_floating_point() and not _is_elsewhere(x)]
            if results:
                where = Where("", "", *op_lines())
                self._effects.after(Call(func, args, kwargs, phase, where, self.micro_step, {}, results, self._limit))

        self.guarded(look)
        return result

    def _before_aside(self, func: Any, args: Any, kwargs: Any) -> dict[int, Tensor] | None:
        """Before an op of script or optimizer: sample the states that it writes to.

        Returns:
            A copy of its target, by ``id``, if it is a sum or a guard in place; None if it is not to be examined.
        """
        self._samples_before = []
        if func.namespace != "aten" or is_out_variant(func) or func.is_view:
            return None
        name = op_name(func)
        if not name.endswith("_"):
            return {}
        self._samples_before = self._audit.before(name, args, kwargs)
        target = args[0] if args and isinstance(args[0], Tensor) else None
        summed = target is not None and target.dtype in HALF and self._sums.sums(name)
        if target is None or not (summed or self._floors.guards(name, args)) or target.numel() > self._limit:
            return {}
        return {} if _is_elsewhere(target) else {id(target): target.detach().clone()}

    def _look_aside(self, func: Any, args: Any, kwargs: Any, phase: str, swapped: dict[int, Tensor],
                    result: Any) -> None:  # fmt: skip
        """After an op of the script or an optimizer: examine it."""
        name, whole = op_name(func), list(tensors_in(result))
        results = [x for x in whole if x.is_floating_point()]
        within = name.endswith("_")
        if not within:
            self._audit.note_new(name, result)
        if any(map(_is_elsewhere, whole)):
            return
        sums = bool(results) and results[0].dtype in HALF and self._sums.sums(name)
        stays = any(x is not None for x in self._samples_before)
        follows = sums or stays or name in _FOLLOWED_ASIDE or phase == "optimizer" or self._casts.expects(name)
        data = phase == "script" and self._in_time(results)
        follows |= data and (self._effects.follows_some or self._sums.follows(name))
        follows |= self._casts.wraps(name, whole)
        if not (whole or stays) or not follows or name in UNINITIALISED:
            if within and args and isinstance(args[0], Tensor):
                self._differences.written(args[0])
            return
        where = Where("", "", *op_lines())
        call = Call(func, args, kwargs, phase, where, self.micro_step, swapped, whole, self._limit)
        if stays:
            self._audit.updated(call, self._samples_before)
        if data:
            self._effects.after(call)
        if phase == "script":
            self._differences.after(call, self._audit.is_older)
        else:
            self._differences.remember(call)
        if results and not within:
            self._audit.chained(call)
            if phase == "optimizer":
                self.trails.after(call)
        self._casts.after(call)
        self._floors.after(call)
        if sums or (data and results):
            self._sums.after(call)

    def _in_time(self, results: list[Tensor]) -> bool:
        """Return whether data code is still followed: batches are, whole data sets and simulations are not."""
        return self._ops_aside <= _MAX_FOLLOWED_ASIDE and all(x.numel() <= _MAX_DATA for x in results)

    # --- around an op ------------------------------------------------------------------------------------------------

    def _before(self, func: Any, args: Any, kwargs: Any) -> dict[int, Tensor] | None:
        """Before an op: copy, by ``id``, the tensors that it is about to write to; None if it is not to be examined."""
        self._samples_before = []
        if func.namespace != "aten" or is_out_variant(func):
            return None
        name = op_name(func)
        written = [] if name in OVERWRITING else written_by(func, args, kwargs)
        if sum(x.numel() for x in written) > self._limit or any(map(_is_elsewhere, written)):
            return None
        if name.endswith("_"):
            self._samples_before = self._audit.before(name, args, kwargs)
        return {id(x): x.detach().clone() for x in written}

    def _look(self, func: Any, args: Any, kwargs: Any, swapped: dict[int, Tensor], sequence: int, result: Any) -> None:
        """After an op of a module, the loss code or the backward pass: examine it."""
        name, phase, whole = op_name(func), self.phase(), list(tensors_in(result))
        if not func.is_view and not name.endswith("_"):
            self._audit.note_new(name, result)
        if phase == "backward" and (not func.is_view or name == "detach"):
            self._micro_steps.note_results(name, args, result)
        if name in UNINITIALISED or any(map(_is_elsewhere, whole)):
            return
        where = self.where(phase, sequence)
        if phase == "recompute":
            return  # the op was examined in the forward pass
        call = Call(func, args, kwargs, phase, where, self.micro_step, swapped, whole, self._limit)
        if phase in _FORWARD:
            self._effects.after(call)
            self.trails.after(call)
            self._casts.after(call)
            self._differences.after(call, self._audit.is_older)
            self._audit.chained(call)
            self._floors.after(call)
            self._saturation.forward(call)
        else:
            self._saturation.flushed(call)
            self._saturation.backward(call)
        if any(x is not None for x in self._samples_before):
            self._audit.updated(call, self._samples_before)
        self._sums.after(call)
        if not func.is_view and (call.results or call.operands):
            self.ops += 1
            if phase == "loss" and not where.root:
                return  # coverage is kept per module
            counts = call.counts(call.results[0]) if call.results else None
            self.coverage.note(call, _dtypes(call.operands), _dtypes(call.results), counts)
            if counts is not None:
                self._repeats.note(call, counts)


def _is_elsewhere(x: Tensor) -> bool:
    """Return whether a tensor has no dense memory of its own that could be read."""
    return x.layout is not torch.strided or x.is_meta or x.is_nested


def _dtypes(tensors: list[Tensor]) -> str:
    """Return dtype names such as ``float16,float32``: each once, in order of occurrence."""
    return ",".join(dict.fromkeys(dtype_name(x.dtype) for x in tensors))
