"""Optimizers of DeepSpeed and Megatron, which drive one of torch's: their step is the attempt, and they scale the loss.

Written against the source of DeepSpeed 0.19 and Megatron-core 0.16. They step the inner optimizer once per parameter
group, or not at all after non-finite gradients. Their ``step`` methods are replaced by ones that call the original.
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
#: Most levels of nested optimizers that are searched.
_MAX_DEPTH: Final = 4
#: Most frames between a hook of an optimizer and the caller of its step.
_MAX_FRAMES: Final = 8

#: Called as a step begins, with the current loss scale.
Begin = Callable[[Deferred], None]
#: Called as a step has ended, with an inner optimizer, whether the step was skipped because of non-finite gradients
#: (None: not checked), and the gradient norm over all ranks before clipping.
End = Callable[[torch.optim.Optimizer | None, bool | None, Deferred], None]


class OuterOptimizers:
    """Replaces ``step`` of :data:`_CLASSES`, if imported when recording begins or before a later sampled step.

    Attributes:
        runs: whether a step of one of these classes is running.
    """

    def __init__(self, recorder: Recorder, begin: Begin, end: End) -> None:
        self._recorder = recorder
        self._begin, self._end = guarded(recorder)(self._begins), guarded(recorder)(self._ends)
        self._callbacks = begin, end
        self._unpatched_modules = set(_CLASSES)
        self.runs = False
        recorder.when_forked.append(self._forget)

    def install(self) -> None:
        self._recorder.when_armed.append(guarded(self._recorder)(self.look))

    def _forget(self) -> None:
        self.runs = False

    def look(self) -> None:
        """Replace ``step`` of the classes that were imported since the last call."""
        for name in [n for n in self._unpatched_modules if n in sys.modules]:
            module = vars(sys.modules[name])
            kinds = [module.get(kind) for kind in _CLASSES[name]]
            if None in kinds:
                continue  # the module is being imported
            self._unpatched_modules.discard(name)
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
        """Make the process a rank and report the loss scale as a step begins."""
        self._recorder.claim.make()
        self._callbacks[0](_loss_scale(outer))

    def _ends(self, outer: Any, result: Any, *, returned: bool) -> None:
        """Report the result of a step that has returned or raised."""
        overflow = static.attribute(outer, "overflow") if returned else None  # else it may be an earlier step's
        norm = static.attribute(outer, "_global_grad_norm")
        if type(result) is tuple and len(result) == 3:  # Megatron: whether it stepped, the norm, number of zeros
            overflow, norm = result[0] is False, result[1]
        inner = next(_inner(outer), None)
        self._callbacks[1](inner, overflow if type(overflow) is bool else None, defer(norm, by_drain=True))


def makes_states() -> bool:
    """Return whether DeepSpeed steps an optimizer with zero gradients, to create its state: that is no attempt."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "initialize_optimizer_states":
            return True
        frame = frame.f_back
    return False


def _inner(outer: Any) -> Iterator[torch.optim.Optimizer]:
    """Iterate over the optimizers of torch's inside."""
    waiting = [outer]
    for _ in range(_MAX_DEPTH):
        chained = [each for one in waiting for each in static.elements(static.attribute(one, "chained_optimizers"))]
        waiting = [static.attribute(each, "optimizer") for each in waiting] + chained
        yield from (each for each in waiting if issubclass(type(each), torch.optim.Optimizer))


def _loss_scale(outer: Any) -> Deferred:
    """Return the current loss scale; None if there is none."""
    if static.attribute(outer, "custom_loss_scaler") is True:
        return static.number(static.attribute(outer, "external_loss_scale"))
    for each in (outer, *static.elements(static.attribute(outer, "chained_optimizers"))[:1]):
        for holder in ("loss_scale_config", "loss_scaler", "grad_scaler"):
            owner = static.attribute(each, holder)
            for name in ("cur_scale", "_scale"):
                value = static.attribute(owner, name)
                if issubclass(type(value), torch.Tensor) and value.numel() == 1:
                    return defer(value, by_drain=True)
                if (known := static.number(value)) is not None:
                    return known if known != 1 else None  # DeepSpeed has 1 for BF16
    return None
