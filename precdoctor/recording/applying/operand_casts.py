"""The weights, inputs and output gradients of one module cast to narrow formats and back: a plan, tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.numerics.narrow_cast import NarrowCast, parse_casts
from precdoctor.recording.applying.emulated_cast import COUNTS, cast
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.runlog.changes import Change

_PLAIN = (Tensor, nn.Parameter)
#: Steps of which the counts are held.
_MAX_STEPS = 1024
Counted = Callable[[Tensor], None]


class OperandCasts:
    """Runs a module's forward with its operands cast, and logs a ``casts`` event for each of them at the end.

    Gradients pass the casts of weights and inputs straight through. What the casts did is summed up on the device, by
    step; nobody waits for it.
    """

    def __init__(self, context: StepContext, change: Change) -> None:
        self._context, self._change = context, change
        self._casts = parse_casts(str(change.to))
        self._counts: dict[tuple[str, str], dict[int, Tensor]] = {}
        context.when_closing.append(self._closing)

    def run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``call(*args, **kwargs)``, which is the forward of ``module``."""
        with self._cast_weights(module):
            result = call(*self._cast_inputs(args), **kwargs)
        how = self._casts.get("grad_output")
        if how is None or not torch.is_grad_enabled():
            return result
        names = {id(x): name for name, x in tensor_leaves.floating(result)}

        def with_cast_gradient(x: Tensor) -> Tensor:
            if type(x) not in _PLAIN or id(x) not in names or not x.requires_grad or x.is_complex():
                return x
            return _applied(_CastGradient, x, how, self._counter("grad_output", names[id(x)]))

        return tensor_leaves.mapped(result, with_cast_gradient)

    def _cast_inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tensors among the positional arguments, each object once: attention asks whether its three are the same."""
        how = self._casts.get("input")
        if how is None:
            return args
        made = {id(x): self._straight(x, how, "input") for x in args if _is_operand(x)}
        return tuple(made.get(id(x), x) for x in args)

    @contextmanager
    def _cast_weights(self, module: nn.Module) -> Iterator[None]:
        """The module's own matrices replaced while its forward runs; autograd keeps what the products took."""
        how = self._casts.get("weight")
        held = {
            name: p
            for name, p in (module._parameters.items() if how is not None else ())
            if isinstance(p, nn.Parameter) and _is_operand(p) and sum(n > 1 for n in p.shape) >= 2
        }
        if how is None or not held:
            yield
            return
        made = {name: self._straight(p, how, "weight", name) for name, p in held.items()}
        flat = vars(module).get("_flat_weights")  # recurrent modules of torch hand this list to their kernels
        parameters: Any = module._parameters
        try:
            parameters.update(made)
            if isinstance(flat, list):
                swapped = {id(held[name]): made[name] for name in held}
                vars(module)["_flat_weights"] = [swapped.get(id(p), p) for p in flat]
            yield
        finally:
            parameters.update(held)
            if isinstance(flat, list):
                vars(module)["_flat_weights"] = flat

    def _straight(self, x: Tensor, how: NarrowCast, role: str, name: str = "") -> Tensor:
        return _applied(_Straight, x, how, self._counter(role, name))

    def _counter(self, role: str, name: str) -> Counted:
        """Adds counts to those of the step in progress; evaluation, without gradients, is not counted."""
        counted, step = self._counts.setdefault((role, name), {}), self._context.step
        training = torch.is_grad_enabled() or self._context.in_backward

        def add(counts: Tensor) -> None:
            if step in counted:
                counted[step] += counts
            elif training and len(counted) < _MAX_STEPS:
                counted[step] = counts

        return add

    def _closing(self) -> None:
        for (role, name), by_step in self._counts.items():
            how = self._casts[role]
            columns = torch.stack(list(by_step.values())).cpu().T.tolist() if by_step else [[] for _ in COUNTS]
            data = {"role": role, "name": name, "format": how.format.name, "scaling": how.scaling}
            counts: dict[str, Any] = dict(zip(COUNTS, columns, strict=True))
            for key in ("elements", "flushed", "saturated"):
                counts[key] = [int(n) for n in counts[key]]
            counts["noise"] = [n if math.isfinite(n) else None for n in counts["noise"]]
            place = {"root": self._change.root, "module": self._change.module}
            self._context.event("casts", **place, data={**data, "steps": list(by_step), **counts})


def _applied(function: Any, x: Tensor, how: NarrowCast, counted: Counted) -> Tensor:
    made: Tensor = function.apply(x, how, counted)
    return made


def _is_operand(x: Any) -> bool:
    return type(x) in _PLAIN and x.is_floating_point() and x.layout is torch.strided


class _Straight(torch.autograd.Function):
    """The cast forwards, nothing backwards."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, how: NarrowCast, counted: Counted) -> Tensor:
        made, counts = cast(x, how)
        counted(counts)
        return made

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class _CastGradient(torch.autograd.Function):
    """Nothing forwards, the cast backwards; a copy, because scripts change outputs in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: NarrowCast, counted: Counted) -> Tensor:
        ctx.how, ctx.counted = how, counted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _applied(_Straight, gradient, ctx.how, ctx.counted), None, None
