"""Reads norm and amax of a step's gradients for the guard: before the optimizer steps, and early between samples.

The guard waits until the device has read the gradients. If that read came after the backward pass, the device would
then be idle until the host had prepared the optimizer's launches. So between samples a hook launches the read inside
the backward pass, as soon as most parameters have their gradients: the guard waits for this early look while the device
still has the rest of the pass to do. The last gradients, those of the first layers, are judged at the next step. Early
looks are given up if the host finishes the rest of the pass at once: a compiled model's gradients arrive at its end.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from precdoctor.recording.kernels.list_layout import Layout
from precdoctor.recording.model import static
from precdoctor.recording.model.optimizer_contents import parameters_in_place, parameters_of
from precdoctor.recording.process import attach
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.deferred import Deferred, defer, read
from precdoctor.recording.steps.loss_scalers import Scalers
from precdoctor.recording.steps.sentinel import Look, gradient_sentinel, merged, versions

#: Share of the parameters, in the order in which their gradients arrive, that the early look covers.
_EARLY: Final = 0.85
#: With fewer parameters than this, the backward pass is too short for an early look.
_FEWEST: Final = 32
#: Time in nanoseconds that the host needs at least to prepare an optimizer's launches. If the rest of the backward pass
#: is shorter, the early look gains nothing; after so many such steps in a row it is given up.
_WORTH_NS, _HURRIED = 1_000_000, 3
#: The clips of an attempt that are kept apart. With more, as of scripts that clip each parameter by itself, the norm
#: between samples is unknown.
_MOST_CLIPS: Final = 8
#: Iterators, which can be read once only: a clipping function gets a list instead.
_ITERATORS: Final = (types.GeneratorType, map, filter, itertools.chain)


class EarlyLook:
    """Records on sampled steps the order in which gradients arrive, and reads most of them early on the others.

    Only on GPUs, without other ranks (their reductions come later), and only if the guard never holds a step back.

    Attributes:
        arriving: parameters whose gradients have arrived in this backward pass, in order.
        hook: on the last parameter that the early look covers; None if there is no early look.
        found: result of this step's early look (L2 norm, amax), ids of its parameters, versions of their gradients.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.arriving: list[weakref.ref[Tensor]] = []
        #: The parameters that the early look covers.
        self._early: list[weakref.ref[Tensor]] = []
        self.hook: RemovableHandle | None = None
        self._micro_steps = 1
        self._given_up = False
        #: Time of this step's early look, and the number of steps in a row whose look came too late.
        self._look_time, self._late_looks = 0, 0
        self._layout, self.rest = Layout(), Layout()
        self._guarded_read = guarded(recorder)(self._read_early)
        self.found: tuple[tuple[Deferred, Deferred], frozenset[int], tuple[tuple[int, int], ...]] | None = None
        recorder.when_forked.append(self.forget)
        recorder.when_turned_off.append(self.forget)

    def forget(self) -> None:
        """Remove the hook; the next sampled step records the order again."""
        hook, self.hook = self.hook, None
        self.found, self._early, self.arriving = None, [], []
        if hook is not None:
            hook.remove()

    def backward_ended(self) -> None:
        """At the end of a backward pass, give up early looks that gain nothing.

        After a sampled pass, choose the parameters that the next early looks cover, and hook the last of them.
        """
        recorder, order = self._recorder, self.arriving
        self.arriving, self._micro_steps = [], recorder.micro_step
        if self.found is not None:
            self._late_looks = self._late_looks + 1 if time.perf_counter_ns() - self._look_time < _WORTH_NS else 0
            if self._late_looks >= _HURRIED:
                self.forget()
                self._given_up = True
        count = int(_EARLY * len(order))
        if not order or self._given_up or (self.hook is not None and _same(self._early, order[:count])):
            return
        self.forget()
        last = order[count - 1]() if len(order) >= _FEWEST else None
        if last is None or recorder.options.on_nonfinite != "examine" or attach.has_other_ranks():
            return
        self._early = order[:count]
        self.hook = last.register_post_accumulate_grad_hook(lambda _: self._guarded_read())

    def _read_early(self) -> None:
        """Read the gradients early, in the last backward pass of the step."""
        recorder, self.found = self._recorder, None
        if recorder.live or recorder.state != "armed" or not recorder.in_backward or recorder.capture.runs:
            return
        if recorder.micro_step + 1 < self._micro_steps:
            return  # gradients are still accumulated
        parameters = [p for ref in self._early if (p := ref()) is not None]
        found = gradient_sentinel(parameters, self._layout)
        self.found = None if found is None else (found, frozenset(map(id, parameters)), versions(parameters))
        self._look_time = time.perf_counter_ns()

    def take(self, parameters: Sequence[Tensor]) -> tuple[tuple[Deferred, Deferred], list[Tensor]] | None:
        """Return L2 norm and amax from this step's early look, and those of ``parameters`` that it does not cover.

        None if there was no look, or if it is of no use: it covers other parameters also, or gradients have changed.
        """
        seen, self.found = self.found, None
        if seen is None:
            return None
        found, early, versions_then = seen
        mine = [p for p in parameters if id(p) in early]
        if len(mine) != len(early) or versions([p for ref in self._early if (p := ref()) is not None]) != versions_then:
            self.forget()  # will recur: a loss scaler writes to them, or there are two optimizers
            self._given_up = True
            return None
        return found, [p for p in parameters if id(p) not in early]


def _same(some: Sequence[weakref.ref[Tensor]], others: Sequence[weakref.ref[Tensor]]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Clip(NamedTuple):
    """A clip by norm or value, after it.

    Attributes:
        step: the attempt that was to come next.
        limit: largest norm, or largest magnitude.
        before_unscale: whether the gradients carried the loss scale; None if unknown.
        norm: of all of them together, before; None for a clip by value, or if torch did not return a plain tensor.
        gradients: address and version of each, after.
    """

    step: int
    limit: float
    before_unscale: bool | None
    norm: Tensor | None
    gradients: tuple[tuple[int, int], ...]

    def undone(self, norm: Deferred) -> Deferred:
        """Return the norm of some of the gradients before the clip, from that after it; None if unknown.

        ``clip_grad_norm_`` multiplies by ``min(1, limit / (norm + 1e-6))``.
        """
        total, limit = None if self.norm is None else defer(self.norm, by_drain=True), self.limit
        if total is None or not limit:
            return None
        return lambda: (read(norm) or 0.0) * max(1.0, ((read(total) or 0.0) + 1e-6) / limit)


def _norm_before(parts: list[tuple[_Clip | None, list[Tensor]]], norm: Deferred) -> Deferred:
    """Return the norm of gradients from before the clips of their ``parts``, from that after; None if it is unknown."""
    norms = [norm]
    if len(parts) > 1:
        looks = [gradient_sentinel(parameters, by_drain=True) for _, parameters in parts]
        norms = [None if look is None else look[0] for look in looks]
    before = [part if clip is None else clip.undone(part) for (clip, _), part in zip(parts, norms, strict=True)]
    return None if None in before else lambda: math.hypot(*(read(part) or 0.0 for part in before))


class GradientLooks:
    """Reads the gradients as the optimizer, or clipping before it, gets them.

    ``in_closure`` returns whether a step with a closure is running.
    """

    def __init__(self, recorder: Recorder, scalers: Scalers, in_closure: Callable[[], bool], early: EarlyLook) -> None:
        self._recorder, self._scalers, self._in_closure = recorder, scalers, in_closure
        self._early = early
        #: The reading of this step's gradients, so that no one has to read them again; None once the guard has it.
        self.look: Look | None = None
        self._layouts: static.ByIdentity[torch.optim.Optimizer, Layout] = static.ByIdentity()
        self._clipped = Layout()
        #: The clips of this attempt; further optimizers that step without another backward pass find theirs here.
        self._clips: list[_Clip] = []
        #: Whether the optimizer's gradients get no rows on sampled steps, like those of master copies.
        self._has_no_rows = False

    def before_step(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """Read the gradients that the optimizer is about to use, unless this step's are known already."""
        facts = self._recorder.current
        if self._recorder.live:
            self._has_no_rows = facts.gradients_of is None
        clipped = self._clipped_apart(groups) if self._clips else None
        if clipped is not None and facts.gradients_of is None:
            facts.grad_norm = facts.grad_amax = self.look = None
        if facts.grad_norm is not None or (facts.gradients_of is not None and self.look is not None):
            return
        layout = self._layouts.get(optimizer) or self._layouts.put(optimizer, Layout())
        if facts.gradients_of is None:
            self.look = self._read(parameters_in_place(groups), layout)
            if clipped is not None:
                facts.grad_norm = _norm_before(clipped, facts.grad_norm)
        elif self._recorder.options.on_nonfinite != "observe":  # rows also give the norm, but too late to judge
            whole = gradient_sentinel(parameters_in_place(groups), layout)
            self.look = None if whole is None else Look(whole[1])

    def _clipped_apart(self, groups: list[dict[str, Any]]) -> list[tuple[_Clip | None, list[Tensor]]] | None:
        """Return the parameters of an optimizer that is about to step, each part with its clip, or None for no clip.

        Set the facts of the attempt to the last of these clips. None if the facts are right as they are: no clip, or
        one of all gradients, and no other optimizer, whose gradients it could have had as well.
        """
        recorder, facts = self._recorder, self._recorder.current
        if recorder.micro_step:  # else no backward pass has run since the last attempt
            self._clips = [clip for clip in self._clips if clip.step == recorder.step]
        parameters = parameters_in_place(groups)
        known = facts.clip_norm is not None and (facts.grad_norm is not None or facts.gradients_of is not None)
        alone = len(self._clips) == 1 and len(self._layouts) < 2
        if not self._clips or (known and alone and len(self._clips[0].gradients) >= len(parameters)):
            return None
        parts: dict[int, list[Tensor]] = {}
        last = {gradient: i for i, clip in enumerate(self._clips) for gradient in clip.gradients}
        for parameter in parameters:
            if gradient := versions([parameter]):
                parts.setdefault(last.get(gradient[0], -1), []).append(parameter)
        if max(parts, default=-1) < 0:  # clips of others, or these gradients were written to since
            return None
        facts.clip_norm, facts.clipped_before_unscale = self._clips[max(parts)][1:3]
        return [(self._clips[i] if i >= 0 else None, part) for i, part in parts.items()]

    def before_further(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """Read the gradients of one more optimizer in the same backward pass, without waiting for a GPU."""
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
        self.look = Look(amax, late=late)

    def after_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the gradients of a step whose closure made them."""
        layout = self._layouts.get(optimizer) or self._layouts.put(optimizer, Layout())
        self._look_at(parameters_of(optimizer), layout)

    def _look_at(self, parameters: list[Tensor], layout: Layout) -> None:
        """Read the gradients unless this step's are known already, and note which tensors the reading covers."""
        facts = self._recorder.current
        known = facts.gradients_of is not None or facts.grad_norm is not None
        if known or self._recorder.capture.runs:
            return
        if (found := self._read(parameters, layout)) is not None:
            self.look = Look.at(found.amax, parameters, found.late)

    def _read(self, parameters: Sequence[Tensor], layout: Layout) -> Look | None:
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

    def install(self) -> None:
        """Patch torch's functions that clip gradients: these are read before they are clipped."""
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = self._clipping(getattr(nn.utils, name))
            for module in (nn.utils, nn.utils.clip_grad):
                setattr(module, name, clip)

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guard = guarded(self._recorder)
        begins, covered, ended = guard(self._clip_begins), guard(self._is_covered), guard(self._clip_ended)

        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(parameters, *args, **kwargs)
            limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
            number = None
            if limit is not None:
                parameters = list(parameters) if issubclass(type(parameters), _ITERATORS) else parameters
                number = begins(limit, static.tensors(parameters))
            known = covered(static.tensors(parameters))
            result = original(parameters, *args, **kwargs)
            if known or number is not None:
                ended(static.tensors(parameters), number, result, known)
            return result

        return clip

    def _clip_begins(self, limit: Any, parameters: list[Tensor]) -> float | None:
        """Read the gradients before a clip, and note its limit: return it, or None if it is unknown."""
        recorder, facts = self._recorder, self._recorder.current
        if recorder.state != "armed":
            return None
        if self._in_closure() or not recorder.live or self._has_no_rows or not self._have_rows(parameters):
            self._look_at(parameters, self._clipped)
        else:
            self._note_norm_at_clip(parameters)
        if issubclass(type(limit), Tensor):  # reading it may wait for a device
            number = float(limit) if limit.is_cpu and limit.numel() == 1 else None
        else:
            number = static.number(limit)
        if number is not None:
            facts.clip_norm = number
            # A second clip finds what the first one wrote.
            facts.clipped_before_unscale = facts.clipped_before_unscale or self._scalers.still_scaled(parameters)
        return number

    def _clip_ended(self, parameters: list[Tensor], limit: float | None, result: Any, known: bool | None) -> None:
        """Note a clip, and keep a reading that covers its gradients (``known``): finite ones are still finite."""
        gradients = versions(parameters)
        if known and self.look is not None:
            self.look = Look(self.look.amax, gradients, self.look.late)
        if limit is None or self._recorder.capture.runs:  # a graph keeps its own memory alive
            return
        step, early = self._recorder.step, self._recorder.current.clipped_before_unscale
        norm = result if type(result) is Tensor and result.numel() == 1 else None
        self._clips = [clip for clip in self._clips if clip.step == step]
        if len(self._clips) == _MOST_CLIPS:
            together = itertools.chain.from_iterable(clip.gradients for clip in self._clips)
            self._clips, norm, gradients = [], None, (*together, *gradients)
        self._clips.append(_Clip(step, limit, early, norm, gradients))

    def _note_norm_at_clip(self, parameters: list[Tensor]) -> None:
        """Read the norm at the first clip of a loss scaled by hand: the drain compares it with the gradients' rows."""
        facts, names = self._recorder.current, self._recorder.names
        if facts.norm_at_clip is not None or self._scalers.in_use or not any(f >= 2 for f in facts.root_factors):
            return
        places = [found for p in parameters if (found := names.parameter(p)) is not None]
        if (look := gradient_sentinel(parameters, self._clipped)) is not None:
            facts.norm_at_clip = look[0], frozenset((place.root, place.module, name) for place, name in places)

    def _have_rows(self, parameters: list[Tensor]) -> bool:
        """Return whether a sampled step has rows of all these gradients as the backward pass delivered them."""
        options, names = self._recorder.options, self._recorder.names
        if options.include or options.exclude:
            return False
        return all(names.parameter(p) is not None for p in parameters)

    def _is_covered(self, parameters: list[Tensor]) -> bool:
        """Return whether this step's reading covers these gradients, unchanged."""
        return self.look is not None and self.look.covers(parameters)
