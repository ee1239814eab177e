"""PD710: weights that should be the same on several ranks, and are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from precdoctor.diagnosis.analyses.replicas import COLUMNS, Replicas, Weight, coordinates, replica_differences
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, rank_place
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.configuration.unequal_replicas_causes import (
    Cause,
    Copies,
    Difference,
    cause_of,
    steps_apart,
)
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A weight whose bits differ between ranks that hold copies of it: replicas of DistributedDataParallel, of hybrid sharding
(FSDP, HSDP), and parameters that tensor parallelism replicates. The layout that the recorder wrote names these ranks.
Shards, parts of tensor-parallel weights, pipeline stages and parameters that DistributedDataParallel ignores are not
compared. Neither are buffers: the statistics of batch norm differ between ranks without harm. Copies that become equal
again are not reported, because training with local steps averages them from time to time. Nothing is said where one
rank holds what another held a step earlier, because then they count steps differently.

Without a wrapper, ranks of one process group that hold the same parameters are compared by name. They train apart if
every trained matrix is equal on all ranks at first and on none of the later recorded steps, at one learning rate and
with different gradients: a warning.
""",
    matters="""
Gradients are averaged over ranks as if all had the same weights. They are gradients of different models, and the
checkpoint that one rank saves is none of the models that were trained. The loss shows little of it. A difference that
begins in one tensor on one rank in the middle of a run is also how a failing device shows itself.
""",
    example="""
    model = DistributedDataParallel(model)
    model.module.head.reset_parameters()  # after the broadcast, and each rank has its own random state
""",
    remedy="""
Copies that never were equal: build the model from the same seed, and wrap it after its last change, with the default
`init_sync=True`. Copies that part later: look for writes to weights on one rank, optimizers that draw random numbers,
and parameters whose gradient is not reduced; if there are none, test the device of the rank. Buffers that should be
equal need `broadcast_buffers=True`.
""",
    confidence="""
0.95 where copies differ from the first recorded step on: equal tensors have equal fingerprints. 0.9 where the
gradients differed on the step before, or devices are not the same. 0.6 where one rank changed alone: a write by the
script and a fault of the device look the same. 0.7 where ranks train apart: those that average their weights more
rarely than recorded steps show look the same.
""",
    references=(
        "PyTorch documentation: DistributedDataParallel (init_sync, broadcast_buffers), Distributed communication",
        "Dixit et al., Silent Data Corruptions at Scale, arXiv:2102.11245",
    ),
)
#: How many weights or ranks a finding lists.
_LISTED = 16
#: Number of steps on which the ranks must differ. Chosen empirically: ranks that average weights do it more often.
_APART = 16
#: What makes a parameter's copies equal (``by``) if no wrapper does: they have one name.
_BY_NAME = "name"
_WRAPPED = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model)  # averages the gradients over the ranks in every backward pass
"""


def check(view: RunView, options: Options) -> Checked:
    """One finding a run: the weight whose copies are the first to differ."""
    if len({p.rank for p in view.everyone}) < 2:
        return Checked.not_applicable("the run has one rank")
    replicas = Replicas({p: view.facts(p) for p in view.everyone})
    if not replicas.weights:
        layouts = [view.facts(p).get("layout") or {} for p in view.everyone]
        if failed := next((text(f.get("failed")) for f in layouts if f.get("failed")), ""):
            return Checked.indeterminate(f"the recorder could not read the parallel layout: {failed}")
        if not any(layouts):
            return Checked.not_applicable("the log has no parallel layout")
        if (alone := _trained_apart(view)) is not None:
            return Checked([alone], "the same model on every rank, with nothing that keeps it equal")
        return Checked.not_applicable("by its layout no two recorded ranks hold a copy of the same weight")
    summary = replica_differences(view.batches(COLUMNS, ("weight",), everyone=True), replicas)
    if not summary.num_rows:
        return Checked.indeterminate("no step was recorded with the same weight of two ranks")
    seen = f"{plural(summary.num_rows, 'weight')} with copies on other ranks"
    differences = [Difference.of(r, replicas) for r in summary.filter(pc.greater(summary["different"], 0)).to_pylist()]
    lasting = [d for d in differences if d.equal is None or d.equal < d.since]
    if not lasting:
        averaged = f"; {len(differences)} differ for a while and are averaged again" if differences else ""
        return Checked((), f"{seen}, on up to {plural(pc.max(summary['steps']).as_py(), 'step')}{averaged}")
    lasting.sort(key=lambda d: (d.since, d.order is None, d.order or 0, d.name))
    trained = next((d for d in lasting if d.weight.trained), None)
    if trained is not None and (apart := steps_apart(view, trained)) is not None:
        return Checked.indeterminate(f"{seen}, but ranks count their steps differently: {apart}")
    compared = [replicas.weights[n] for n in summary["weight"].to_pylist()]
    return Checked([_finding(view, lasting, compared, options)], f"{len(lasting):,} of {seen} differ")


def _finding(view: RunView, lasting: Sequence[Difference], compared: Sequence[Weight], options: Options) -> Finding:
    first = lasting[0]
    copies = Copies.of(view, first)
    cause = cause_of(view, lasting, copies, compared, options)
    rank = copies.suspect if copies.suspect is not None else copies.groups[-1][0]
    together = [d for d in lasting if d.since == first.since]
    beside, behind = len(together) - 1, len(lasting) - len(together)
    rest = f" {plural(beside, 'other weight')} parted on the same step." if beside else ""
    later = f" {plural(behind, 'more weight')} parted later." if behind else ""
    equal = "" if first.equal is None else f" All copies were equal on step {first.equal}."
    return RULE.finding(
        confidence=cause.confidence,
        severity=Severity.WARNING if cause.mild else None,
        title=f"{_subject_words(view, copies, first)} since step {first.since}",
        message=f"By the layout of the run ({first.weight.by}), {plural(first.weight.replicas, 'rank')} hold a copy of "
        f"`{first.name}`. From step {first.since} on its bits differ, on {plural(first.steps, 'recorded step')}: "
        f"{_values_words(copies)}.{equal}{rest}{later} {cause.sentence}",
        location=Location(
            first.weight.root, first.weight.module, copies.module_class, "weight", Phase.OPTIMIZER, rank, first.since
        ),
        cause=cause.name,
        evidence=_evidence(lasting, copies, cause, len(compared)),
        prescriptions=cause.prescriptions,
    )


def _evidence(lasting: Sequence[Difference], copies: Copies, cause: Cause, compared: int) -> Mapping[str, Any]:
    first = lasting[0]
    return {
        "replicas": first.weight.replicas,
        "ranks_by_value": [list(ranks[:_LISTED]) for ranks in copies.groups[:_LISTED]],
        "alone": list(copies.alone[:_LISTED]),
        "suspected_rank": copies.suspect,
        "last_equal_step": first.equal,
        "first_compared_step": first.first,
        "differing_weights": len(lasting),
        "compared_weights": compared,
        "frozen_weights": sum(not d.weight.trained for d in lasting),
        "gradients_differ": copies.gradients_differ,
        "weights": [d.evidence for d in lasting[:_LISTED]],
        "confidence_reason": cause.reason,
        **({"left_its_course_at": first.equal + 1} if first.equal is not None else {}),
    }


def _subject_words(view: RunView, copies: Copies, first: Difference) -> str:
    """Return the start of the title: the weight, and the rank that is to blame if it is known."""
    if len(copies.alone) == 1:
        return f"`{first.name}` on {_rank(view, copies.alone[0])} is not what its replicas hold,"
    if copies.suspect is not None:
        return f"`{first.name}` differs between replicas, and {_rank(view, copies.suspect)} is the one that changed,"
    return f"`{first.name}` differs between its {plural(first.weight.replicas, 'replica')}"


def _values_words(copies: Copies) -> str:
    """State which ranks hold which value, as in ``rank 3 is alone against 3 equal copies``."""
    if len(copies.alone) == 1:
        return f"rank {copies.alone[0]} is alone against {len(copies.groups[0]):,} equal copies"
    if copies.alone:
        ranks = ", ".join(map(str, copies.alone[:_LISTED]))
        return f"ranks {ranks} do not hold what {len(copies.groups[0])} others do"
    values = f"{plural(len(copies.groups), 'value')} on {plural(sum(map(len, copies.groups)), 'rank')}"
    if copies.moved is not None:
        return f"{values}, and only rank {copies.moved} changed by more than its optimizer's step"
    return f"{values}, with no majority"


# -- ranks that train apart -------------------------------------------------------------------------------------------
#
# The same model on several ranks, equal at first, and nothing that keeps it equal.


def _trained_apart(view: RunView) -> Finding | None:
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
    return _apart_finding(difference, len(matrices), copies.module_class)


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


def _apart_finding(first: Difference, matrices: int, module_class: str | None) -> Finding:
    ranks = first.weight.replicas
    return RULE.finding(
        severity=Severity.WARNING,
        confidence=0.7,
        title=f"{plural(ranks, 'rank')} train apart from step {first.since} on: no gradient is reduced",
        message=f"The {plural(matrices, 'trained weight matrix')} are equal on {plural(ranks, 'rank')} of one process "
        f"group up to step {first.equal}, and differ on {plural(first.steps, 'recorded step')} from then on, all there "
        f"are. On step {first.equal} the optimizers got different gradients. No wrapper (DistributedDataParallel, "
        "FSDP) holds the model, so each rank trains its own. If that is intended, record one rank (`--ranks 0`).",
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
        prescription=Prescription(
            title=f"wrap the model: differing weights {matrices} -> 0",
            change={"gradient_reduction": {"from": False, "to": True}},
            predicted={"differing_weights": {"from": matrices, "to": 0}},
            snippet=_WRAPPED.lstrip("\n"),
        ),
    )


def begins_at_difference(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` begins after the last step with equal copies, and no later than they differ."""
    equal, since, begin = cause.evidence.get("last_equal_step"), cause.location.step, effect.location.step
    return equal is not None and since is not None and begin is not None and equal < begin <= since


def _rank(view: RunView, rank: int) -> str:
    """Name a rank and its place in the layout."""
    return rank_place(rank, coordinates(view, rank))


RULE = Rule(
    code="PD710",
    name="unequal-replicas",
    severity=Severity.ERROR,
    triage=Triage.DATA,
    page=PAGE,
    options=(
        RuleOption(
            "whole_model", 0.75, "share of matrices",
            "Share of the trained weight matrices that part on one step, from which on the cause is the whole model's.",
            "Chosen empirically: matrices that start as zeros are equal under any seed.", maximum=1.0,
        ),
    ),
    explains=when(begins_at_difference, "PD101", "PD102", "PD103", "PD105", "PD106", "PD603", "PD605"),
    check=check,
)  # fmt: skip
