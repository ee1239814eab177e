"""Names, dtypes and sizes of weights, and optimizer settings, from the ``rank.json`` of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from precdoctor.diagnosis.survey.rows import Parameter, dotted, number, text
from precdoctor.diagnosis.survey.view import Process, RunView

#: Torch's own Adam: moments in the dtype of the weight, ``eps`` outside the root.
ADAM = ("Adam", "AdamW")
#: Those of other libraries as well: fused, paged, on the host, or with state in few bits (apex, bitsandbytes, torchao).
_ANY_ADAM = re.compile(r"(Fused|Paged|DeepSpeedCPU)?AdamW?((4|8|32)bit|Fp8)?")
HALF = ("bfloat16", "float16")
#: Group and index of a parameter without a module. Parameters of modules cannot have a dot in their own name.
_BARE = re.compile(r"\d+\.\d+")


def parameter_label(place: Parameter) -> str:
    """Return the parameter's dotted name.

    A bare ``nn.Parameter`` of the script, which no module owns, is named by group and index in its optimizer.
    """
    root, module, name = place
    if is_bare(module, name):
        group, index = name.split(".")
        return f"parameter {index} of group {group} of {root}"
    return dotted(module, name)


def worst_parameters(name: str, values: Mapping[Parameter, float]) -> list[dict[str, Any]]:
    """Return the 16 parameters with the largest values for the evidence; ``name``: the key of the value."""
    ordered = sorted(values.items(), key=lambda item: -item[1])[:16]
    return [{"parameter": parameter_label(p), name: value} for p, value in ordered]


def is_bare(module: str, name: str) -> bool:
    """Return whether the parameter of this name has no module."""
    return not module and _BARE.fullmatch(name) is not None


def modules_around(place: Parameter) -> list[tuple[str, str]]:
    """Return root and FQN of the modules that hold a weight, outermost first, without the root itself."""
    parts = place[1].split(".") if place[1] else []
    return [(place[0], ".".join(parts[: n + 1])) for n in range(len(parts))]


def module_of_only(place: Parameter, weights: Collection[Parameter], known: Iterable[Parameter]) -> tuple[str, str]:
    """Return root and FQN of the largest module around a weight that holds none of ``known`` but ``weights``.

    If its own module holds others, it is that module.
    """
    mine = set(weights)
    others = {module for p in known if p not in mine for module in [(p[0], ""), *modules_around(p)]}
    candidates = [(place[0], ""), *modules_around(place)]
    return next((module for module in candidates if module not in others), candidates[-1])


def recorded_parameters(view: RunView, process: Process) -> Iterator[tuple[Parameter, Mapping[str, Any]]]:
    """Yield the parameters of a process's models, each with its entry in ``rank.json``."""
    for root in view.facts(process).get("roots") or ():
        for p in root.get("parameters") or ():
            yield (text(root.get("name")), text(p.get("module")), text(p.get("name"))), p


def module_of_optimizer(
    view: RunView, process: Process, optimizer: str, group: int | None = None
) -> tuple[str | None, str]:
    """Return root and FQN of the largest module that holds only weights of an optimizer, or of one of its groups.

    ``(None, "")`` if it holds all weights of the process, or none of a model.
    """
    names = [text(o.get("name")) for o in view.facts(process).get("optimizers") or ()]
    known = [(place, list(p.get("group") or ())) for place, p in recorded_parameters(view, process)]
    wanted = [names.index(optimizer), group] if optimizer in names else []
    mine = [place for place, own in known if own[:1] == wanted[:1] and own and group in (None, *own[1:])]
    if not wanted or not mine or len(mine) == len(known):
        return None, ""
    return module_of_only(mine[0], mine, [place for place, _ in known])


def trainable(view: RunView, dtypes: Sequence[str]) -> dict[str, int]:
    """Return ``{root.parameter: elements}`` of the weights in these dtypes that require gradients."""
    found: dict[str, int] = {}
    for process in view.processes if view.trains else ():
        for (root, module, name), p in recorded_parameters(view, process):
            if p.get("requires_grad") and text(p.get("dtype")) in dtypes:
                found[f"{root}.{dotted(module, name)}"] = math.prod(int(n) for n in p.get("shape") or ())
    return found


def count_of(view: RunView, dtypes: Sequence[str], *, trained: bool) -> int:
    """Count the parameters in these dtypes that require gradients (``trained``) or do not; the most of any process."""
    counts = [
        sum(
            bool(p.get("requires_grad")) == trained and text(p.get("dtype")) in dtypes
            for _, p in recorded_parameters(view, process)
        )
        for process in view.processes
    ]
    return max(counts, default=0)


def stepped(view: RunView, dtypes: Sequence[str]) -> dict[str, int]:
    """Return ``{root.parameter: elements}`` of the weights in these dtypes that an optimizer updates directly.

    16-bit copies of FP32 master weights are left out: the optimizer updates the masters. Without any recorded
    ``weight_grad_step``, all trainable weights without a master are taken.
    """
    masters, given = (_names(view, kind) for kind in ("master_weight", "weight_grad_step"))
    weights = {name: n for name, n in trainable(view, dtypes).items() if name not in masters}
    return {name: n for name, n in weights.items() if name in given} if given else weights


def stepped_in_half(view: RunView) -> tuple[str, dict[str, int]]:
    """Return the 16-bit dtype with the most elements of :func:`stepped`, and its weights."""
    weights = {dtype: stepped(view, (dtype,)) for dtype in HALF}
    return max(weights.items(), key=lambda item: sum(item[1].values()))


def _names(view: RunView, kind: str) -> set[str]:
    return {f"{root}.{dotted(module, name)}" for root, module, name in view.places(kind)}


def is_adam(kind: str) -> bool:
    """Return whether an optimizer of class ``kind`` is Adam or AdamW, of torch or another library."""
    return _ANY_ADAM.fullmatch(kind) is not None


def parameter_groups(view: RunView, of: Callable[[str], bool] = lambda _: True) -> list[Mapping[str, Any]]:
    """Return the parameter groups of all optimizers, or of those with a class name that ``of`` accepts."""
    return [g for o in view.optimizers if of(text(o.get("class"))) for g in o.get("groups") or ()]


def groups_of_parameters(view: RunView) -> dict[Parameter, tuple[str, Mapping[str, Any]]]:
    """Return the class of the optimizer that holds each parameter, and its parameter group.

    Parameters that no optimizer holds are left out, and all of logs from before this was recorded.
    """
    found: dict[Parameter, tuple[str, Mapping[str, Any]]] = {}
    for process in view.processes:
        optimizers = view.facts(process).get("optimizers") or ()
        for place, p in recorded_parameters(view, process):
            indices = list(p.get("group") or [])
            if len(indices) != 2 or not 0 <= indices[0] < len(optimizers):  # in no optimizer, or damaged
                continue
            optimizer = optimizers[indices[0]]
            if 0 <= indices[1] < len(groups := optimizer.get("groups") or ()):
                found.setdefault(place, (text(optimizer.get("class")), groups[indices[1]]))
    return found


def beta2_of(group: Mapping[str, Any]) -> float | None:
    """Return beta2, the decay of the second moment; None if it is not recorded."""
    betas = group.get("betas")
    return number(betas[1]) if isinstance(betas, Sequence) and len(betas) == 2 and not isinstance(betas, str) else None


def states_per_parameter(view: RunView) -> int:
    """Return how many state tensors of the weight's size an optimizer keeps per weight; the most of any optimizer."""
    most = 0
    for optimizer in view.optimizers:
        groups = optimizer.get("groups") or ()
        if "adam" in text(optimizer.get("class")).lower():
            most = max(most, 3 if any(g.get("amsgrad") for g in groups) else 2)
        elif any(number(g.get("momentum")) for g in groups):
            most = max(most, 1)
    return most
