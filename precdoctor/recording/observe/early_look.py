"""Most of the gradients are looked at while the backward pass is still under way on the GPU.

The guard waits until the device has looked at the gradients. Were that the end of the backward pass, the device would
have nothing to do until the host had prepared the optimizer's launches. So between samples, when the gradients of most
parameters are there, they are looked at from within the backward pass; the guard waits for that look, and the device
still has the rest of the pass to do. The last gradients, those of the first layers, are judged at the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from precdoctor.recording.kernels.list_layout import Layout
from precdoctor.recording.process import attach
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.deferred import Deferred
from precdoctor.recording.steps.sentinel import gradient_sentinel, versions

#: Of the parameters, in the order in which their gradients arrive, so many are looked at early.
_EARLY: Final = 0.85
#: With fewer parameters there is no backward pass to speak of.
_FEWEST: Final = 32


class EarlyLook:
    """Learns on sampled steps in which order gradients arrive, and looks early on the others. On GPUs alone, without
    other ranks (their reductions come later) and where the guard lets the step go on whatever it finds.

    Args:
        recorder: of the process.

    Attributes:
        arriving: parameters in the order of their gradients, so far.
        hook: on the last of those that are looked at early; null where none are.
        found: in this step, of which parameters, and their gradients as they were then.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.arriving: list[weakref.ref[Tensor]] = []
        #: The parameters to look at early.
        self._early: list[weakref.ref[Tensor]] = []
        self.hook: RemovableHandle | None = None
        self._micro_steps = 1
        self._in_vain = False
        self._layout, self.rest = Layout(), Layout()
        self._look = guarded(recorder)(self._looked)
        self.found: tuple[tuple[Deferred, Deferred], frozenset[int], tuple[tuple[int, int], ...]] | None = None
        recorder.when_forked.append(self.forget)
        recorder.when_turned_off.append(self.forget)

    def forget(self) -> None:
        """Take the hook off; the next sampled step shows the order anew."""
        hook, self.hook = self.hook, None
        self.found, self._early, self.arriving = None, [], []
        if hook is not None:
            hook.remove()

    def backward_ended(self) -> None:
        """A backward pass has ended; of a sampled step, the order in which gradients have arrived is known now."""
        recorder, order = self._recorder, self.arriving
        self.arriving, self._micro_steps = [], recorder.micro_step
        count = int(_EARLY * len(order))
        if not order or self._in_vain or (self.hook is not None and _same(self._early, order[:count])):
            return
        self.forget()
        last = order[count - 1]() if len(order) >= _FEWEST else None
        if last is None or recorder.options.on_nonfinite != "examine" or attach.has_other_ranks():
            return
        self._early = order[:count]
        self.hook = last.register_post_accumulate_grad_hook(lambda _: self._look())

    def _looked(self) -> None:
        recorder, self.found = self._recorder, None
        if recorder.live or recorder.state != "armed" or not recorder.in_backward or recorder.capture.runs:
            return
        if recorder.micro_step + 1 < self._micro_steps:
            return  # gradients are still accumulated
        parameters = [p for ref in self._early if (p := ref()) is not None]
        found = gradient_sentinel(parameters, self._layout)
        self.found = None if found is None else (found, frozenset(map(id, parameters)), versions(parameters))

    def take(self, parameters: Sequence[Tensor]) -> tuple[tuple[Deferred, Deferred], list[Tensor]] | None:
        """What was found early in this step, and the parameters that are left to look at.

        Args:
            parameters: whose gradients are to be judged, as they are now.

        Returns:
            L2 norm and amax of those looked at early; null where that is not of use: nothing was, or gradients have
            been written to since.
        """
        seen, self.found = self.found, None
        if seen is None:
            return None
        found, early, were = seen
        mine = [p for p in parameters if id(p) in early]
        if len(mine) != len(early) or versions([p for ref in self._early if (p := ref()) is not None]) != were:
            self.forget()  # so it would be in every step: a loss scaler writes to them, or there are two optimizers
            self._in_vain = True
            return None
        return found, [p for p in parameters if id(p) not in early]


def _same(some: Sequence[weakref.ref[Tensor]], others: Sequence[weakref.ref[Tensor]]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
