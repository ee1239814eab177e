"""The oracle's measurements for faults that make no NaN: run a script, or its twin, and measure what is lost.

    python -m benchmarks.faults.gauges SCRIPT [--fp64] [--mend OLD NEW]... [--probe EXPRESSION]    JSON, last line

``--fp64`` runs the twin in double precision: the same script, the same random numbers, but autocast and loss scaling
are off and every cast to a narrower format, FP8 included, is to FP64. ``--mend`` runs the twin whose source has that
text replaced. ``--probe`` evaluates an expression among the script's globals when it has ended. Nothing of precdoctor
is used.

What is measured, per module (or per module that owns a parameter), over the steps:

| gauge | value |
|---|---|
| zeros | mean share of exact zeros in the gradient of the module's outputs |
| weight_zeros | mean share of exact zeros in the gradients given to the optimizer |
| stuck | median share of weights that a step leaves bit-equal although their gradient is not zero |
| stalled | median share of ``exp_avg_sq`` left bit-equal although the squared gradient is more than 1 % off |
| eps | median share of weights whose bias-corrected sqrt(v) is below eps, where the gradient is not zero |
| update_ratio | largest norm(dw) / norm(w) of a step, matrices only |
| saturated, flushed | mean share of elements that casts to FP8 clip to the largest value, or make zero |
| damage | mean relative L2 error of casts to FP8 |
| accumulated | median relative L2 error of the gradient accumulated in its own format, against the sum in FP64 |
| amax | largest finite output of the module; ``growth`` is the last step's over the first's |
| overflows | steps in which the gradient of its output was the first that was not finite |

and for the whole run ``gradient`` (median L2 norm of what the optimizer is given), ``explosion`` (largest over median
norm), ``falls`` (of the loss scale), ``steps`` (of optimizers), ``probe``, and ``loss`` (every number printed after
that word).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import re
import runpy
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks.faults.modules import ModuleStack

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NARROW = (torch.float16, torch.bfloat16, torch.float32, *_FP8)
_DRAWS = ("rand", "randn", "uniform", "normal", "bernoulli", "exponential", "native_dropout", "rand_like", "randn_like")
_LOSS = re.compile(r"loss[ :=]{0,3}([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))", re.IGNORECASE)


class Gauges(TorchDispatchMode):
    """Measures while a script runs under it."""

    def __init__(self, fp64: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fp64 = fp64
        self.modules = ModuleStack()
        self.series: dict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.overflows: Counter[str] = Counter()
        self.scales: list[float] = []
        self.norms: list[float] = []
        self._before: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._overflowed = False
        #: Of every node of the graph, by its number, the module that made it.
        self._made_by: dict[int, str] = {}
        #: Of every parameter, the sum in FP64 of the gradients that backward passes gave it since the last step.
        self._sums: dict[int, torch.Tensor] = {}
        self._known: set[int] = set()

    def install(self) -> None:
        """Put the hooks in place; the process is the script's own, so they stay."""
        register_module_forward_hook(self._after_forward)  # before the stack's own: the module is still running
        self.modules.install(self._enter)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        update = torch.amp.GradScaler.update

        def updated(scaler: Any, *args: Any, **kwargs: Any) -> None:
            update(scaler, *args, **kwargs)
            self.scales.append(scaler.get_scale())
            self._overflowed = False

        torch.amp.GradScaler.update = updated  # type: ignore[method-assign]

    # -- ops -----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = str(func)
        if torch._C._current_autograd_node() is None:  # type: ignore[attr-defined]
            self._made_by.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._name())  # type: ignore[attr-defined]
        if self.fp64:
            return self._widely(func, name, args, kwargs)
        out = func(*args, **kwargs)
        if name.startswith("aten._to_copy") and out.dtype in _FP8 and out.numel() and args[0].dtype not in _FP8:
            self._cast(args[0].double(), out.double(), torch.finfo(out.dtype).max)
        return out

    def _widely(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The op with FP64 results; random numbers are drawn in FP32, so that they are those of the script."""
        if name.removeprefix("aten.").split(".")[0].strip("_") not in _DRAWS:
            if kwargs.get("dtype") in _NARROW:
                kwargs["dtype"] = torch.float64
            return func(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            if args[0].dtype != torch.float64:
                return func(*args, **kwargs)
            out = func(args[0].float(), *args[1:], **kwargs)
            return args[0].copy_(out) if func._schema.is_mutable else _doubled(out)
        return _doubled(func(*args, **{**kwargs, "dtype": torch.float32}))

    def _cast(self, wide: torch.Tensor, narrow: torch.Tensor, largest: float) -> None:
        name = self._name()
        at_limit = int((wide.abs() >= largest).sum())
        some = wide != 0
        self.series["saturated"][name].append(max(at_limit - 1, 0) / wide.numel())
        self.series["flushed"][name].append(float((narrow[some] == 0).double().mean()) if bool(some.any()) else 0.0)
        self.series["damage"][name].append(float((narrow - wide).norm() / wide.norm().clamp(min=1e-300)))

    def _name(self) -> str:
        """The module that runs, or in the backward pass the one whose forward made the node."""
        node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is not None and not self.modules.stack:
            return self._made_by.get(node._sequence_nr(), "?:")
        return _joined(self.modules.where())

    # -- modules -------------------------------------------------------------------------------------------------------

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        name = self._name()
        for tensor in tree_flatten(output)[0]:
            if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point or not tensor.numel():
                continue
            with torch.no_grad():
                finite = tensor.double().nan_to_num(0.0, 0.0, 0.0)
                self.series["amax"][name].append(float(finite.abs().max()))
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._seen(name, gradient))

    def _seen(self, name: str, gradient: torch.Tensor) -> None:
        self.series["zeros"][name].append(float((gradient == 0).double().mean()))
        if not self._overflowed and not bool(gradient.isfinite().all()):
            self._overflowed = True
            self.overflows[name] += 1

    def _enter(self, root: nn.Module) -> None:
        for parameter in root.parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                self._known.add(id(parameter))
                parameter.register_hook(functools.partial(self._add, id(parameter)))

    def _add(self, key: int, gradient: torch.Tensor) -> None:
        if not gradient.is_sparse:
            self._sums[key] = self._sums.get(key, 0) + gradient.double()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._before, squares = [], 0.0
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            squares += float(gradient.double().square().sum())
            name = _joined(self.modules.owner(parameter))
            self.series["weight_zeros"][name].append(float((gradient == 0).double().mean()))
            total = self._sums.pop(id(parameter), None)
            if (
                total is not None
                and total.shape == gradient.shape
                and bool(total.isfinite().all())
                and bool(total.any())
            ):
                self.series["accumulated"][name].append(_unlike(gradient.double(), total))
            v = optimizer.state[parameter].get("exp_avg_sq") if parameter in optimizer.state else None
            self._before.append(
                (name, parameter, parameter.detach().clone(), v.clone() if type(v) is torch.Tensor else None)
            )
        self.norms.append(math.sqrt(squares))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter, before, v_before in self._before:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                continue
            meant = gradient != 0
            moved = (parameter.detach() - before).double().norm() / before.double().norm().clamp(min=1e-12)
            if parameter.dim() > 1:
                self.series["update_ratio"][name].append(float(moved))
            if not bool(meant.any()):
                continue
            self.series["stuck"][name].append(float((parameter == before)[meant].double().mean()))
            v = optimizer.state[parameter].get("exp_avg_sq") if parameter in optimizer.state else None
            group = groups[id(parameter)]
            if type(v) is not torch.Tensor or v.shape != parameter.shape or "betas" not in group:
                continue  # torchao's have no arithmetic, Adafactor has another correction
            correction = 1 - group["betas"][1] ** float(optimizer.state[parameter]["step"])
            small = (v.double() / correction).sqrt() < group["eps"]
            self.series["eps"][name].append(float(small[meant].double().mean()))
            if v_before is not None:
                g2 = gradient.double().square()
                differs = (g2 - v_before.double()).abs() > 0.01 * v_before.double()
                if bool(differs.any()):
                    self.series["stalled"][name].append(float((v == v_before)[differs].double().mean()))

    def answer(self, printed: str) -> dict[str, Any]:
        """Everything measured."""
        summaries = {
            **dict.fromkeys(("zeros", "weight_zeros", "saturated", "flushed", "damage"), statistics.fmean),
            **dict.fromkeys(("stuck", "stalled", "eps", "accumulated"), statistics.median),
            **dict.fromkeys(("update_ratio", "amax"), max),
        }
        modules = {g: {n: s(v) for n, v in self.series[g].items()} for g, s in summaries.items()}
        modules["growth"] = {n: v[-1] / v[0] for n, v in self.series["amax"].items() if v[0] > 0}
        modules["overflows"] = {n: float(k) for n, k in self.overflows.items()}
        median = statistics.median(self.norms) if self.norms else math.nan
        return {
            "modules": modules,
            "loss": [float(x) for x in _LOSS.findall(printed)],
            "scales": self.scales,
            "run": {
                "gradient": median,
                "explosion": max(self.norms, default=0.0) / median if median else math.inf,
                "falls": sum(b < a for a, b in pairwise(self.scales)),
                "steps": len(self.norms),
            },
        }


def _joined(where: tuple[str, str] | None) -> str:
    """``Generator:net.0``; roots of the same class are not told apart."""
    return "?:" if where is None else f"{where[0].split('#')[0]}:{where[1]}"


def _unlike(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative L2 distance of ``a`` from the nearest multiple of ``b``: unscaling and clipping do not count."""
    nearest = b * ((a * b).sum() / b.square().sum())
    return float((a - nearest).norm() / nearest.norm().clamp(min=1e-300))


def _doubled(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(_doubled(x) for x in tree)
    return tree.double() if isinstance(tree, torch.Tensor) and tree.dtype == torch.float32 else tree


def _switch_off_mixed_precision() -> None:
    cast, scale = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def autocast(self: Any, *args: Any, **kwargs: Any) -> None:
        cast(self, *args, **{**kwargs, "enabled": False})

    def scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        scale(self, *args, **{**kwargs, "enabled": False})

    torch.autocast.__init__ = autocast  # type: ignore[method-assign]
    torch.amp.GradScaler.__init__ = scaler  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)


def main() -> None:
    """Measure one script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--fp64", action="store_true")
    parser.add_argument("--mend", nargs=2, action="append", default=[])
    parser.add_argument("--probe")
    arguments = parser.parse_args()
    path = arguments.script.resolve()
    source = path.read_text()
    for old, new in arguments.mend:
        if source.count(old) != 1:
            raise SystemExit(f"{old!r} is in {path.name} {source.count(old)} times")
        source = source.replace(old, new)
    if arguments.fp64:
        _switch_off_mixed_precision()
    gauges, printed = Gauges(arguments.fp64), io.StringIO()
    gauges.install()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, path.name)
        copy.write_text(source)
        sys.argv, sys.path[0] = [str(copy)], str(path.parent)
        with contextlib.redirect_stdout(printed), gauges:
            names = runpy.run_path(str(copy), run_name="__main__")
    answer = gauges.answer(printed.getvalue())
    if arguments.probe:
        answer["run"]["probe"] = float(eval(arguments.probe, {"torch": torch, "math": math, **names}))
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
