"""PD510, parameters that were replaced after the optimizer was made.

The optimizer holds tensors of no model, while the model's own weights are held by none: a new head,
``load_state_dict`` with ``assign=True``, a layer that was rebuilt or parametrized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from precdoctor.diagnosis.analyses.parameters import recorded_parameters
from precdoctor.diagnosis.survey.rows import Parameter, text
from precdoctor.diagnosis.survey.view import Process, RunView

_Shape = tuple[int, ...]


def replaced_weights(view: RunView, process: Process) -> tuple[str, frozenset[Parameter], bool]:
    """Return an optimizer, and the weights that no optimizer holds and that its unused parameters are counterparts of.

    The third value says whether the counterparts have the same shapes. If none has, weights are taken whose shape
    differs from that of a counterpart in one dimension (a head for another number of classes). No weights are returned
    if the process has none such, or the log is too old to tell.
    """
    free: dict[_Shape, list[Parameter]] = {}
    for place, p in recorded_parameters(view, process):
        if p.get("requires_grad") and p.get("group") is None and p.get("shape") is not None:
            free.setdefault(tuple(p["shape"]), []).append(place)
    optimizers = view.facts(process).get("optimizers") or ()
    unused = {
        text(o.get("name")): Counter(shape for g in o.get("groups") or () for shape in _unused_shapes(g))
        for o in optimizers
    }
    for name, shapes in unused.items():
        found = frozenset(p for shape, n in shapes.items() if len(own := free.get(shape, ())) <= n for p in own)
        if found:
            return name, found, True
    for name, shapes in unused.items():
        resized = _resized(free, list(shapes.elements()))
        if resized:
            return name, resized, False
    return "", frozenset(), False


def _resized(free: Mapping[_Shape, Sequence[Parameter]], unused: list[_Shape]) -> frozenset[Parameter]:
    """Return the weights of modules all of whose ``free`` weights differ in at most one dimension from ``unused`` ones.

    Each unused parameter is the counterpart of one weight, and one weight of a module at least is no vector.
    """
    modules: dict[tuple[str, str], list[tuple[_Shape, Parameter]]] = {}
    for shape, places in free.items():
        for place in places:
            modules.setdefault(place[:2], []).append((shape, place))
    found: set[Parameter] = set()
    for weights in modules.values():
        left, matched = list(unused), 0
        for shape, _ in weights:
            counterpart = next((u for u in left if _alike(shape, u)), None)
            if counterpart is not None:
                left.remove(counterpart)
                matched += 1
        if matched == len(weights) and any(len(shape) > 1 for shape, _ in weights):
            found |= {place for _, place in weights}
    return frozenset(found if len(found) <= len(unused) else ())


def _alike(shape: _Shape, other: _Shape) -> bool:
    return len(shape) == len(other) and sum(a != b for a, b in zip(shape, other, strict=True)) <= 1


def _unused_shapes(group: Mapping[str, Any]) -> list[_Shape]:
    shapes = group.get("unused")
    lists = shapes if isinstance(shapes, list) else []
    return [tuple(shape) for shape in lists if isinstance(shape, list) and all(type(n) is int for n in shape)]
