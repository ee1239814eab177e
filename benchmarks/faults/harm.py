"""Where a non-finite value does harm: the loss given to backward, gradients given to an optimizer, weights.

    python -m benchmarks.faults.harm SCRIPT        prints one JSON object on the last line of stdout

A birth does harm when it reaches one of them; the first one that does is the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.faults.modules import ModuleStack
from benchmarks.faults.tracer import Birth, Tracer

#: FP16 gradients that overflow under a GradScaler are its daily bread; this many skips in a row are not.
SKIPS_ALLOWED = 6


class Found(Exception):  # noqa: N818 -- not an error: it ends the run
    """The first harm is known."""


class Watch:
    """Patches what must be watched, and raises ``Found`` at the first harm; ``answer`` then tells it."""

    def __init__(self, tracer: Tracer, modules: ModuleStack) -> None:
        self.tracer, self.modules = tracer, modules
        #: harm: loss | gradient | weights; birth, saved: as dictionaries; parameter: root and FQN of a bad weight.
        self.answer: dict[str, Any] = dict.fromkeys(("harm", "birth", "saved", "parameter", "seen_step"))
        self.answer["backoffs"] = 0
        self._in_a_row = 0
        self._first_backoff: Birth | None = None
        #: Inside GradScaler.step, and whether that scaler is enabled.
        self._scaler_step = self._scaled = False
        self._backward, self._step = torch.autograd.backward, torch.amp.GradScaler.step

    def __enter__(self) -> Watch:  # noqa: PYI034 -- Self is younger than Python 3.10
        watch = self

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            watch._check_loss(tensors)
            try:
                return watch._backward(tensors, *args, **kwargs)
            finally:
                watch.modules.ran = False

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            watch._scaler_step, watch._scaled = True, scaler.is_enabled()
            if watch._scaled:
                watch._check_gradients(_parameters(optimizer))
            try:
                return watch._step(scaler, optimizer, *args, **kwargs)
            finally:
                watch._scaler_step = watch._scaled = False
                watch.tracer.step += 1

        self.modules.install(self._check_root)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        torch.autograd.backward = backward
        torch.amp.GradScaler.step = step  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self.modules.remove()
        for handle in self._handles:
            handle.remove()
        torch.autograd.backward = self._backward
        torch.amp.GradScaler.step = self._step  # type: ignore[method-assign]

    def _harm(self, kind: str, birth: Birth | None) -> None:
        saved = self.tracer.births[birth.saved] if birth is not None and birth.saved is not None else None
        facts = [dataclasses.asdict(b) if b else None for b in (birth, saved)]
        self.answer.update(harm=kind, birth=facts[0], saved=facts[1], seen_step=self.tracer.step)
        raise Found

    def _check_loss(self, tensors: Any) -> None:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        bad, birth = self.tracer.of(t for t in given if isinstance(t, torch.Tensor))
        if bad:
            self._harm("loss", birth)

    def _check_root(self, root: nn.Module) -> None:
        known = (p for p in root.parameters() if not isinstance(p, UninitializedParameter))
        self._check_weights(p for p in known if not torch._C._functorch.is_functorch_wrapped_tensor(p))

    def _check_weights(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            bad, birth = self.tracer.of([parameter])
            if bad:
                self.answer["parameter"] = self.modules.owner(parameter)
                self._harm("weights", birth)

    def _check_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        bad, birth = self.tracer.of(p.grad for p in parameters if p.grad is not None)
        if not bad:
            self._in_a_row = 0
            return
        if self._scaled and birth is not None and birth.finite_in_fp64 and self._in_a_row < SKIPS_ALLOWED:
            self._first_backoff = self._first_backoff if self._in_a_row else birth
            self._in_a_row += 1
            self.answer["backoffs"] += 1
            return
        self._harm("gradient", self._first_backoff if self._in_a_row else birth)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if not self._scaled:
            self._check_gradients(_parameters(optimizer))
        self.tracer.in_optimizer = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self.tracer.in_optimizer = False
        self._check_weights(_parameters(optimizer))
        if not self._scaler_step:
            self.tracer.step += 1


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def trace(script: Path, directory: Path) -> dict[str, Any]:
    """Run ``script`` and return the first harm, as ``Watch.answer`` tells it."""
    modules = ModuleStack()
    tracer = Tracer(directory, modules)
    torch.compiler.set_stance("force_eager")
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    with Watch(tracer, modules) as watch, contextlib.suppress(Found), tracer:
        runpy.run_path(str(script), run_name="__main__")
    return watch.answer


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    result = trace(path, path.parent)
    print("\n" + json.dumps(result))
