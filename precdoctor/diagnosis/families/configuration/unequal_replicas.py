"""PD710: weights that should be the same on several ranks, and are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity, rank_place
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.configuration.unequal_replicas_apart import trained_apart
from precdoctor.diagnosis.families.configuration.unequal_replicas_causes import Cause, cause_of
from precdoctor.diagnosis.families.configuration.unequal_replicas_copies import Copies, Difference, steps_apart
from precdoctor.diagnosis.survey.replicas import COLUMNS, Replicas, Weight, coordinates, replica_differences
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import RunView

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
        if (alone := trained_apart(RULE, view)) is not None:
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
    finding = _finding(view, lasting, compared, options)
    return Checked([finding], f"{len(lasting):,} of {seen} differ")


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
        message=(
            f"By the layout of the run ({first.weight.by}), {plural(first.weight.replicas, 'rank')} hold a copy of "
            f"`{first.name}`. From step {first.since} on its bits differ, on {plural(first.steps, 'recorded step')}: "
            f"{_values_words(copies)}.{equal}{rest}{later} {cause.sentence}"
        ),
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
