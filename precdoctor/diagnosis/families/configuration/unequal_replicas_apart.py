"""PD710, ranks that train apart: the same model on several ranks, equal at first, and nothing that keeps it equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow.compute as pc

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.configuration.unequal_replicas_copies import Copies, Difference, steps_apart
from precdoctor.diagnosis.survey.replicas import COLUMNS, Replicas, replica_differences
from precdoctor.diagnosis.survey.view import Process, RunView

#: Number of steps on which the ranks must differ. Chosen empirically: ranks that average weights do it more often.
_APART = 16
#: What makes a parameter's copies equal (``by``) if no wrapper does: they have one name.
_BY_NAME = "name"
_WRAPPED = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model)  # averages the gradients over the ranks in every backward pass
"""


def trained_apart(rule: Rule, view: RunView) -> Finding | None:
    """Return the finding about ranks that hold equal trained matrices at first, and never again; None otherwise.

    None also if a layout is known, if the ranks hold other parameters or learning rates, if their gradients are not
    known to differ, or if a matrix stays, or becomes again, equal: then something is reduced.
    """
    facts = {p: view.facts(p) for p in view.everyone}
    if not _same_model(facts):
        return None
    replicas = Replicas({p: _as_replicas(document) for p, document in facts.items()})
    summary = replica_differences(view.batches(COLUMNS, ("weight",), everyone=True), replicas)
    matrices = [
        r
        for r in summary.filter(pc.greater(summary["steps"], _APART)).to_pylist()
        if replicas.weights[r["weight"]].trained and replicas.weights[r["weight"]].is_matrix
    ]
    held = sum(w.trained and w.is_matrix for w in replicas.weights)
    if not matrices or len(matrices) < held or not all(map(_parted_for_good, matrices)):
        return None
    first = min(matrices, key=lambda r: (r["differs_from"], r["order"] is None, r["order"] or 0))
    difference = Difference.of(first, replicas)
    if not _same_rates(view, difference) or steps_apart(view, difference) is not None:
        return None
    copies = Copies.of(view, difference)
    if copies.gradients_differ is not True:
        return None
    return _finding(rule, difference, len(matrices), copies.module_class)


def _same_model(facts: Mapping[Process, Mapping[str, Any]]) -> bool:
    """Return whether all ranks of a group hold the same parameters, and nothing shards or replicates them."""
    layouts = [document.get("layout") or {} for document in facts.values()]
    known = any(v for x in layouts for k, v in x.items() if k in ("placements", "dimensions", "stages", "failed"))
    if known or not all((x.get("ranks") or 0) > 1 for x in layouts):
        return False
    return (
        len({repr([(r.get("name"), r.get("parameters")) for r in d.get("roots") or ()]) for d in facts.values()}) == 1
    )


def _as_replicas(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the same rank.json as if a wrapper kept every parameter equal on all ranks."""
    layout = document["layout"]
    placed = [{"by": _BY_NAME, "first": 0, "replicas": layout["ranks"]}]
    roots = [
        {**root, "parameters": [{**p, "placement": 0} for p in root.get("parameters") or ()]}
        for root in document.get("roots") or ()
    ]
    return {**document, "layout": {**layout, "placements": placed}, "roots": roots}


def _parted_for_good(found: Mapping[str, Any]) -> bool:
    """Return whether copies were equal on the first steps, and on none after they first differed."""
    equal, since = found["equal_again"], found["differs_from"]
    return since is not None and equal is not None and equal < since and found["different"] >= _APART


def _same_rates(view: RunView, difference: Difference) -> bool:
    """Return whether the ranks have one learning rate; otherwise each is a trial of its own."""
    steps = (view.step_facts(p, difference.equal or 0) for p in difference.holders)
    return len({facts.lr for facts in steps if facts is not None}) == 1


def _finding(rule: Rule, first: Difference, matrices: int, module_class: str | None) -> Finding:
    ranks = first.weight.replicas
    return rule.finding(
        severity=Severity.WARNING,
        confidence=0.7,
        title=f"{plural(ranks, 'rank')} train apart from step {first.since} on: no gradient is reduced",
        message=(
            f"The {plural(matrices, 'trained weight matrix')} are equal on {plural(ranks, 'rank')} of one process "
            f"group up to step {first.equal}, and differ on {plural(first.steps, 'recorded step')} from then on, all "
            f"there are. On step {first.equal} the optimizers got different gradients. No wrapper "
            "(DistributedDataParallel, FSDP) holds the model, so each rank trains its own. If that is intended, record "
            "one rank (`--ranks 0`)."
        ),
        location=Location(
            first.weight.root, first.weight.module, module_class, "weight", Phase.OPTIMIZER, None, first.since
        ),
        cause="trained-apart",
        evidence={
            "replicas": ranks,
            "last_equal_step": first.equal,
            "differing_weights": matrices,
            "compared_weights": matrices,
            "gradients_differ": True,
            "weights": [first.evidence],
            "confidence_reason": "ranks that average their weights more rarely than recorded look the same",
        },
        prescriptions=(
            Prescription(
                title=f"wrap the model: differing weights {matrices} -> 0",
                change={"gradient_reduction": {"from": False, "to": True}},
                predicted={"differing_weights": {"from": matrices, "to": 0}},
                snippet=_WRAPPED.lstrip("\n"),
            ),
        ),
    )
