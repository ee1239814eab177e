"""Keeps calls of ``torch.autograd.grad`` for examination if the gradients they return turn out to be non-finite.

Unlike ``backward``, such a call begins no micro-step, and nothing of it is measured or logged. The first calls of a
step are kept by reference.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch

from precdoctor.recording.model import static
from precdoctor.recording.ops.dispatched_ops import is_own_run, open_modes, step_aside, step_back
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.loss_graph import GradCall

if TYPE_CHECKING:
    from precdoctor.recording.scene.loss_code import LossCode
    from precdoctor.recording.scene.step_snapshot import Scene

#: Maximum number of calls kept per step: samplers make one per step of their chain.
_MAX_GRAD_CALLS = 8


class TakenGradients:
    """Patches ``torch.autograd.grad`` and adds its calls to the scene."""

    def __init__(self, context: StepContext, scene: Scene, loss_code: LossCode) -> None:
        self._context = context
        self._scene = scene
        self._loss_code = loss_code

    def install(self) -> None:
        """Patch once per process; signature and ``__wrapped__`` are kept."""
        original = torch.autograd.grad
        context = self._context
        begin, end = guarded(context)(self._begin_call), guarded(context)(self._end_call)
        parameters = tuple(inspect.signature(original).parameters)

        @functools.wraps(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or context.state != "armed":
                return original(*args, **kwargs)
            aside = step_aside() if open_modes else None
            grad_call = result = None
            try:
                if self._is_own_call():
                    named = dict(zip(parameters, args, strict=False)) | kwargs
                    if not named.get("is_grads_batched"):  # batched gradients have no memory that could be read
                        grad_call = begin(named.get("outputs"), named.get("inputs"), named.get("grad_outputs"))
                result = original(*args, **kwargs)
            finally:
                if grad_call is not None:
                    end(grad_call, result)
                if aside:
                    step_back(aside)
            return result

        torch.autograd.grad = grad

    def _is_own_call(self) -> bool:
        """Return whether this is the user's own call between modules: not torch's, and not repeated by a replay."""
        return (
            self._scene.enabled
            and self._loss_code.supported
            and not getattr(self._context.local, "stack", None)
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.maybe_current_level() is None
            and is_own_run()
        )

    def _begin_call(self, outputs: Any, inputs: Any, gradients: Any) -> GradCall | None:
        """Keep a call and the graph behind its output; return None if it is not kept."""
        scene = self._scene
        scene.begin_step_if_new()
        if scene.refused is not None or len(scene.grad_calls) >= _MAX_GRAD_CALLS:
            return None
        graph = self._loss_code.graph_of(outputs, gradients)
        grad_call = GradCall(len(scene.grad_calls), graph, [weakref.ref(x) for x in static.tensors(inputs)])
        scene.grad_calls.append(grad_call)
        scene.running_grad_call = grad_call.number
        return grad_call

    def _end_call(self, grad_call: GradCall, result: Any) -> None:
        """Note the gradients that a call returned; ``result`` is None if it raised."""
        self._scene.running_grad_call = None
        grad_call.results = [weakref.ref(x) for x in static.tensors(result)]
