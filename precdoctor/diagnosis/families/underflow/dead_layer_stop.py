"""PD203, what stops the gradient of a dead layer.

A zero output behind the layer, a flat function, the loss itself, or a multiplication by zero that the deep scans list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.analyses.op_dtypes import coverage
from precdoctor.diagnosis.analyses.scans import short_name
from precdoctor.diagnosis.claims.finding import Prescription, Source, at_line
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.underflow.dead_layer_flushed import loss_is_zero
from precdoctor.diagnosis.families.underflow.dead_layer_origin import is_negative
from precdoctor.diagnosis.survey.rows import TensorRow, integer, source_of, text
from precdoctor.diagnosis.survey.view import RunView

#: Magnitude from which tanh is 1 in FP32; a sigmoid is from 17 on.
_FLAT_FROM = 9.0


@dataclass(frozen=True)
class GradientCut:
    """A product (or quotient) that made zeros of a non-zero gradient.

    Attributes:
        op: ``mul`` or ``div``.
        source: its line.
        arrives: the gradient of the output of the module that runs the op.
    """

    op: str
    source: Source
    arrives: TensorRow

    @property
    def words(self) -> str:
        """A sentence: which op makes zeros of which gradient."""
        factor = "multiplies it by zero" if self.op == "mul" else "divides it by infinity"
        return (
            f"A gradient arrives at the output of `{self.arrives.place}` (amax {self.arrives.amax or 0.0:.3g}); "
            f"{self.op}{at_line(self.source)} {factor}."
        )

    def prescription(self) -> Prescription:
        """Multiply by something else than zero."""
        left = self.arrives.zero / self.arrives.numel
        product = self.op == "mul"
        change = "multiply by a factor other than 0" if product else "divide by a finite number"
        snippet = (
            "y = x * scale  # scale is 0 here: an integer division such as 8 // 16, a closed gate, a mask of zeros\n"
            if product
            else "y = x / scale  # scale is infinite here: compute it in FP32\n"
        )
        return Prescription(
            title=f"{change}{at_line(self.source)}: zeros in the gradient behind it 100 % -> {percent(left)}, as in "
            "front of it",
            change={"factor": {"from": 0.0, "to": "not 0"}, "op": self.op, "line": self.source.place},
            predicted={"zero_share": {"from": 1.0, "to": left}},
            snippet=snippet,
        )


def find_cut(view: RunView, rows: Sequence[TensorRow], weight_gradient: TensorRow) -> GradientCut | None:
    """The product that makes the gradient of a weight zero; None if the deep scans list none.

    It is the first op in the backward pass of the innermost module around the weight at whose output a non-zero
    gradient arrives. All elements of its result are zero, in the forward pass as well.
    """
    root, module = weight_gradient.root, weight_gradient.module
    while True:
        gradients = [r for r in rows if r.kind == "grad_output" and r.layer == (root, module)]
        alive = [r for r in gradients if not r.is_zero]
        if alive:
            place = weight_gradient.process, root, module
            listed = [c.ops for c in coverage(view) if (c.process, c.root, c.module) == place]
            return _first_zeros(listed[-1], alive[0]) if listed else None
        if not module:
            return None
        module = module.rpartition(".")[0]


def _first_zeros(ops: Sequence[Mapping[str, Any]], arrives: TensorRow) -> GradientCut | None:
    backward = [op for op in ops if op.get("phase") == "backward"]
    op = next((op for op in backward if _is_zero(op)), None)
    source, name = (source_of(op), short_name(text(op.get("op")))) if op is not None else (None, "")
    if op is None or source is None or name not in ("mul", "div"):
        return None
    same_line = [o for o in ops if o.get("phase") == "forward" and _place(o) == _place(op)]
    if not all(_is_zero(o) for o in same_line):
        return None
    return GradientCut(name, source, arrives)


def _is_zero(op: Mapping[str, Any]) -> bool:
    """Whether all results of an op were zero throughout."""
    return bool(integer(op.get("numel"))) and integer(op.get("zero")) == integer(op.get("numel"))


def _place(op: Mapping[str, Any]) -> tuple[str, str, int | None]:
    return text(op.get("op")), text(op.get("file")), integer(op.get("line"))


def trains_otherwise(row: TensorRow, rows: Sequence[TensorRow]) -> bool:
    """Whether another parameter of the same layer got a gradient."""
    layer_rows = (
        r for r in rows if r.kind == "weight_grad" and (r.root, layer_of(r)[0]) == (row.root, layer_of(row)[0])
    )
    return any(not r.is_zero for r in layer_rows)


def layer_of(row: TensorRow) -> tuple[str, str]:
    """FQN of the layer that a weight belongs to, and its name in that layer; parametrizations are resolved."""
    layer, parametrized, name = f".{row.module}".partition(".parametrizations.")
    return (layer[1:], name) if parametrized else (row.module, row.name)


def gradient_stop(row: TensorRow, blocker: TensorRow | None, rows: Sequence[TensorRow]) -> tuple[str, bool]:
    """A sentence on what stops the gradient of ``row``, and whether the loss itself gives the layer none."""
    if blocker is not None:
        words = (
            f"All {blocker.numel:,} elements of {blocker.label} ({blocker.module_class}) are zero: no gradient passes."
        )
        return words, False
    gradients = [r for r in rows if r.kind == "grad_output" and r.layer == row.layer]
    if not gradients or not all(r.is_zero for r in gradients):
        return "A gradient does arrive at its output: its input, or the code between, is zero.", False
    cut = flatness_words(row, rows)
    words = "The gradient that arrives at its output is also zero"
    if cut:
        return f"{words}, and that output {cut}.", False
    if loss_is_zero(rows):
        return f"{words}: the loss itself is exactly 0.", True
    return f"{words}: the loss does not use it, or gives it the weight zero.", True


def flatness_words(row: TensorRow, rows: Sequence[TensorRow]) -> str:
    """A predicate: why the activation after the layer's output is flat; empty if the output does not show it."""
    outputs = [r for r in rows if r.kind == "output" and r.layer == row.layer]
    for output in outputs:
        if is_negative(output):
            return "is almost all negative: a ReLU behind it never fires"
        if output.amin_nonzero is not None and output.amin_nonzero >= _FLAT_FROM and not output.zero:
            return f"is nowhere below {output.amin_nonzero:.3g} in magnitude: the function behind it is saturated"
    return ""


def print_gradients(root: str, module: str, weights: int, step: int) -> Prescription:
    """Print the largest gradient at the output of each module inside ``module``; nothing is known to be zero there."""
    return Prescription(
        title=f"print the gradients inside `{module or root}` on step {step}: {plural(weights, 'weight')} "
        f"get{'s' if weights == 1 else ''} none",
        change={"module": module, "hook": "backward"},
        predicted={"prints_at_step": step},
        snippet=(
            "def print_gradient(name):\n"
            "    return lambda _, __, gradients: print(name, *(g.abs().max() for g in gradients if g is not None))\n\n"
            f"for name, module in {module_expression(module)}.named_modules():\n"
            "    module.register_full_backward_hook(print_gradient(name))\n"
        ),
    )


def print_loss(weights: int, step: int) -> Prescription:
    """Print the terms of a loss that is exactly zero."""
    return Prescription(
        title=f"print the terms of the loss on step {step}, which is exactly 0: {plural(weights, 'weight')} "
        f"get{'s' if weights == 1 else ''} no gradient",
        change={"check_loss": True, "from_step": step},
        predicted={"prints_at_step": step},
        snippet=(
            "for name, term in {'prediction': prediction, 'target': target, 'weights': weights}.items():\n"
            "    print(name, term.dtype, term.min().item(), term.max().item())  # a factor of 0, an infinite divisor\n"
        ),
    )
