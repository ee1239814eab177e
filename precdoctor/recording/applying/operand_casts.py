"""Casts weights, inputs and output gradients of a module to narrow formats and back, to try out a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.numerics.narrow_cast import parse_casts
from precdoctor.recording.applying.emulated_cast import COUNTS, cast
from precdoctor.recording.applying.ledger import Ledger
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.runlog.changes import Change

_PLAIN = (Tensor, nn.Parameter)
#: Maximum number of steps whose counts are kept, per operand.
_MAX_STEPS = 1024


class OperandCasts:
    """Runs a module's forward with its operands cast, and logs a ``casts`` event for each operand at the end.

    Gradients pass the casts of weights and inputs unchanged. Counts are summed per step on the device, without waiting.
    """

    def __init__(self, context: StepContext, change: Change, ledger: Ledger) -> None:
        self._context, self._change, self._ledger = context, change, ledger
        self._casts = parse_casts(str(change.to))
        self._counts: dict[tuple[str, str], dict[int, Tensor]] = {}
        context.when_closing.append(self._closing)

    def run(self, module: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``call(*args, **kwargs)``, the forward of ``module``, with operands cast."""
        with self._cast_weights(module):
            result = call(*self._cast_inputs(args), **kwargs)
        if "grad_output" not in self._casts or not torch.is_grad_enabled():
            return result
        names = {id(x): name for name, x in tensor_leaves.floating(result)}

        def with_cast_gradient(x: Tensor) -> Tensor:
            if id(x) not in names or not _is_operand(x) or not x.requires_grad:
                return x
            return _apply(_CastGradient, x, self._cast("grad_output", names[id(x)]))

        return tensor_leaves.mapped(result, with_cast_gradient)

    def _cast_inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cast tensors among the positional arguments, each object once: attention tests whether query is key."""
        if "input" not in self._casts:
            return args
        made = {id(x): _apply(_Straight, x, self._cast("input")) for x in args if _is_operand(x)}
        return tuple(made.get(id(x), x) for x in args)

    @contextmanager
    def _cast_weights(self, module: nn.Module) -> Iterator[None]:
        """Replace the module's own matrices by cast ones inside the context; autograd keeps the cast ones."""
        held = {
            name: p
            for name, p in (module._parameters.items() if "weight" in self._casts else ())
            if isinstance(p, nn.Parameter) and _is_operand(p) and sum(n > 1 for n in p.shape) >= 2
        }
        if not held:
            yield
            return
        made = {name: _apply(_Straight, p, self._cast("weight", name)) for name, p in held.items()}
        flat = vars(module).get("_flat_weights")  # torch's recurrent modules pass this list to their kernels
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

    def _cast(self, role: str, name: str = "") -> Callable[[Tensor], Tensor]:
        """Return a function that casts one operand and adds to the counts of the current step.

        Calls without gradients (evaluation) are not counted. A tensor that cannot be cast is returned as a plain copy.
        """
        how, counted = self._casts[role], self._counts.setdefault((role, name), {})
        step, counts_call = self._context.step, torch.is_grad_enabled() or role == "grad_output"

        def apply(x: Tensor) -> Tensor:
            try:
                made, counts = cast(x, how)
            except Exception as error:  # noqa: BLE001 - memory may end, or a device lack an op
                attach.let_through(error)
                self._ledger.refused(
                    self._change, f"its {role} could not be cast: {type(error).__name__}: {error}"[:400]
                )
                return x.clone()
            if not counts_call:
                return made
            if step in counted:
                counted[step] += counts
            elif len(counted) < _MAX_STEPS:
                counted[step] = counts
            return made

        return apply

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


def _apply(function: Any, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    return function.apply(x, apply)


def _is_operand(x: Any) -> bool:
    """Return whether a value is a plain, dense floating-point tensor or parameter."""
    return type(x) in _PLAIN and x.is_floating_point() and x.layout is torch.strided


class _Straight(torch.autograd.Function):
    """Casts in the forward pass; passes the gradient unchanged."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        return apply(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _CastGradient(torch.autograd.Function):
    """Passes a copy in the forward pass, because scripts change outputs in place; casts the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.apply_cast = apply
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _apply(_Straight, gradient, ctx.apply_cast), None
