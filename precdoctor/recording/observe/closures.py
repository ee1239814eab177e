"""Steps with a closure: loss and gradients are judged as the closure returns, like those before a step without one.

Most optimizers of torch call the closure once and then update; L-BFGS and others call it several times, with other
weights each time. Each call is an evaluation. Later evaluations are judged on their own: a replay of an earlier one
would run with weights that no longer exist. Trial points of a line search are not judged: it exists to reject them.
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


class JudgedClosure:
    """Stands for the closure of a step and judges each evaluation. A copy or a pickle of it is the closure itself."""

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
    """Judges the evaluations of the open attempt.

    ``attempt`` returns that attempt; None if there is none, or hooks must not run now.
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
        self._begins, self._ends = guarded(recorder)(self._evaluation_begins), guarded(recorder)(self._evaluation_ended)

    def judged(self, attempt: Attempt, closure: object) -> JudgedClosure | None:
        """Return the callable that replaces the closure; None if the closure is to be called as it is."""
        # A module is not a closure, whatever a user's optimizer does with it.
        if not callable(closure) or issubclass(type(closure), (nn.Module, type)):
            return None
        if self._recorder.options.on_nonfinite == "observe":
            return None
        attempt.weight_versions = _versions(attempt.optimizer)
        return JudgedClosure(closure, self._begins, self._ends)

    def _open(self) -> Attempt | None:
        """Return the open attempt if it has a closure and no scaler; a script may call its closure at any time."""
        attempt = self._attempt()
        return attempt if attempt is not None and attempt.closure and not attempt.by_scaler else None

    def _evaluation_begins(self) -> None:
        """Before an evaluation: forget the previous one's gradients unless it was bad, and scenes of other weights."""
        if (attempt := self._open()) is None:
            return
        if attempt.evaluations and not self._guard.found_bad(self._recorder.step):
            facts = self._recorder.current
            facts.grad_norm = facts.grad_amax = None
            self._looks.look = None
        if _versions(attempt.optimizer) != attempt.weight_versions:  # the scene is of other weights
            attempt.weight_versions, attempt.has_moved = _versions(attempt.optimizer), True
            if not self._recorder.traced:
                self._scene.clear()

    def _evaluation_ended(self) -> None:
        """After an evaluation: judge its loss and gradients, and set them aside if the step is to be skipped."""
        attempt, recorder = self._open(), self._recorder
        if attempt is None:
            return
        attempt.evaluations += 1
        optimizer, passes = attempt.optimizer, recorder.micro_step
        # A later evaluation without a backward pass has nothing new to judge. The first one may also have none, as in
        # Lightning's manual optimization: its gradients came before the step.
        if (attempt.evaluations > 1 and passes == attempt.judged_passes) or self._guard.found_bad(recorder.step):
            return
        attempt.judged_passes = passes
        if attempt.evaluations > 1 and any(group.get("line_search_fn") for group in groups_of(optimizer)):
            return
        self._looks.before_step(optimizer, groups_of(optimizer))
        self._guard.has_moved, self._guard.may_skip = attempt.has_moved, not attempt.has_moved and _skips(optimizer)
        try:
            look, self._looks.look = self._looks.look, None
            attempt.skipped = self._guard.skips_step(optimizer, None, look)
        finally:
            self._guard.has_moved, self._guard.may_skip = False, True
        if attempt.skipped:
            attempt.reached = False
            attempt.aside = GradientsAside(parameters_of(optimizer))


def _versions(optimizer: torch.optim.Optimizer) -> int:
    """Return the sum of the weights' version counters. Any write changes it, except one through ``.data``."""
    weights = parameters_in_place(groups_of(optimizer))
    if static.TENSORS.issuperset(map(type, weights)):
        with contextlib.suppress(RuntimeError):  # tensors of inference mode have no version
            return sum(map(_VERSION, weights))
    return sum(map(tensor_leaves.version, weights))


def _skips(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step is torch's own: it leaves weights without a gradient alone."""
    step: Any = type(optimizer).step
    return str(getattr(step, "__module__", "")).startswith("torch.optim.")
