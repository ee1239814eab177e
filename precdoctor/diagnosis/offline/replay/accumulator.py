"""Predicts the error of a narrow accumulator in the matrix products of a recorded model.

Each weight matrix is in three products, and each sums over another dimension: the forward pass over the layer's input
features, the input gradient over its output features, and the weight gradient over all rows of the batch. The last is
the longest by far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.analyses.parameters import recorded_parameters
from precdoctor.diagnosis.survey.rows import grouped, text
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.errors import NothingRecordedError
from precdoctor.numerics.accumulation import (
    FP32_ACCUMULATOR,
    AccumulationError,
    Accumulator,
    Operands,
    accumulation_error,
)

#: Classes of modules whose weights are looked up, so that no product sums over them.
_NO_PRODUCT = ("Embedding", "EmbeddingBag")


@dataclass(frozen=True)
class Product:
    """One matrix product of the model.

    Attributes:
        root, module, name: of the weight.
        role: ``forward``, ``input gradient`` or ``weight gradient``.
        length: number of terms per sum, K.
    """

    root: str
    module: str
    name: str
    role: str
    length: int


@dataclass(frozen=True)
class LengthErrors:
    """The error of all products of one length under an accumulator.

    Attributes:
        length: number of terms per sum, K.
        zero_mean, same_sign: error of the accumulator for two extremes: terms with mean zero, terms of one sign.
        fp32_zero_mean, fp32_same_sign: error of an FP32 accumulator.
        products: the model's products of this length.
    """

    length: int
    zero_mean: AccumulationError
    same_sign: AccumulationError
    fp32_zero_mean: AccumulationError
    fp32_same_sign: AccumulationError
    products: tuple[Product, ...]


@dataclass(frozen=True)
class AccumulatorReplay:
    """The prediction for a model.

    Attributes:
        lengths: one entry per length of sum in the model, the longest first.
        notes: limitations, in sentences.
    """

    accumulator: Accumulator
    lengths: tuple[LengthErrors, ...]
    notes: tuple[str, ...]


def replay_accumulator(
    view: RunView, accumulator: Accumulator, *, wanted: Callable[[str], bool] | None = None
) -> AccumulatorReplay:
    """Predict the error of every length of sum in the model.

    Lengths come from the shapes of parameters and recorded gradients. The signs of terms are not recorded, so both
    extremes are given.

    Args:
        wanted: returns whether to include a module; default: all.

    Raises:
        NothingRecordedError: the log names no such weight matrix.
    """
    found = [p for p in _products(view) if wanted is None or wanted(p.module)]
    if not found:
        raise NothingRecordedError(
            f"{view.run.origin} names no weight matrix that was asked for; nothing is accumulated"
        )
    by_length = grouped((product.length, product) for product in found)
    lengths = [_errors(k, products, accumulator) for k, products in sorted(by_length.items(), reverse=True)]
    note = "No gradient was recorded: the sums of weight gradients, the longest there are, are not known."
    notes = () if any(p.role == "weight gradient" for p in found) else (note,)
    return AccumulatorReplay(accumulator, tuple(lengths), notes)


def _errors(length: int, products: Sequence[Product], accumulator: Accumulator) -> LengthErrors:
    zero, same = Operands.ZERO_MEAN, Operands.SAME_SIGN
    return LengthErrors(
        length,
        accumulation_error(length, zero, accumulator),
        accumulation_error(length, same, accumulator),
        accumulation_error(length, zero, FP32_ACCUMULATOR),
        accumulation_error(length, same, FP32_ACCUMULATOR),
        tuple(products),
    )


def _products(view: RunView) -> Iterator[Product]:
    """Yield the products of every weight matrix, tied ones included, of the first process with facts."""
    process = next((p for p in view.processes if view.facts(p)), None)
    if process is None:
        return
    gradients = _gradient_shapes(view, process)
    for (root, *own), parameter in recorded_parameters(view, process):
        tied = [text(name).rpartition(".")[::2] for name in parameter.get("tied") or ()]
        for module, name in (own, *tied):
            if "weight" in name and view.module_classes.get((root, module), "") not in _NO_PRODUCT:
                lengths = _lengths(tuple(parameter.get("shape") or ()), gradients.get((root, module)))
                yield from (Product(root, module, name, role, k) for role, k in lengths.items() if k >= 1)


def _lengths(shape: tuple[int, ...], gradient: tuple[int, ...] | None) -> dict[str, int]:
    """Return the number of terms of a parameter's products by role; none if it is no matrix.

    ``gradient``: shape of the output gradient; None if unknown.
    """
    if len(shape) < 2:
        return {}
    kernel = math.prod(shape[2:])
    lengths = {"forward": shape[1] * kernel, "input gradient": shape[0] * kernel}
    if gradient is not None and len(gradient) >= 2:
        # channels are the last dimension, in convolutions the second
        lengths["weight gradient"] = math.prod(gradient) // gradient[1 if len(shape) > 2 else -1]
    return {role: int(k) for role, k in lengths.items()}


def _gradient_shapes(view: RunView, process: Process) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the shape of each module's output gradient, from the first of eight kept steps that has any."""
    for step in view.kept_steps[:8]:
        found = {(r.root, r.module): r.shape for r in view.rows(process, step) if r.kind == "grad_output" and r.shape}
        if found:
            return {place: shape for place, shape in found.items() if all(n > 0 for n in shape)}
    return {}
