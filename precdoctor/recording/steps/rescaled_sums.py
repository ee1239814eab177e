"""Notices a script that multiplies a step's gradients by the same factor after each of its backward passes.

Loss scaling by hand divides the gradients by the scale. After each micro-batch, it divides the whole sum so far once
again, and only the last micro-batch counts. On sampled steps with several backward passes, the norm of a few small
gradients is measured after each pass, and again as the next pass or the optimizer's step begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.model.tensor_leaves import plain_gradient
from precdoctor.recording.slots.deferred import deferred, is_capturing, would_wait

#: Number of gradients that are measured, smallest first, and the most elements of one.
_MEASURED: Final = 4
_MOST_ELEMENTS: Final = 1 << 18
#: Number of passes that are measured, from the first of a step on: bounds the cost.
_MOST_PASSES: Final = 32
#: Relative distance up to which two factors are the same one, and one is 1: clipping varies more from pass to pass.
_SAME: Final = 0.005


class RescaledSums:
    """The factors between the backward passes of one optimizer's steps.

    Attributes:
        expected: whether the last sampled step had several backward passes; then the next one is measured.
    """

    def __init__(self) -> None:
        self.expected = False
        self._parameters: list[weakref.ref[Tensor]] = []
        #: Norms after each pass and before what follows it, in pairs; None if a gradient was dropped in between.
        self._norms: list[Tensor] | None = []
        #: The measurement of the last step, not read yet: norms, number of passes, whether clipping ran.
        self._unread: tuple[Callable[[], list[float]], int, bool] | None = None
        self._steps = self._rescaled = 0
        self._factor, self._passes = 1.0, 0

    def measure(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Measure the gradients: after a pass of these ``parameters``, or before the next one or the step."""
        norms = self._norms
        if norms is None or is_capturing() or (len(norms) % 2 == 0) != (parameters is not None):
            return
        if len(norms) == 2 * _MOST_PASSES:
            return
        if parameters is not None and not self._parameters:
            self._choose(parameters)
        grads = [g for ref in self._parameters if (p := ref()) is not None and (g := plain_gradient(p)) is not None]
        if not grads or len(grads) < len(self._parameters):
            self._norms = None
            return
        with kernels.apart_from_user_modes():
            wide = (torch.promote_types(g.dtype, torch.float32) for g in grads)
            each = [torch.linalg.vector_norm(g, dtype=dtype).float() for g, dtype in zip(grads, wide, strict=True)]
            norms.append(torch.linalg.vector_norm(torch.stack(each)))

    def _choose(self, parameters: Iterable[Tensor]) -> None:
        """Choose the smallest gradients on one device."""
        found = [(p, g) for p in parameters if (g := plain_gradient(p)) is not None and g.numel() <= _MOST_ELEMENTS]
        found.sort(key=lambda pair: pair[1].numel())
        self._parameters = [weakref.ref(p) for p, g in found if g.device == found[0][1].device][:_MEASURED]

    def step_ended(self, passes: int, clip_norm: object) -> bool:
        """Note what was measured in a sampled step; return True if its reading makes the first step with a factor.

        Args:
            passes: number of backward passes of the step.
            clip_norm: the norm that gradients were clipped to in it; None if they were not.
        """
        norms, self._norms = self._norms, []
        measured, self.expected = self.expected, passes > 1
        self._parameters = []
        before = self._rescaled
        self._judge()
        if self._rescaled > before == 0:
            return True  # without a new measurement: the report would wait for it
        if not measured or not norms or self._unread is not None:
            return False
        if passes > 1 and len(norms) == 2 * min(passes, _MOST_PASSES):
            with kernels.apart_from_user_modes():
                self._unread = deferred(torch.stack(norms)), passes, clip_norm is not None
            if norms[0].is_cpu:
                self._judge()
        return self._rescaled > before == 0

    def _judge(self, *, wait: bool = False) -> None:
        """Count the last measured step, unless its norms are still on their way; ``wait``: wait for them."""
        if self._unread is None or (would_wait(self._unread[0]) and not wait):
            return
        (numbers, passes, clipped), self._unread = self._unread, None
        norms = numbers()
        if not all(0.0 < n < float("inf") for n in norms):
            return
        self._steps += 1
        factors = [after / before for before, after in zip(norms[::2], norms[1::2], strict=True)]
        if clipped and len(factors) > 2:
            factors.pop()  # the sum was clipped after the last pass
        first = factors[0]
        if abs(first - 1.0) > _SAME and all(abs(f / first - 1.0) <= _SAME for f in factors):
            self._rescaled += 1
            self._factor, self._passes = first, passes

    def found(self) -> dict[str, float] | None:
        """Return the numbers of a warning event; None if no step was rescaled. Waits for the last measurement."""
        self._judge(wait=True)
        numbers = {"factor": self._factor, "passes": self._passes, "steps": self._rescaled, "of": self._steps}
        return numbers if self._rescaled else None
