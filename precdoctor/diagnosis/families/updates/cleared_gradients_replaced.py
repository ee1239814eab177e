"""Part of PD510: an optimizer that holds tensors of no model, while the model's own weights are held by none.

The usual cause is a parameter that was replaced after the optimizer was made: a new head, ``load_state_dict`` with
``assign=True``, a layer that was rebuilt or parametrized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.claims.words import named, plural
from precdoctor.diagnosis.survey.frames import firsts, groups, parameters
from precdoctor.diagnosis.survey.parameters import parameter_label
from precdoctor.diagnosis.survey.rows import Parameter, tensor_location, text
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView

_SNIPPET = """model = build()  # replace layers, load, convert and wrap first
optimizer = torch.optim.AdamW(model.parameters())  # then
"""


@dataclass(frozen=True)
class ReplacedWeights:
    """The weights of a process that no optimizer holds, and whose shapes an optimizer's unused parameters have."""

    process: Process
    optimizer: str
    weights: frozenset[Parameter]


def replaced_weights(view: RunView, process: Process) -> ReplacedWeights | None:
    """Return the process's weights of this kind; None if there are none, or the log is too old to tell."""
    facts = view.facts(process)
    free: dict[tuple[int, ...], list[Parameter]] = {}
    for root in facts.get("roots") or ():
        for p in root.get("parameters") or ():
            if p.get("requires_grad") and p.get("group") is None and p.get("shape") is not None:
                place = text(root.get("name")), text(p.get("module")), text(p.get("name"))
                free.setdefault(tuple(p["shape"]), []).append(place)
    for optimizer in facts.get("optimizers") or ():
        unused = Counter(shape for g in optimizer.get("groups") or () for shape in _unused_shapes(g))
        found = frozenset(p for shape, n in unused.items() if len(own := free.get(shape, ())) <= n for p in own)
        if found:
            return ReplacedWeights(process, text(optimizer.get("name")), found)
    return None


def _unused_shapes(group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    shapes = group.get("unused")
    lists = shapes if isinstance(shapes, list) else []
    return [tuple(shape) for shape in lists if isinstance(shape, list) and all(type(n) is int for n in shape)]


def replaced_finding(
    rule: Rule, replaced: ReplacedWeights, gradients: pd.DataFrame, options: Options
) -> Finding | None:
    """Return the finding about such weights; None unless they get gradients on enough sampled steps.

    Args:
        rule: PD510.
        replaced: of one process.
        gradients: one row per step and weight whose gradient, after the backward pass, is not all zeros.
        options: of the rule.
    """
    rows = gradients[(gradients["rank"] == replaced.process.rank) & (gradients["attempt"] == replaced.process.attempt)]
    rows = rows[[place in replaced.weights for place in parameters(rows)]]
    steps = sorted(set(rows["step"].tolist()))
    if len(steps) < options["min_steps"]:
        return None
    first = rows.iloc[firsts(groups(rows, IDENTITY))]
    weights = sorted(set(parameters(first)))
    labels = [parameter_label(p) for p in weights]
    count = len(weights)
    root = weights[0][0]
    modules = {module for _, module, _ in weights}
    module = modules.pop() if len(modules) == 1 else ""  # else the whole model is the place
    return rule.finding(
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"no optimizer holds {plural(count, 'weight')} of `{module or root}`, and `{replaced.optimizer}` holds "
        "as many of the same shapes that no model has",
        message=(
            f"{named(labels)} got non-zero gradients on {plural(len(steps), 'sampled step')} (limit "
            f"{options['min_steps']:g}), and no optimizer holds them. `{replaced.optimizer}` holds {count:,} of the "
            "same shapes that belong to no model and had no gradient at its first step. Most likely the parameters "
            "were replaced after the optimizer was made; those in the model stay as they are."
        ),
        location=tensor_location((root, module), "", "weight_grad", Phase.OPTIMIZER, replaced.process, steps[0]),
        evidence={
            "weights": labels[:16],
            "optimizer": replaced.optimizer,
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
