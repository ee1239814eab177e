"""What a narrow accumulator would do to the matrix products of a recorded model.

Each weight matrix makes three products, and each sums over another dimension: the forward pass over the inputs of a
layer, the gradient of its input over its outputs, and the gradient of its weight over all rows of the batch. The last
is the longest by far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.errors import NothingRecordedError
from precdoctor.numerics.accumulation import (
    FP32_ACCUMULATOR,
    AccumulationError,
    Accumulator,
    Operands,
    accumulation_error,
)

#: Layers whose weights are looked up or multiplied element by element, never contracted.
_NO_PRODUCT = ("Embedding", "EmbeddingBag")


@dataclass(frozen=True)
class Product:
    """One matrix product of the model.

    Attributes:
        root, module, name: of the weight.
        role: ``forward``, ``input gradient`` or ``weight gradient``.
        length: products per sum, K.
    """

    root: str
    module: str
    name: str
    role: str
    length: int


@dataclass(frozen=True)
class LengthErrors:
    """All products of one length under an accumulator.

    Attributes:
        length: products per sum, K.
        zero_mean, same_sign: the error of the accumulator at the two extremes of what operands can be.
        fp32_zero_mean, fp32_same_sign: that of FP32.
        products: the ones there are.
    """

    length: int
    zero_mean: AccumulationError
    same_sign: AccumulationError
    fp32_zero_mean: AccumulationError
    fp32_same_sign: AccumulationError
    products: tuple[Product, ...]


@dataclass(frozen=True)
class AccumulatorReplay:
    """The answer: the longest sums first.

    Attributes:
        accumulator: the unit.
        lengths: one entry per length of sum in the model.
        notes: what limits the answer, in sentences.
    """

    accumulator: Accumulator
    lengths: tuple[LengthErrors, ...]
    notes: tuple[str, ...]


def replay_accumulator(
    view: RunView, accumulator: Accumulator, *, wanted: Callable[[str], bool] | None = None
) -> AccumulatorReplay:
    """Predicts the error of every length of sum in the model.

    Lengths come from parameter shapes and from the shapes of recorded gradients; how much of the operands has one sign
    is not recorded, so both extremes are given.

    Raises:
        NothingRecordedError: the log names no weight matrix.
    """
    found = [p for p in _products(view) if wanted is None or wanted(p.module)]
    if not found:
        raise NothingRecordedError(
            f"{view.run.origin} names no weight matrix that was asked for; nothing is accumulated"
        )
    by_length: dict[int, list[Product]] = {}
    for product in found:
        by_length.setdefault(product.length, []).append(product)
    lengths = [_errors(k, products, accumulator) for k, products in sorted(by_length.items(), reverse=True)]
    notes = []
    if not any(p.role == "weight gradient" for p in found):
        notes.append("No gradient was recorded: the sums of weight gradients, the longest there are, are not known.")
    return AccumulatorReplay(accumulator, tuple(lengths), tuple(notes))


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
    process = next((p for p in view.processes if view.facts(p)), None)
    if process is None:
        return
    rows = _batch_rows(view, process)
    for root in view.facts(process).get("roots") or ():
        name = text(root.get("name"))
        for parameter in root.get("parameters") or ():
            yield from _products_of(name, parameter, view.module_classes, rows)
            for tied in parameter.get("tied") or ():
                module, _, own = text(tied).rpartition(".")
                yield from _products_of(name, {**parameter, "module": module, "name": own}, view.module_classes, rows)


def _products_of(
    root: str,
    parameter: Mapping[str, Any],
    classes: Mapping[tuple[str, str], str],
    rows: Mapping[tuple[str, str], tuple[int, ...]],
) -> Iterator[Product]:
    module, name = text(parameter.get("module")), text(parameter.get("name"))
    shape: tuple[int, ...] = tuple(parameter.get("shape") or ())
    if len(shape) < 2 or "weight" not in name or classes.get((root, module), "") in _NO_PRODUCT:
        return
    kernel = math.prod(shape[2:])
    lengths = {"forward": shape[1] * kernel, "input gradient": shape[0] * kernel}
    gradient = rows.get((root, module))
    if gradient is not None and len(gradient) >= 2:
        # channels are last, but for convolutions, where they are second
        lengths["weight gradient"] = math.prod(gradient) // gradient[1 if len(shape) > 2 else -1]
    yield from (Product(root, module, name, role, int(k)) for role, k in lengths.items() if k >= 1)


def _batch_rows(view: RunView, process: Process) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shapes of the gradients with respect to each module's output, on the first step that has them."""
    for step in view.kept_steps[:8]:
        found = {(r.root, r.module): r.shape for r in view.rows(process, step) if r.kind == "grad_output" and r.shape}
        if found:
            return {place: shape for place, shape in found.items() if all(n > 0 for n in shape)}
    return {}
