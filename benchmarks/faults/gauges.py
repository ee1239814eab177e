"""The oracle's gauges for faults that make no NaN: run a script and measure, per module, what is lost.

    python -m benchmarks.faults.gauges SCRIPT [--fp32]        prints one JSON object on the last line of stdout

- ``zeros``: of the gradients of each module's outputs in the first backward pass, the share that is exactly zero, in
  the order of the backward pass. The difference to a run with ``--fp32`` (autocast and scaler off) is what was flushed.
- ``stuck``: of each module's weights, the share that an optimizer step leaves bit-equal although their gradient is not
  zero; median over the steps.
- ``overflows``: how often each module's output gradient was the first non-finite one of a step; ``scales``: loss
  scales.
- ``saturated``: of what each module casts to an FP8 format, the share at the format's largest value or above; one
  element, which amax scaling puts there, is not counted.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.faults.modules import ModuleStack

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Gauges(TorchDispatchMode):
    """Measures while a script runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = ModuleStack()
        self.zeros: dict[str, float] = {}
        self.stuck: defaultdict[str, list[float]] = defaultdict(list)
        self.saturated: defaultdict[str, list[float]] = defaultdict(list)
        self.overflows: Counter[str] = Counter()
        self.scales: list[float] = []
        self._before: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._overflowed = False
        self._steps = 0

    def install(self) -> None:
        """Put the hooks in place; the process is the script's own, so they stay."""
        register_module_forward_hook(self._after_forward)  # before the stack's own: the module is still running
        self.modules.install(lambda _: None)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        update = torch.amp.GradScaler.update

        def updated(scaler: Any, *args: Any, **kwargs: Any) -> None:
            update(scaler, *args, **kwargs)
            self.scales.append(scaler.get_scale())
            self._overflowed = False

        torch.amp.GradScaler.update = updated  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func).startswith("aten._to_copy") and out.dtype in _FP8 and out.numel():
            largest = torch.finfo(out.dtype).max
            at_limit = int((args[0].abs().float() >= largest).sum())
            self.saturated[self._name()].append(max(at_limit - 1, 0) / out.numel())
        return out

    def _name(self) -> str:
        where = self.modules.where()
        return where[1] if where else ""

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if isinstance(output, torch.Tensor) and output.requires_grad:
            name = self._name()
            output.register_hook(lambda gradient: self._seen(name, gradient))

    def _seen(self, name: str, gradient: torch.Tensor) -> None:
        if self._steps == 0:
            self.zeros.setdefault(name, float((gradient == 0).float().mean()))
        if not self._overflowed and not bool(gradient.isfinite().all()):
            self._overflowed = True
            self.overflows[name] += 1

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._before = [((self.modules.owner(p) or ("", ""))[1], p, p.detach().clone()) for p in parameters]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._steps += 1
        for name, parameter, before in self._before:
            meant = parameter.grad != 0
            if bool(meant.any()):
                self.stuck[name].append(float((parameter == before)[meant].float().mean()))

    def answer(self) -> dict[str, Any]:
        """Everything measured."""
        return {
            "zeros": self.zeros,
            "stuck": {name: statistics.median(shares) for name, shares in self.stuck.items()},
            "saturated": {name: statistics.median(shares) for name, shares in self.saturated.items()},
            "overflows": dict(self.overflows),
            "scales": self.scales,
        }


def in_fp32() -> None:
    """Turn autocast and loss scaling off, whatever the script asks for."""
    cast, scale = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def autocast(self: Any, *args: Any, **kwargs: Any) -> None:
        cast(self, *args, **{**kwargs, "enabled": False})

    def scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        scale(self, *args, **{**kwargs, "enabled": False})

    torch.autocast.__init__ = autocast  # type: ignore[method-assign]
    torch.amp.GradScaler.__init__ = scaler  # type: ignore[method-assign]


def main() -> None:
    """Measure one script."""
    path = Path(sys.argv[1]).resolve()
    if "--fp32" in sys.argv:
        in_fp32()
    sys.argv, sys.path[0] = [str(path)], str(path.parent)
    gauges = Gauges()
    gauges.install()
    with gauges:
        runpy.run_path(str(path), run_name="__main__")
    print("\n" + json.dumps(gauges.answer()))


if __name__ == "__main__":
    main()
