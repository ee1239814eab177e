"""Four ranks of DistributedDataParallel whose weights are not what the layout says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.support.samples import Sample
from tests.support.training import FACTS, FORWARD, Row, Training

RANKS = 4
NORM = "blocks.0.norm"


def replicas(ranks: int = RANKS, *, frozen: tuple[str, ...] = (), **layout: Any) -> Training:
    """Weights, and the gradients given to the optimizer, with the same fingerprints on all ranks."""
    facts = copy.deepcopy(FACTS)
    facts["layout"] = {
        "ranks": ranks,
        "restart": 0,
        "dimensions": [],
        "placements": [{"by": "DistributedDataParallel", "replicated": ["dp"], "sharded": [], "first": 0,
                        "replicas": ranks}],
        **layout,
    }  # fmt: skip
    for parameter in facts["roots"][0]["parameters"]:
        parameter["placement"] = 0
        parameter["requires_grad"] = parameter["module"] not in frozen
    run = Training(ranks=ranks, facts=facts)
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] in ("weight", "weight_grad_step"):
                row["fingerprint"] = 1 + 1000 * step + row["order"]
            if row["kind"] == "update":
                row["sum"] = 0.0  # as those of the weights are the same on all steps
    return run


def apart(
    run: Training,
    rank: int,
    since: int,
    modules: tuple[str, ...],
    *,
    until: int = 99,
    change: Callable[[Row], None] = lambda row: None,
    kinds: tuple[str, ...] = ("weight",),
) -> Training:
    """On one rank these weights have other bits, from a step on."""
    for step, rows in run.tensors.items():
        mine = copy.deepcopy(run.of_rank.get((rank, step), rows))
        for row in mine:
            if since <= step <= until and row["module"] in modules and row["kind"] in kinds:
                row["fingerprint"] += 7 + rank
                change(row)
        run.of_rank[rank, step] = mine
    return run


ALL = tuple(module for module, _ in FORWARD)


def every_rank_draws(modules: tuple[str, ...], *, frozen: tuple[str, ...] = ()) -> Training:
    run = replicas(frozen=frozen)
    for rank in range(1, RANKS):
        apart(run, rank, 0, modules)
    return run


def standing_still() -> Training:
    """A rate of zero: every weight has the same bits on all steps, but for one of one rank."""
    run = replicas()
    for row in (row for rows in run.tensors.values() for row in rows if row["kind"] == "weight"):
        row["fingerprint"] = 1 + row["order"]
    return apart(run, 2, 6, (NORM,), change=moved)


def flipped_into_the_exponent() -> Training:
    """The loss overflows at once, and with the next update every copy is NaN."""
    run = apart(replicas(), 2, 6, (NORM,), change=moved).poison(6, "loss", pos_inf=1, nan=0)
    for (_, step), rows in run.of_rank.items():
        for row in (row for row in rows if step > 6 and row["kind"] == "weight"):
            row.update(fingerprint=5, nan=4096)
    return run


def moved(row: Row) -> None:
    row["sum"] += 0.5


def not_reduced() -> Training:
    run = replicas()
    for rank in range(1, RANKS):
        apart(run, rank, 0, ("head",), kinds=("weight_grad_step",))
        apart(run, rank, 1, ("head",))
    return run


def averaged_now_and_then() -> Training:
    return apart(replicas(), 2, 4, ALL, until=6)


def no_layout() -> Training:
    run = apart(replicas(), 2, 4, ALL)
    run.facts = FACTS
    return run


def shards() -> Training:
    placement = {"by": "DTensor", "replicated": [], "sharded": ["dp"], "first": 0, "replicas": 1}
    return apart(replicas(placements=[placement]), 2, 0, ALL)


def other_gradients_before_the_reduction() -> Training:
    run = replicas()
    for row in (row for rows in run.tensors.values() for row in rows if row["kind"] in ("weight_grad", "update")):
        row["fingerprint"] = 1
    return apart(run, 2, 0, ALL, kinds=("weight_grad", "update"))


FIRING = {
    "flipped_bit": Sample(
        lambda: apart(replicas(), 2, 6, (NORM,), change=moved), 6, NORM, "weight", "rank-local-change", rank=2,
        says=("on rank 2 is not what its replicas hold", "alone against 3 equal copies", "equal on step 5"), bare=True,
        evidence={"alone": [2], "suspected_rank": 2, "last_equal_step": 5, "differing_weights": 1,
                  "gradients_differ": False},
    ),
    "flipped_bit_in_a_warm_up": Sample(
        standing_still, 6, NORM, "weight", "rank-local-change", rank=2, says=("against 3 equal copies",), bare=True,
    ),
    "flipped_exponent": Sample(
        flipped_into_the_exponent, 6, NORM, "weight", "rank-local-change", rank=2, bare=True,
        evidence={"last_equal_step": 5},
    ),
    "flipped_bit_of_two": Sample(
        lambda: apart(replicas(2), 1, 6, (NORM,), change=moved), 6, NORM, "weight", "rank-local-change", rank=1,
        says=("rank 1 is the one that changed",), evidence={"alone": [], "suspected_rank": 1}, bare=True,
    ),
    "unequal_seeds_of_frozen_weights": Sample(
        lambda: every_rank_draws(("emb",), frozen=("emb",)), 0, "emb", "weight", "unequal-seeds", rank=...,
        says=("since step 0",), evidence={"frozen_weights": 1, "last_equal_step": None}, bare=True,
    ),
    "no_broadcast": Sample(
        lambda: every_rank_draws(ALL), 0, ALL[0], "weight", "missing-broadcast", rank=..., says=("8 of 8",),
        evidence={"differing_weights": 8, "compared_weights": 8}, bare=True,
    ),
    "loaded_on_one_rank": Sample(
        lambda: apart(replicas(), 3, 0, ("head",)), 0, "head", "weight", "left-out-of-broadcast", rank=3,
        says=("rank 3 is alone", "The other 7 compared weights are equal"), bare=True,
    ),
    "gradient_not_reduced": Sample(
        not_reduced, 1, "head", "weight", "unequal-gradients", rank=..., bare=True,
        evidence={"gradients_differ": True},
    ),
    "noise_in_the_optimizer": Sample(
        lambda: apart(replicas(), 1, 4, ALL), 4, ALL[0], "weight", "unequal-updates", rank=1,
        says=("7 other weights parted on the same step",), bare=True,
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f for f in (averaged_now_and_then, no_layout, shards, other_gradients_before_the_reduction, replicas)
}
