"""In which order tensors are shown, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from precdoctor.diagnosis.rows import FORWARD_KINDS
from precdoctor.diagnosis.view import RunView
from precdoctor.reporting.html.survey import Survey, TensorId
from precdoctor.reporting.text import clean
from precdoctor.runlog.schema import KINDS

#: Kinds as the page calls them.
KIND_TITLES = {
    "batch": "batch",
    "input": "inputs made between modules",
    "output": "activations",
    "grad_output": "activation gradients",
    "weight": "weights",
    "weight_grad": "weight gradients",
    "weight_grad_step": "gradients given to the optimizer",
    "update": "weight updates",
    "buffer": "buffers",
    "opt_state": "optimizer state",
    "master_weight": "master weights",
    "loss": "loss",
    "fp8_operand": "FP8 operands",
}
#: In the order of the page: what people look at first, first.
KIND_ORDER = (
    *("output", "grad_output", "weight_grad", "weight", "weight_grad_step", "update", "input", "batch", "loss"),
    *("opt_state", "master_weight", "buffer", "fp8_operand"),
)
#: Kinds whose values carry the loss scale.
SCALED_KINDS = ("grad_output", "weight_grad", "loss")
#: Longest label on the page; the middle of a longer one is left out, its full form is in the tooltip and the table.
LABEL = 44

assert set(KIND_ORDER) == set(KINDS) == set(KIND_TITLES)


def depth(view: RunView, survey: Survey) -> Mapping[tuple[str, str], float]:
    """Where each layer stands: in order of execution; one that was not executed under hooks stays near its neighbour.

    Gradients are shown in the order of the forward pass, so that a layer stands in the same place everywhere.
    """
    seen: dict[tuple[str, str], float] = {}
    for at, tensor in enumerate(survey.tensors):
        order = survey.order(at)
        if tensor.kind in FORWARD_KINDS and order is not None:
            seen[tensor.layer] = min(seen.get(tensor.layer, order), float(order))
    places, last = dict(seen), -1.0
    for layer in view.module_classes:
        if layer in seen:
            last = seen[layer]
        else:
            last += 1e-6
            places.setdefault(layer, last)
    end = max(places.values(), default=0.0)
    for at, tensor in enumerate(survey.tensors):
        places.setdefault(tensor.layer, end + 1.0 + at)
    return places


def in_order(view: RunView, survey: Survey, kinds: Sequence[str] | None = None) -> list[int]:
    """The tensors by kind, then by depth."""
    places = depth(view, survey)
    rank = {kind: at for at, kind in enumerate(KIND_ORDER)}
    chosen = [t for t in range(len(survey.tensors)) if kinds is None or survey.tensors[t].kind in kinds]

    def place(at: int) -> tuple[float, float, str, int]:
        tensor = survey.tensors[at]
        return (rank.get(tensor.kind, len(rank)), places[tensor.layer], tensor.name, tensor.call)

    return sorted(chosen, key=place)


def has_several_roots(tensors: Sequence[TensorId]) -> bool:
    """Whether labels must say which model a module is in."""
    return len({t.root for t in tensors if t.module}) > 1


def label(tensor: TensorId, *, several_roots: bool = False) -> str:
    """``blocks.3.proj.weight`` for what a module owns, ``blocks.3.proj [0]`` for a leaf of what goes through it.

    A module called several times in a step has ``#2`` and so on behind it; a model is named where there are several.
    """
    owned = tensor.kind not in (*FORWARD_KINDS, "grad_output", "loss")
    module = tensor.module or tensor.root or "loss"
    if several_roots and tensor.module:
        module = f"{tensor.root} {module}"
    if tensor.name:
        module += f".{tensor.name}" if owned else f" [{tensor.name}]"
    return clean(f"{module} #{tensor.call + 1}" if tensor.call else module, 400)


def short(text: str, limit: int = LABEL) -> str:
    """At most ``limit`` characters, the middle left out: both ends of a module's name tell it apart."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) * 2 // 3
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"
