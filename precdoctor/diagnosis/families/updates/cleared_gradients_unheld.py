"""PD510, weights that no optimizer holds, although they are meant for training.

They were replaced after the optimizer was made: it holds tensors of no model, while the model's own weights are held by
none (a new head, ``load_state_dict`` with ``assign=True``, a layer that was rebuilt or parametrized). Or they were
frozen then, so that the optimizer did not get them, and were unfrozen later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.parameters import parameter_label, recorded_parameters
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.claims.words import named, plural
from precdoctor.diagnosis.survey.frames import firsts, groups, parameters
from precdoctor.diagnosis.survey.rows import Parameter, grouped, tensor_location, text
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView

_SNIPPET = """model = build()  # replace layers, load, convert and wrap first
optimizer = torch.optim.AdamW(model.parameters())  # then
"""
_Shape = tuple[int, ...]


def replaced_weights(view: RunView, process: Process) -> tuple[str, frozenset[Parameter], bool]:
    """Return an optimizer, and the weights that no optimizer holds and that its unused parameters are counterparts of.

    The third value says whether the counterparts have the same shapes. If none has, weights are taken whose shape
    differs from that of a counterpart in one dimension (a head for another number of classes). No weights are returned
    if the process has none such, or the log is too old to tell.
    """
    free: dict[_Shape, list[Parameter]] = grouped(
        (tuple(p["shape"]), place)
        for place, p in recorded_parameters(view, process)
        if p.get("requires_grad") and p.get("group") is None and p.get("shape") is not None
    )
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
        if resized := _resized(free, list(shapes.elements())):
            return name, resized, False
    return "", frozenset(), False


def unfrozen_weights(view: RunView, process: Process, rows: pd.DataFrame) -> frozenset[Parameter]:
    """Return the weights that were frozen at first, and that no optimizer was ever given.

    Args:
        view, process: of the run.
        rows: the rows of weights and gradients on sampled, unskipped steps.
    """
    given = set(parameters(rows[rows["kind"].isin(["weight_grad_step", "update"])]))
    known = recorded_parameters(view, process) if given else ()
    frozen = {place for place, p in known if p.get("requires_grad") is False and p.get("group") is None}
    return frozenset(frozen - given)


def _resized(free: Mapping[_Shape, Sequence[Parameter]], unused: list[_Shape]) -> frozenset[Parameter]:
    """Return the weights of modules all of whose ``free`` weights differ in at most one dimension from ``unused`` ones.

    Each unused parameter is the counterpart of one weight, and one weight of a module at least is no vector.
    """
    modules = grouped((place[:2], (shape, place)) for shape, places in free.items() for place in places)
    found: set[Parameter] = set()
    for weights in modules.values():
        left, matched = list(unused), 0
        for shape, _ in weights:
            if (counterpart := next((u for u in left if _alike(shape, u)), None)) is not None:
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


def replaced_finding(
    rule: Rule,
    process: Process,
    optimizer: str,
    replaced: frozenset[Parameter],
    same: bool,
    gradients: pd.DataFrame,
    options: Options,
) -> Finding | None:
    """Return the finding about replaced weights; None unless they get gradients on enough sampled steps.

    Args:
        rule: PD510.
        process, optimizer, replaced, same: as in :func:`replaced_weights`.
        gradients: one row per step and weight whose gradient, after the backward pass, is not all zeros, and that no
            optimizer was given.
        options: of the rule.
    """
    steps, weights = _seen(process, replaced, gradients)
    if len(steps) < options["min_steps"]:
        return None
    labels = [parameter_label(p) for p in weights]
    count = len(weights)
    shapes = "of the same shapes" if same else "whose shapes differ in one dimension"
    root, module = weights[0][0], _common_module(weights)
    return rule.finding(
        confidence=0.95 if same else 0.9,
        title=f"no optimizer holds {plural(count, 'weight')} of `{module or root}`, and `{optimizer}` holds "
        f"as many that no model has, {shapes}",
        message=f"{named(labels)} got non-zero gradients on {plural(len(steps), 'sampled step')} (limit "
        f"{options['min_steps']:g}), and no optimizer holds them. `{optimizer}` holds {count:,} others {shapes}; they "
        "belong to no model and had no gradient at its first step. Most likely the parameters were replaced after the "
        "optimizer was made; those in the model stay as they are.",
        location=tensor_location((root, module), "", "weight_grad", Phase.OPTIMIZER, process, steps[0]),
        evidence={
            "weights": labels[:16],
            "optimizer": optimizer,
            "steps": len(steps),
            "limit": options["min_steps"],
            "confidence_reason": "parameters were compared by identity when the log of the process was written",
        },
        prescription=Prescription(
            title=f"make the optimizer after the model has its final parameters: weights in no optimizer {count} -> 0",
            change={"order": {"from": "optimizer, then model", "to": "model, then optimizer"}},
            predicted={"weights_in_no_optimizer": {"from": count, "to": 0}},
            snippet=_SNIPPET,
        ),
    )


def unfrozen_finding(
    rule: Rule, process: Process, unfrozen: frozenset[Parameter], gradients: pd.DataFrame, options: Options
) -> Finding | None:
    """Return the finding about unfrozen weights in no optimizer; None unless they get gradients on enough steps."""
    steps, weights = _seen(process, unfrozen, gradients)
    if len(steps) < options["min_steps"]:
        return None
    labels, count = [parameter_label(p) for p in weights], len(weights)
    root, module = weights[0][0], _common_module(weights)
    return rule.finding(
        severity=Severity.WARNING,
        confidence=0.9,
        title=f"no optimizer holds {plural(count, 'weight')} of `{module or root}`, unfrozen by step {steps[0]:,}",
        message=f"{named(labels)} required no gradient at first. From step {steps[0]:,} on they got non-zero gradients "
        f"on {plural(len(steps), 'sampled step')} (limit {options['min_steps']:g}), and no optimizer was given them: "
        "unless the script moves these weights itself, they stay as they were. Most likely the optimizer was made of "
        "the weights that were not frozen then.",
        location=tensor_location((root, module), "", "weight_grad", Phase.OPTIMIZER, process, steps[0]),
        evidence={
            "weights": labels[:16],
            "steps": len(steps),
            "limit": options["min_steps"],
            "confidence_reason": "the gradients were recorded, and what each optimizer was given",
        },
        prescription=Prescription(
            title=f"give the weights to the optimizer as they are unfrozen: weights in no optimizer {count} -> 0",
            change={"parameter_group": {"from": None, "to": module or root}},
            predicted={"weights_in_no_optimizer": {"from": count, "to": 0}},
            snippet="optimizer.add_param_group({'params': part.parameters(), 'lr': 1e-4})  # as it is unfrozen\n",
        ),
    )


def _seen(
    process: Process, weights: frozenset[Parameter], gradients: pd.DataFrame
) -> tuple[list[int], list[Parameter]]:
    """Return the sampled steps of a process on which ``weights`` have rows among ``gradients``, and which of them."""
    rows = gradients[(gradients["rank"] == process.rank) & (gradients["attempt"] == process.attempt)]
    rows = rows.loc[np.array([place in weights for place in parameters(rows)], dtype=bool)]  # may be empty
    return sorted(set(rows["step"].tolist())), sorted(set(parameters(rows.iloc[firsts(groups(rows, IDENTITY))])))


def _common_module(weights: Sequence[Parameter]) -> str:
    """Return the innermost module that holds all of these weights of one model; empty for the model itself."""
    names = [module.split(".") for root, module, _ in weights if root == weights[0][0]]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return ".".join(parts[0] for parts in shared)
