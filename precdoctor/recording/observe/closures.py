"""Steps with a closure: loss and gradients are judged as the closure returns, as they are before a step without one.

An optimizer calls its closure once and then updates (those of torch, but for L-BFGS), or several times with other
weights in between. Each call is an evaluation. Of several, the later ones are judged by themselves: a replay of the
earlier ones would run with weights that are gone. Trial points of a line search are not: it is there to leave them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from precdoctor.recording.microscope.guard import Guard
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.optimizer_contents import groups_of, parameters_in_place, parameters_of
from precdoctor.recording.observe.gradient_looks import GradientLooks
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.steps.step_attempt import Attempt, GradientsAside

_BASE: Any = torch._C.TensorBase
_VERSION: Final = _BASE._version.__get__


class Judged:
    """Stands for the closure of a step; a copy or a pickle of it is the closure itself."""

    def __init__(self, closure: Callable[..., Any], begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._closure, self._begins, self._ends = closure, begins, ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._closure(*args, **kwargs)
        self._begins()
        result = self._closure(*args, **kwargs)
        self._ends()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._closure, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self._closure,),)


class Closures:
    """Judges the evaluations of the attempt that is open.

    Args:
        recorder: of the process.
        guard: decides.
        looks: read the gradients.
        scene: what a replay needs.
        attempt: the one that is open, if there is one and somebody may look now.
    """

    def __init__(
        self,
        recorder: Recorder,
        guard: Guard,
        looks: GradientLooks,
        scene: Scene,
        attempt: Callable[[], Attempt | None],
    ) -> None:
        self._recorder, self._guard, self._looks, self._scene = recorder, guard, looks, scene
        self._attempt = attempt
        self._begins, self._ends = guarded(recorder)(self._begun), guarded(recorder)(self._ended)

    def judged(self, attempt: Attempt, closure: object) -> Judged | None:
        """What is to be called in place of the closure; null where it is left as it is."""
        # A module is no closure, whatever an optimizer of the user's wants with it.
        if not callable(closure) or issubclass(type(closure), (nn.Module, type)):
            return None
        if self._recorder.options.on_nonfinite == "observe":
            return None
        attempt.weights = _versions(attempt.optimizer)
        return Judged(closure, self._begins, self._ends)

    def _open(self) -> Attempt | None:
        """The attempt whose closure this is; an optimizer may have kept one for later."""
        attempt = self._attempt()
        return attempt if attempt is not None and attempt.closure and not attempt.by_scaler else None

    def _begun(self) -> None:
        if (attempt := self._open()) is None:
            return
        if attempt.evaluations and not self._guard.found_bad(self._recorder.step):
            facts = self._recorder.current
            facts.grad_norm = facts.grad_amax = None
            self._looks.forget()
        if _versions(attempt.optimizer) != attempt.weights:  # what was kept was computed with other weights
            attempt.weights, attempt.moved = _versions(attempt.optimizer), True
            if not self._recorder.traced:
                self._scene.clear()

    def _ended(self) -> None:
        attempt, recorder = self._open(), self._recorder
        if attempt is None:
            return
        attempt.evaluations += 1
        optimizer, passes = attempt.optimizer, recorder.micro_step
        # Without a backward pass in it a later evaluation has nothing new; the first one may be there for show, as in
        # Lightning's manual optimization, and gradients have come before.
        if (attempt.evaluations > 1 and passes == attempt.judged) or self._guard.found_bad(recorder.step):
            return
        attempt.judged = passes
        if attempt.evaluations > 1 and any(group.get("line_search_fn") for group in groups_of(optimizer)):
            return
        self._looks.before_step(optimizer, groups_of(optimizer))
        self._guard.has_moved, self._guard.may_skip = attempt.moved, not attempt.moved and _skips(optimizer)
        try:
            attempt.skipped = self._guard.skips_step(optimizer, None, self._looks.take())
        finally:
            self._guard.has_moved, self._guard.may_skip = False, True
        if attempt.skipped:
            attempt.reached = False
            attempt.aside = GradientsAside(parameters_of(optimizer))


def _versions(optimizer: torch.optim.Optimizer) -> int:
    """Differs once somebody has written to a weight, unless through ``.data``."""
    weights = parameters_in_place(groups_of(optimizer))
    if static.TENSORS.issuperset(map(type, weights)):
        with contextlib.suppress(RuntimeError):  # of inference mode: they have no version
            return sum(map(_VERSION, weights))
    return sum(map(tensor_leaves.version, weights))


def _skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known to leave its weights alone where they have no gradients once its closure has returned."""
    step: Any = type(optimizer).step
    return str(getattr(step, "__module__", "")).startswith("torch.optim.")
