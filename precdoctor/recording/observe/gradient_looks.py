"""The one look at the gradients of a step where not every one has a row: who takes it, and how long it holds.

The guard waits until the device has looked at the gradients. Were that the end of the backward pass, the device would
have nothing to do until the host had prepared the optimizer's launches. So between samples, when the gradients of most
parameters are there, they are looked at from within the backward pass, which is still under way on the GPU; the guard
waits for that look, and the device still has the rest of the pass to do. The last gradients, those of the first layers,
are judged at the next step. Where the host is done with the rest of the pass at once, as in a compiled model, whose
gradients all arrive at its end, two looks would only cost more than one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from precdoctor.recording.kernels.list_layout import Layout
from precdoctor.recording.model import static
from precdoctor.recording.model.optimizer_contents import parameters_in_place, parameters_of
from precdoctor.recording.process import attach
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.deferred import Deferred
from precdoctor.recording.steps import clipping
from precdoctor.recording.steps.loss_scalers import Scalers
from precdoctor.recording.steps.sentinel import Look, gradient_sentinel, merged, versions

#: Of the parameters, in the order in which their gradients arrive, so many are looked at early.
_EARLY: Final = 0.85
#: With fewer parameters there is no backward pass to speak of.
_FEWEST: Final = 32
#: Nanoseconds that the host takes to prepare an optimizer's launches, at least: with less of the pass behind the look
#: it is of no use; and in how many steps in a row that is to be seen.
_WORTH_NS, _HURRIED = 1_000_000, 3


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
        #: When the look of this step was taken, and in how many steps in a row it came too late.
        self._looked_at, self._hurried = 0, 0
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
        if self.found is not None:
            self._hurried = self._hurried + 1 if time.perf_counter_ns() - self._looked_at < _WORTH_NS else 0
            if self._hurried >= _HURRIED:
                self.forget()
                self._in_vain = True
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
        self._looked_at = time.perf_counter_ns()

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


class GradientLooks:
    """Reads the gradients as the optimizer, or clipping before it, is given them.

    Args:
        recorder: of the process.
        scalers: tell whether gradients still carry a loss scale.
        in_closure: whether a step with a closure runs.
        early: has looked at most of them already, where that is of use.
    """

    def __init__(self, recorder: Recorder, scalers: Scalers, in_closure: Callable[[], bool], early: EarlyLook) -> None:
        self._recorder, self._scalers, self._in_closure = recorder, scalers, in_closure
        self._early = early
        #: The gradients were read in this step, so that nobody has to read them again.
        self._look: Look | None = None
        self._layouts: static.ByIdentity[torch.optim.Optimizer, Layout] = static.ByIdentity()
        self._clipped = Layout()
        #: On sampled steps an optimizer's gradients have no rows as they arrive: masters do not.
        self._has_no_rows = False

    def install(self) -> None:
        """Look before gradients are clipped."""
        clipping.install(self._recorder, self._note_clip, self._covered, self._stays)

    def take(self) -> Look | None:
        """The look of this step, for the one who judges it."""
        look, self._look = self._look, None
        return look

    def forget(self) -> None:
        """The step is over."""
        self._look = None

    def before_step(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """The optimizer is about to use them; they are judged at once, before anybody can write to them."""
        facts = self._recorder.current
        if self._recorder.live:
            self._has_no_rows = facts.gradients_of is None
        if facts.grad_norm is not None or (facts.gradients_of is not None and self._look is not None):
            return
        layout = self._layouts.get(optimizer) or self._layouts.put(optimizer, Layout())
        if facts.gradients_of is None:
            self._look = self._read(parameters_in_place(groups), layout)
        elif self._recorder.options.on_nonfinite != "observe":  # the rows have the norm, but come too late to judge
            whole = gradient_sentinel(parameters_in_place(groups), layout)
            self._look = None if whole is None else Look(whole[1])

    def before_further(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """One more optimizer steps in the same backward pass. The first look was waited for, those on a GPU are not."""
        facts, parameters = self._recorder.current, parameters_in_place(groups)
        layout = self._layouts.get(optimizer) or self._layouts.put(optimizer, Layout())
        if (found := gradient_sentinel(parameters, layout)) is None:
            return
        amax, late = found[1], None
        if facts.grad_norm is not None:
            found = merged((facts.grad_norm, facts.grad_amax), found)
        facts.grad_norm, facts.grad_amax = found
        if type(amax) is not float and self._recorder.options.on_nonfinite == "examine":
            amax, late = 0.0, found[1]
        self._look = Look(amax, late=late)

    def after_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """They came into being inside the step."""
        layout = self._layouts.get(optimizer) or self._layouts.put(optimizer, Layout())
        self._look_at(parameters_of(optimizer), layout)

    def _look_at(self, parameters: list[Tensor], layout: Layout) -> None:
        facts = self._recorder.current
        known = facts.gradients_of is not None or facts.grad_norm is not None
        if known or self._recorder.capture.runs:
            return
        if (found := self._read(parameters, layout)) is not None:
            self._look = Look.at(found.amax, parameters, found.late)

    def _read(self, parameters: Sequence[Tensor], layout: Layout) -> Look | None:
        """A look at all of them as they are now; null where there are no gradients."""
        facts, late = self._recorder.current, None
        early = None if self._early.found is None else self._early.take(parameters)
        if early is not None:
            found, left = early
            amax, rest = found[1], gradient_sentinel(left, self._early.rest)
            if rest is not None:
                late, found = rest[1], merged(found, rest)
        elif (whole := gradient_sentinel(parameters, layout)) is not None:
            found, amax = whole, whole[1]
        else:
            return None
        facts.grad_norm, facts.grad_amax = found
        if self._scalers.in_use:
            facts.grad_norm_scaled = self._scalers.still_scaled(parameters) is True
        return Look(amax, late=late)

    # --- clipping ----------------------------------------------------------------------------------------------------

    def _note_clip(self, limit: Any, parameters: list[Tensor]) -> None:
        """Gradients are about to be clipped to this norm or value."""
        recorder = self._recorder
        if recorder.state != "armed":
            return
        if self._in_closure() or not recorder.live or self._has_no_rows or not self._have_rows(parameters):
            self._look_at(parameters, self._clipped)
        if (number := clipping.number(limit)) is not None:
            recorder.current.clip_norm = number
            recorder.current.clipped_before_unscale = self._scalers.still_scaled(parameters)

    def _have_rows(self, parameters: list[Tensor]) -> bool:
        """Whether a sampled step has rows of all these gradients as the backward pass brings them."""
        options, names = self._recorder.options, self._recorder.names
        if options.include or options.exclude:
            return False
        return all(names.parameter(p) is not None for p in parameters)

    def _covered(self, parameters: list[Tensor]) -> bool:
        return self._look is not None and self._look.covers(parameters)

    def _stays(self, parameters: list[Tensor]) -> None:
        """What is finite stays so where gradients are clipped."""
        assert self._look is not None, "only called after covered"
        self._look = Look.at(self._look.amax, parameters, self._look.late)
