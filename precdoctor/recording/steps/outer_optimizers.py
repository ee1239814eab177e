"""Optimizers of DeepSpeed and Megatron, which drive one of torch's: their step is the attempt, and they scale the loss.

Read from their source: DeepSpeed 0.19 and Megatron-core 0.16. They step the optimizer inside once per parameter group,
or not at all when they find gradients that are not finite. Their methods ``step`` are replaced by ones that call them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch

from precdoctor.recording.model import static
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.deferred import Deferred, defer

_CLASSES: Final = {
    "deepspeed.runtime.zero.stage_1_and_2": ("DeepSpeedZeroOptimizer",),
    "deepspeed.runtime.zero.stage3": ("DeepSpeedZeroOptimizer_Stage3",),
    "deepspeed.runtime.fp16.fused_optimizer": ("FP16_Optimizer",),
    "deepspeed.runtime.fp16.unfused_optimizer": ("FP16_UnfusedOptimizer",),
    "deepspeed.runtime.bf16_optimizer": ("BF16_Optimizer",),
    "megatron.core.optimizer.optimizer": ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"),
}
#: Optimizers inside one another that are looked through.
_MAX_DEPTH: Final = 4
#: Frames from a hook of an optimizer up to who called its step.
_MAX_FRAMES: Final = 8

#: A step begins; the loss scale in force.
Begin = Callable[[Deferred], None]
#: A step has ended: an optimizer inside, whether it was skipped as gradients were not finite (null: nobody looked), and
#: the norm of the gradients over all ranks before clipping.
End = Callable[[torch.optim.Optimizer | None, bool | None, Deferred], None]


class OuterOptimizers:
    """Replaces ``step`` of the classes that have been imported when training begins, or before a sampled step."""

    def __init__(self, recorder: Recorder, begin: Begin, end: End) -> None:
        self._recorder = recorder
        self._begin, self._end = guarded(recorder)(self._begins), guarded(recorder)(self._ends)
        self._tell = begin, end
        self._waiting = set(_CLASSES)
        #: An outer step runs.
        self.runs = False
        recorder.when_forked.append(self._forget)

    def install(self) -> None:
        """Look for the libraries when training begins."""
        self._recorder.when_armed.append(guarded(self._recorder)(self.look))

    def _forget(self) -> None:
        self.runs = False

    def look(self) -> None:
        """Look for those that were not imported before."""
        for name in [n for n in self._waiting if n in sys.modules]:
            module = vars(sys.modules[name])
            kinds = [module.get(kind) for kind in _CLASSES[name]]
            if None in kinds:
                continue  # it is being imported
            self._waiting.discard(name)
            for kind in kinds:
                if isinstance(kind, type) and callable(original := static.members(kind).get("step")):
                    kind.step = self._stepping(original)  # type: ignore[attr-defined]

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def step(outer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.runs or recorder.state != "armed" or recorder.capture.runs or torch.compiler.is_compiling():
                return original(outer, *args, **kwargs)
            self.runs = True
            returned, result = False, None
            try:
                self._begin(outer)
                result = original(outer, *args, **kwargs)
                returned = True
                return result
            finally:
                self.runs = False
                self._end(outer, result, returned=returned)

        return step

    def _begins(self, outer: Any) -> None:
        self._recorder.claim.make()
        self._tell[0](_loss_scale(outer))

    def _ends(self, outer: Any, result: Any, *, returned: bool) -> None:
        overflow = static.attribute(outer, "overflow") if returned else None  # else it may be of the step before
        norm = static.attribute(outer, "_global_grad_norm")
        if type(result) is tuple and len(result) == 3:  # Megatron: whether it stepped, the norm, the number of zeros
            overflow, norm = result[0] is False, result[1]
        inner = next(_inner(outer), None)
        self._tell[1](inner, overflow if type(overflow) is bool else None, defer(norm, by_drain=True))


def makes_states() -> bool:
    """Whether DeepSpeed steps an optimizer with gradients of zero, so that it makes its states: that is no attempt."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "initialize_optimizer_states":
            return True
        frame = frame.f_back
    return False


def _chain(outer: Any) -> Iterator[Any]:
    """The optimizer, and the first of those that it chains."""
    yield outer
    yield from static.elements(static.attribute(outer, "chained_optimizers"))[:1]


def _inner(outer: Any) -> Iterator[torch.optim.Optimizer]:
    """Optimizers of torch's inside."""
    waiting = [outer]
    for _ in range(_MAX_DEPTH):
        chained = [static.elements(static.attribute(each, "chained_optimizers")) for each in waiting]
        waiting = [static.attribute(each, "optimizer") for each in waiting] + [
            each for some in chained for each in some
        ]
        yield from (each for each in waiting if issubclass(type(each), torch.optim.Optimizer))


def _loss_scale(outer: Any) -> Deferred:
    """The loss scale in force; null where it trains without one."""
    if static.attribute(outer, "custom_loss_scaler") is True:
        return static.number(static.attribute(outer, "external_loss_scale"))
    for each in _chain(outer):
        for holder in ("loss_scale_config", "loss_scaler", "grad_scaler"):
            owner = static.attribute(each, holder)
            for name in ("cur_scale", "_scale"):
                value = static.attribute(owner, name)
                if issubclass(type(value), torch.Tensor) and value.numel() == 1:
                    return defer(value, by_drain=True)
                if (known := static.number(value)) is not None:
                    return known if known != 1 else None  # DeepSpeed's of BF16
    return None
