"""Reads what a trained model returns where no gradient is wanted: in a validation pass, say.

No optimizer step follows, so nothing else would notice a NaN there. The first call with a non-finite result is replayed
from its arguments, which the caller still holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.kernels.outside_user_modes import modes_open
from precdoctor.recording.microscope.incidents import Incidents
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.tensor_facts import NEG_INF, POS_INF, badness
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.slots.deferred import is_capturing
from precdoctor.recording.steps.sentinel import amax, largest

#: Maximum number of calls that are examined per process: what goes wrong in one of them goes wrong in the others.
_MAX_EXAMINED: Final = 2
#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Evaluations:
    """Judges calls of trained models without gradients, as they return."""

    def __init__(self, context: StepContext, scene: Scene, incidents: Incidents) -> None:
        self._context, self._scene, self._incidents = context, scene, incidents
        self._forget()
        context.when_forked.append(self._forget)
        #: To be called as a top-level call returns: module, root, result and a function that returns its arguments.
        self.call_ended = guarded(context)(self._call_ended)

    def _forget(self) -> None:
        self._examined, self._step, self._calls = 0, -1, 0

    def _call_ended(self, module: nn.Module, root: str, result: Any, arguments: Callable[[], Arguments]) -> None:
        context = self._context
        if self._examined == _MAX_EXAMINED or self._incidents.examined > self._examined:
            return  # after an incident of the training all that follows is bad
        if context.options.on_nonfinite == "observe" or context.traced:
            return
        if context.step != self._step:
            self._step, self._calls = context.step, 0
        self._calls += 1
        if _is_usual(result) and math.isfinite(result.sum().item()):
            return
        returned = tensor_leaves.all_plain([x for _, x in tensor_leaves.floating(result)])
        if not returned or not self._may_read(returned[0]):
            return
        with kernels.apart_from_user_modes():
            try:
                if math.isfinite(largest(amax(returned))):
                    return
                kinds = [kind if (kind := badness(x)) != NEG_INF else 0 for x in returned]
                # +Inf alone may be meant: a cost beyond a barrier.
                samples = sum(_bad_samples(x) for x, kind in zip(returned, kinds, strict=True) if kind & ~POS_INF)
            except RuntimeError as error:  # the device has failed: nothing can be read from it any more
                attach.let_through(error)
                return
        if any(kinds):
            self._examine(module, root, result, arguments(), samples)

    def _may_read(self, x: Tensor) -> bool:
        """Return whether to read the result of this call. Of a GPU's, the calls 1, 2, 4, 8 ... since the last step."""
        return x.is_cpu or (self._calls & (self._calls - 1) == 0 and not is_capturing())

    def _examine(self, module: nn.Module, root: str, result: Any, arguments: Arguments, samples: int) -> None:
        scene, policy = self._scene, self._context.options.on_nonfinite
        scene.begin_step_if_new()
        before, refused = scene.calls, scene.refused
        scene.calls = list(before)
        try:
            if (call := scene.enter(module, root, *arguments)) is not None:
                scene.leave(call, result)
                data = {"policy": policy, "given_up": True, "evaluation": True, "bad_samples": samples}
                data |= {"loss_is_bad": False, "gradients_are_bad": False, "skips_in_a_row": 0}
                what = "the result of a call without gradients"
                self._incidents.examine("outputs", what, data, "", calls=[call], alone=True, is_certain=False)
                self._examined += 1
        finally:
            scene.calls, scene.refused = before, refused  # a step in progress is replayed without this call


def _is_usual(result: Any) -> bool:
    """Return whether a result is one tensor on the CPU that no mode or transform watches: its sum is cheap to read."""
    if type(result) is not Tensor or not result.is_cpu or not result.is_floating_point() or result.element_size() < 2:
        return False
    plain = result.layout is torch.strided and not result.is_nested
    return plain and not modes_open() and torch._C._functorch.maybe_current_level() is None


def _bad_samples(x: Tensor) -> int:
    """Return how many samples (entries along the first dimension) have no finite element; 1 for such a scalar."""
    finite = torch.isfinite(x.float() if x.element_size() == 1 else x)
    if x.dim() > 1:
        finite = finite.flatten(1).any(1)
    return int((~finite).sum())
