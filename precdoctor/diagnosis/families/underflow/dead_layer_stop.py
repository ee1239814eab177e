"""PD203, what stops the gradient of a dead layer.

A zero output behind the layer, a flat function, the loss itself, or a multiplication by zero that the deep scans list.

A layer with an input of zeros is dead, but healthy itself. The recorded inputs and outputs lead back from it to the
origin of the zeros: the last module with non-zero outputs, of which the function behind it lets none pass. In most
cases they are all negative, and a ReLU follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.analyses.op_dtypes import coverage
from precdoctor.diagnosis.analyses.scans import short_name
from precdoctor.diagnosis.claims.finding import Prescription, Source, at_line
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import named, percent, plural
from precdoctor.diagnosis.families.underflow.dead_layer_flushed import loss_is_zero
from precdoctor.diagnosis.survey.rows import Parameter, TensorRow, integer, source_of, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.tail import magnitude

#: An output is almost all negative if its sum is below minus this share of its magnitude. Chosen empirically.
_NEGATIVE = 0.75
#: Ops that are zero for all negative numbers.
_ACTIVATIONS = frozenset({"relu", "relu_", "threshold", "threshold_", "clamp", "clamp_", "clamp_min", "clamp_min_"})
#: Magnitude from which tanh is 1 in FP32; a sigmoid is from 17 on.
_FLAT_FROM = 9.0


# -- where zeros begin ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroOrigin:
    """A module with non-zero outputs, and the zeros that the function behind it makes of them.

    Attributes:
        output: the module's output.
        zeros: the next tensor, zero throughout: the output of an activation module, or another layer's input.
        also: the outputs of other modules of the step that are all negative and pass nothing on, in execution order.
    """

    output: TensorRow
    zeros: TensorRow
    also: Sequence[TensorRow]

    @property
    def modules(self) -> list[str]:
        """The FQNs of the module and of the others like it."""
        return [self.output.module, *(r.module for r in self.also)]

    @property
    def headline(self) -> str:
        """A short clause for the title."""
        place, function = f"output of `{self.output.place}`", f"the {self._function} behind it"
        if self._all_negative:
            return f"every {place} is negative, and {function} passes none"
        return f"no {place} passes {function}"

    def words(self, view: RunView) -> str:
        """Sentences: what the outputs are, what follows, and which modules are alike."""
        output, zeros = self.output, self.zeros
        function = f"the {self._function} behind it{at_line(_line(view, zeros))}"
        if self._activation:
            function = f"`{zeros.place}` ({self._activation}) behind it"
        if self._all_negative:
            words = f"Every output of `{output.place}` is negative (largest {-(output.amin_nonzero or 0.0):.3g}), "
            words += f"and {function} passes none"
        else:
            words = f"None of the {output.numel:,} outputs of `{output.place}` (amax {output.amax or 0.0:.3g}) passes "
            words += function
        if zeros.kind == "input":
            words += f": the input of `{zeros.place}` is zero"
        return f"{words}." + (f" The same holds for {named([r.place for r in self.also])}." if self.also else "")

    def let_through(self, elements: int) -> Prescription:
        """Pass on outputs that something else than their sign makes zero; ``elements`` of weights get no gradient."""
        module = self.output.module
        return Prescription(
            title=f"pass the output of `{module or self.output.root}` on: dead elements {elements:,} -> 0",
            change={"module": module, "output": {"from": "zeros", "to": "passed on"}},
            predicted={"dead_elements": {"from": elements, "to": 0}},
            snippet=(
                f"y = {module_expression(module)}(x)\n"
                "# what follows makes all of y zero: a gate or mask of zeros, a dropout of 1, or a cast that flushes\n"
            ),
        )

    @property
    def _all_negative(self) -> bool:
        return is_negative(self.output) and not self.output.zero

    @property
    def _activation(self) -> str:
        """The class of the module whose output the zeros are; empty for an input and the output of a container."""
        zeros = self.zeros
        inside = not zeros.module or self.output.module.startswith(f"{zeros.module}.")
        return zeros.module_class if zeros.kind == "output" and not inside else ""

    @property
    def _function(self) -> str:
        return self._activation or ("ReLU" if is_negative(self.output) else "function")


def is_negative(row: TensorRow) -> bool:
    """Whether nearly all of the magnitude of a tensor is in negative elements."""
    if row.sum is None or row.sum >= 0.0:
        return False
    equal = math.sqrt(row.numel * (row.sum_sq or 0.0))  # the sum of the magnitudes, if all are nearly equal
    return -row.sum >= _NEGATIVE * min(magnitude(row.histogram), equal) > 0.0


def training_forward(rows: Sequence[TensorRow]) -> list[TensorRow]:
    """The inputs and outputs of the modules in a step's forward pass with gradients, in execution order."""
    return [r for r in rows if r.kind in ("input", "output") and r.phase == "train" and r.order is not None]


def find_zero_origin(rows: Sequence[TensorRow], layer: TensorRow) -> ZeroOrigin | None:
    """The module that made the input of ``layer`` zero; of a zero output with another input, the module before it.

    Args:
        rows: all tensors of one step, in execution order.
        layer: an output or a weight gradient of the layer.

    Returns:
        None if the layer gets non-zero inputs, or the log does not show where they become zero.
    """
    forward = training_forward(rows)
    gradients: dict[tuple[str, str, int], bool] = {}
    for r in rows:
        if r.kind == "grad_output":
            call = (r.root, r.module, r.call)
            gradients[call] = gradients.get(call, True) and r.is_zero
    pairs = _pairs(forward, gradients)
    found, place, before = None, layer.layer, math.inf
    while inputs := [r for r in forward if r.kind == "input" and r.layer == place and r.position < before]:
        pair = pairs.get(inputs[0].position)
        if pair is None or any(not r.is_zero for r in inputs):
            break
        found, place, before = pair, (pair[0].root, pair[0].module), pair[0].position
    if found is None and layer.kind == "output" and layer.position in pairs:
        output = pairs[layer.position][0]
        previous = max((r for r in forward if r.position < layer.position), key=lambda r: r.position)
        found = pairs[layer.position] if output is previous and is_negative(output) else None
    if found is None:
        return None
    others = {output.key: output for output, _ in pairs.values() if is_negative(output) and output.root == layer.root}
    return ZeroOrigin(*found, [r for r in others.values() if r.module != found[0].module])


def _pairs(
    forward: Sequence[TensorRow], gradients: Mapping[tuple[str, str, int], bool]
) -> dict[float, tuple[TensorRow, TensorRow]]:
    """By the position of a tensor of zeros: the output that they were made of, and the zeros.

    The output has as many elements, or a multiple of them, and no gradient. It is almost all negative, or the zeros
    follow it immediately.

    Args:
        forward: inputs and outputs in execution order.
        gradients: whether the gradient of a module's output is zero; by root, module and call.
    """
    pairs = {}
    for i, zeros in enumerate(forward):
        if not zeros.is_zero:
            continue
        for k in range(i - 1, -1, -1):
            output = forward[k]
            gradient_is_zero = gradients.get((output.root, output.module, output.call))
            if output.kind != "output" or output.is_zero or output.numel % zeros.numel:
                continue
            adjacent = k == i - 1 and output.numel == zeros.numel and gradient_is_zero
            if gradient_is_zero is not False and (adjacent or is_negative(output)):
                pairs[zeros.position] = output, zeros
                break
    return pairs


def _line(view: RunView, zeros: TensorRow) -> Source | None:
    """The line of the activation that made these zeros, from the ops of the deep scans; None if they show none."""
    around = [c for c in coverage(view) if c.root == zeros.root and f".{zeros.module}".startswith(f".{c.module}")]
    for op in (op for listed in around for op in listed.ops):
        line, all_zero = integer(op.get("line")), _is_zero(op) and integer(op.get("numel")) == zeros.numel
        if all_zero and line and op.get("phase") == "forward" and short_name(text(op.get("op"))) in _ACTIVATIONS:
            return Source.read(text(op.get("file")), line, "")
    return None


def revive(modules: Sequence[str], root: str, elements: int) -> Prescription:
    """Initialise these modules of ``root`` again; ``elements`` of the weights get no gradient."""
    layers = ", ".join(module_expression(m) for m in modules)
    head = f"for layer in ({layers}):\n    " if len(modules) > 1 else f"layer = {layers}\n"
    return Prescription(
        title=f"initialise {named([m or root for m in modules])} again: dead elements {elements:,} -> 0",
        change={"module": modules[0], "initialise": True},
        predicted={"dead_elements": {"from": elements, "to": 0}},
        snippet=(
            "import torch\n\n"
            f"{head}layer.reset_parameters()  # weights and bias, so that the activation behind it fires\n"
        ),
    )


def whole_model(root: str, dead: Collection[Parameter], every: Collection[Parameter]) -> str:
    """Return ``root`` if no weight matrix of its several layers gets a gradient, else an empty string."""
    layers = {module for name, module, _ in every if name == root}
    alive = [p for p in every if p[0] == root and p not in dead]
    return root if len(layers) > 1 and not alive else ""


def negative_words(rows: Sequence[TensorRow], root: str) -> str:
    """Return a sentence on outputs of weighted layers that a ReLU in code outside of modules would make zero."""
    weighted = {r.module for r in rows if r.kind == "weight_grad" and r.root == root}
    outputs = [r for r in rows if r.kind == "output" and r.root == root and r.module in weighted]
    negative = [r.module or r.root for r in outputs if is_negative(r) and not r.zero]
    return f" Every output of {named(negative)} is negative: a ReLU behind it would pass none." if negative else ""


# -- which op or loss stops the gradient ------------------------------------------------------------------------------


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
