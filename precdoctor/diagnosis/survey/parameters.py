"""Weights and optimizer settings from the facts of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from precdoctor.diagnosis.survey.rows import Parameter, dotted, number, text
from precdoctor.diagnosis.survey.view import RunView

#: Torch's own Adam: moments in the dtype of the weight, ``eps`` outside the root.
ADAM = ("Adam", "AdamW")
HALF = ("bfloat16", "float16")
#: No module has a parameter with a dot in its own name.
_BARE = re.compile(r"\d+\.\d+")


def parameter_label(place: Parameter) -> str:
    """The parameter's dotted name; for one that no module owns, its group and index in its optimizer.

    Such a parameter is a bare ``nn.Parameter`` that the script made.
    """
    root, module, name = place
    if is_bare(module, name):
        group, index = name.split(".")
        return f"parameter {index} of group {group} of {root}"
    return dotted(module, name)


def is_bare(module: str, name: str) -> bool:
    """Whether no module owns the parameter of this name."""
    return not module and _BARE.fullmatch(name) is not None


def trainable(view: RunView, dtypes: Sequence[str]) -> dict[str, int]:
    """Element count by ``root.parameter`` of the weights in these dtypes that require gradients."""
    found: dict[str, int] = {}
    for process in view.processes if view.trains else ():
        for root in view.facts(process).get("roots") or ():
            for p in root.get("parameters") or ():
                if p.get("requires_grad") and text(p.get("dtype")) in dtypes:
                    name = dotted(text(p.get("module")), text(p.get("name")))
                    found[f"{text(root.get('name'))}.{name}"] = math.prod(int(n) for n in p.get("shape") or ())
    return found


def count_of(view: RunView, dtypes: Sequence[str], *, trained: bool) -> int:
    """Number of parameters in these dtypes that require gradients, or do not, on the process with most of them."""
    counts = [
        sum(
            bool(p.get("requires_grad")) == trained and text(p.get("dtype")) in dtypes
            for root in view.facts(process).get("roots") or ()
            for p in root.get("parameters") or ()
        )
        for process in view.processes
    ]
    return max(counts, default=0)


def stepped(view: RunView, dtypes: Sequence[str]) -> dict[str, int]:
    """Trainable weights in these dtypes whose own gradient an optimizer is given, with their element counts.

    Where 16-bit weights are copies of FP32 master weights, the optimizer gets the masters' gradients instead. If no
    gradient of an optimizer is on record: all weights without a master.
    """
    masters, given = (_names(view, kind) for kind in ("master_weight", "weight_grad_step"))
    weights = {name: n for name, n in trainable(view, dtypes).items() if name not in masters}
    return {name: n for name, n in weights.items() if name in given} if given else weights


def stepped_in_half(view: RunView) -> tuple[str, dict[str, int]]:
    """The 16-bit dtype with most of :func:`stepped`, and these weights."""
    weights = {dtype: stepped(view, (dtype,)) for dtype in HALF}
    return max(weights.items(), key=lambda item: sum(item[1].values()))


def _names(view: RunView, kind: str) -> set[str]:
    return {f"{root}.{dotted(module, name)}" for root, module, name in view.places(kind)}


def parameter_groups(view: RunView) -> list[Mapping[str, Any]]:
    """The parameter groups of all optimizers."""
    return [g for o in view.optimizers for g in o.get("groups") or ()]


def adam_groups(view: RunView) -> list[Mapping[str, Any]]:
    """The parameter groups of torch's own Adam and AdamW."""
    return [g for o in view.optimizers if text(o.get("class")) in ADAM for g in o.get("groups") or ()]


def beta2_of(group: Mapping[str, Any]) -> float | None:
    """The second moment's decay; None when it is not on record."""
    betas = group.get("betas")
    return number(betas[1]) if isinstance(betas, Sequence) and len(betas) == 2 and not isinstance(betas, str) else None


def states_per_parameter(view: RunView) -> int:
    """Number of optimizer tensors of the weight's size, from the optimizer's class and settings."""
    most = 0
    for optimizer in view.optimizers:
        groups = optimizer.get("groups") or ()
        if "adam" in text(optimizer.get("class")).lower():
            most = max(most, 3 if any(g.get("amsgrad") for g in groups) else 2)
        elif any(number(g.get("momentum")) for g in groups):
            most = max(most, 1)
    return most
