"""PD710: the copies of one weight on the step they first differ, which rank is alone and what changed on it; and why.

The cause follows from the steps and weights that differ and from the gradients of the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from precdoctor.diagnosis.analyses.replicas import Replicas, Weight
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.survey.rows import dotted, grouped, integer, number, text
from precdoctor.diagnosis.survey.view import BAD_COUNTS, Process, RunView

_COLUMNS = ("root", "module", "module_class", "kind", "name", "fingerprint", "sum", "dtype", "numel")
_KINDS = ("weight", "weight_grad_step", "update")
#: By how much one rank's unexplained change must exceed the others' to be named. Chosen empirically: of a change that
#: an optimizer step explains only rounding is left.
_STANDS_OUT = 4.0
#: Number of steps searched for signs that a rank counts its steps differently.
_SEARCHED_STEPS = 8


@dataclass(frozen=True)
class Difference:
    """A weight whose copies differ, with the steps between which they began to.

    Attributes:
        since: the first step on which they differ.
        first: the first step on which they were compared.
        equal: the last step on which all were equal; None if they never were.
        steps: the number of steps on which they differ.
        order: place in the execution order; None if unknown.
        holders: the processes that hold a copy.
    """

    weight: Weight
    since: int
    first: int
    equal: int | None
    steps: int
    order: int | None
    holders: Sequence[Process]

    @classmethod
    def of(cls, record: Mapping[str, Any], replicas: Replicas) -> Difference:
        """Return a row of the summary of replicas as a difference."""
        number = record["weight"]
        return cls(
            weight=replicas.weights[number],
            since=record["differs_from"],
            first=record["first"],
            equal=record["equal_again"],
            steps=record["different"],
            order=record["order"],
            holders=replicas.holders(number),
        )

    @property
    def name(self) -> str:
        """FQN of the parameter below its root."""
        return dotted(self.weight.module, self.weight.name)

    @property
    def from_the_start(self) -> bool:
        """Whether the copies differ on the first step on which they were compared."""
        return self.since == self.first

    @property
    def evidence(self) -> Mapping[str, Any]:
        return {"root": self.weight.root, "tensor": self.name, "since": self.since, "steps": self.steps}


@dataclass(frozen=True)
class Copies:
    """The copies on the step on which they first differ.

    Attributes:
        groups: ranks by their fingerprint, the largest group first.
        alone: the ranks that hold another value than most; empty without a majority.
        moved: the rank whose sum changed most beyond its optimizer step (or beyond that of all ranks together, if each
            updates a part of the weight); None if none stands out.
        gradients_differ: whether the optimizers were given different gradients on the last step with equal weights;
            None if unknown.
    """

    groups: Sequence[Sequence[int]]
    alone: Sequence[int]
    moved: int | None
    gradients_differ: bool | None
    module_class: str | None

    @classmethod
    def of(cls, view: RunView, difference: Difference) -> Copies:
        """Read the rows of the last equal step and of the first different one, and compare the copies."""
        weight, holders = difference.weight, {(p.rank, p.attempt) for p in difference.holders}
        steps = [difference.since] if difference.equal is None else [difference.equal, difference.since]
        batches = view.batches(_COLUMNS, _KINDS, steps=steps, where=_rows_of(weight), everyone=True)
        frame = pd.concat([b.to_pandas() for b in batches], ignore_index=True)
        frame = frame[[key in holders for key in zip(frame["rank"], frame["attempt"], strict=True)]]
        now = frame[(frame["step"] == difference.since) & (frame["kind"] == "weight")]
        held = sorted(zip(now["rank"].tolist(), now["fingerprint"].tolist(), strict=True))
        by_value = grouped((value, rank) for rank, value in held)
        groups = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))
        count = sum(map(len, groups))
        alone = sorted(r for ranks in groups[1:] for r in ranks) if 2 * len(groups[0]) > count else []
        before = frame[frame["step"] == difference.equal]
        given = before[(before["kind"] == "weight_grad_step") & before["fingerprint"].notna()]
        # Only whole gradients are comparable: a DTensor's may be one part of a sum, others may be shards.
        whole = bool((given["numel"] == now["numel"].iloc[0]).all())
        known = len(given) > 1 and weight.by != "DTensor" and whole
        return cls(
            groups=groups,
            alone=alone,
            moved=None
            if difference.equal is None
            else _rank_that_changed(before, now, difference.since - difference.equal == 1),
            gradients_differ=len(set(given["fingerprint"])) > 1 if known else None,
            module_class=text(now["module_class"].iloc[0]) or None,
        )

    @property
    def suspect(self) -> int | None:
        """The one rank that has most likely changed; None if the log does not show it."""
        return self.alone[0] if len(self.alone) == 1 else None if self.alone else self.moved


def steps_apart(view: RunView, difference: Difference) -> str | None:
    """Return what shows that two ranks number their steps differently, as words; None if nothing does.

    It shows if one rank holds the bits that the other held on another step: a weight in training has other bits on
    every step, or on most.
    """
    one, other = (ranks[0] for ranks in Copies.of(view, difference).groups[:2])
    holders = {(p.rank, p.attempt) for p in difference.holders if p.rank in (one, other)}
    near = [s for s in view.sampled_steps if s >= difference.since][:_SEARCHED_STEPS]
    held: dict[int, dict[int, int]] = {one: {}, other: {}}
    where = [*_rows_of(difference.weight), *((count, "==", 0) for count in BAD_COUNTS)]
    for batch in view.batches(("fingerprint",), ("weight",), steps=near, where=where, everyone=True):
        columns = (batch.column(name).to_pylist() for name in ("rank", "attempt", "step", "fingerprint"))
        for rank, attempt, step, value in zip(*columns, strict=True):
            if (rank, attempt) in holders and value is not None:
                held[rank].setdefault(value, step)
    shared = sorted(held[one].keys() & held[other].keys(), key=lambda value: held[other][value])
    for value in shared:
        if held[one][value] != held[other][value]:
            return f"rank {other} holds on step {held[other][value]} what rank {one} held on step {held[one][value]}"
    return None


def _rows_of(weight: Weight) -> Sequence[tuple[str, str, Any]]:
    """Return the filter for the rows of a weight."""
    return [("root", "==", weight.root), ("module", "==", weight.module), ("name", "==", weight.name)]


def _rank_that_changed(before: pd.DataFrame, now: pd.DataFrame, adjacent: bool) -> int | None:
    """Return the rank whose sum changed most beyond its update; None if none stands out or sums are missing.

    Args:
        before, now: rows of the last equal step and of the first different one.
        adjacent: no step lies between them, so that the update of ``before`` explains the change.
    """
    changes: dict[int, float] = {}
    ranks = sorted(set(now["rank"]))
    updates = before[before["kind"] == "update"] if adjacent else before[:0]
    shared_out = len(updates) > 0 and (len(updates) < len(ranks) or updates["numel"].max() < now["numel"].iloc[0])
    if shared_out and updates["numel"].sum() != now["numel"].iloc[0]:
        return None
    for rank in ranks:
        old = _sum(before, rank, "weight")
        new = _sum(now, rank, "weight")
        update = updates["sum"].sum() if shared_out else _sum(updates, rank, "update")
        if old is None or new is None:
            return None
        changes[rank] = abs(new - old - (update or 0.0))
    ordered = sorted(changes, key=lambda r: changes[r])
    if len(ordered) < 2 or not changes[ordered[-1]] > _STANDS_OUT * changes[ordered[-2]]:
        return None
    return integer(ordered[-1])


def _sum(frame: pd.DataFrame, rank: int, kind: str) -> float | None:
    """Return the recorded sum of the rank's row of this kind; None without one."""
    found = frame.loc[(frame["rank"] == rank) & (frame["kind"] == kind), "sum"]
    return number(found.iloc[0]) if len(found) else None


# -- causes -----------------------------------------------------------------------------------------------------------

_SEED = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)  # the same on every rank, before the model is made
model = make_model()
model = DistributedDataParallel(model)  # after the last change to its weights, without init_sync=False
"""
_BROADCAST = """
import torch.distributed as dist

with torch.no_grad():  # on every rank, after the last change to the weights and before the first step
    for parameter in model.parameters():
        dist.broadcast(parameter, src=0)
"""
_REDUCED = """
import torch
from torch.nn.parallel import DistributedDataParallel

model.add_module("head", head)  # every parameter is there before the model is wrapped
model = DistributedDataParallel(model)
# model.no_sync() only around micro-steps that no optimizer step follows
torch.nn.utils.clip_grad_norm_(shared_parameters, 1.0)  # a weight of one rank alone makes its norm another one
"""
_SAME_DRAWS = """
import torch

generator = torch.Generator(device).manual_seed(seed + step)  # the same on every rank
"""
_CHECK = """
import torch.distributed as dist


def replicas_are_equal(weight):
    low, high = weight.detach().clone(), weight.detach().clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool((low == high).all())  # call it before and after the lines that write to weights
"""
_DEVICE = """
import torch

torch.use_deterministic_algorithms(True)  # on the suspected rank; `dcgmi diag -r 3` tests more of a GPU
a, b = (torch.randn(4096, 4096, device=device) for _ in range(2))
first = a @ b
for _ in range(1000):
    assert torch.equal(a @ b, first)
"""


@dataclass(frozen=True)
class Cause:
    """The most likely cause of the difference.

    Attributes:
        mild: it is drift by rounding, not another model.
        sentence: for the message.
        reason: what the confidence rests on.
    """

    name: str
    sentence: str
    confidence: float
    reason: str
    prescriptions: Sequence[Prescription]
    mild: bool = False


def cause_of(
    view: RunView, lasting: Sequence[Difference], copies: Copies, compared: Sequence[Weight], options: Options
) -> Cause:
    """Return the most likely cause of the differences.

    Args:
        lasting: the differences, the earliest first.
        copies: the copies of the first of them.
        compared: all weights of which several copies were compared.
    """
    first, count = lasting[0], len(lasting)
    together = [d for d in lasting if d.since == first.since]
    # Vectors start as zeros or ones, whatever the seed.
    matrices = [w for w in compared if w.is_matrix and w.trained]
    apart = [d for d in together if d.weight.is_matrix and d.weight.trained]
    many = len(apart) > 1 and len(apart) >= options["whole_model"] * len(matrices)
    if first.from_the_start:
        return _never_equal(together, many=many, compared=len(compared), count=count)
    if many and (devices := _devices(view, first)):
        return _other_devices(devices, count)
    if copies.gradients_differ:
        return _unequal_gradients(view, first, count)
    if many:
        return _other_updates(first, count)
    return _one_rank(first, copies, count)


def _never_equal(together: Sequence[Difference], *, many: bool, compared: int, count: int) -> Cause:
    """Return the cause of copies that differ from the first compared step on."""
    equal = "equal tensors have equal fingerprints, and these never had"
    if all(not d.weight.trained for d in together):
        return Cause(
            "unequal-seeds",
            "Only frozen weights differ: each rank drew its own, and no gradient can make them equal.",
            0.95, equal, (_prescribe("seed", "per rank", "one", "draw frozen weights from one seed", count, _SEED),),
        )  # fmt: skip
    if many:
        return Cause(
            "missing-broadcast",
            f"{len(together):,} of {compared:,} compared weights differ from the beginning: the ranks built the model "
            "from different seeds, and nothing made it equal (`init_sync=False`, or a broadcast in another process "
            "group).",
            0.95, equal, (_prescribe("init_sync", False, True, "start all ranks from rank 0's weights", count, _SEED),),
        )  # fmt: skip
    return Cause(
        "left-out-of-broadcast",
        f"The other {compared - len(together):,} compared weights are equal: these were made, loaded or reset after "
        "the model was broadcast, or on some ranks only.",
        0.95, equal,
        (_prescribe("broadcast_after_changes", False, True, "broadcast after the last change", count, _BROADCAST),),
    )  # fmt: skip


def _unequal_gradients(view: RunView, first: Difference, count: int) -> Cause:
    clipped = any(
        (facts := view.step_facts(process, first.equal or 0)) is not None and facts.clip_norm is not None
        for process in first.holders
    )
    norms = ", or clipped by the norm of more than the ranks share" if clipped else ""
    return Cause(
        "unequal-gradients",
        f"On step {first.equal} the weights were equal and the gradients that the optimizers got were not: they are "
        f"not reduced over the ranks{norms}.",
        0.9, "the gradients on the last equal step differ between the ranks",
        (_prescribe("gradient_reduction", False, True, "have the gradient reduced", count, _REDUCED),),
    )  # fmt: skip


def _other_devices(devices: Sequence[str], count: int) -> Cause:
    return Cause(
        "unequal-devices",
        f"The ranks run on different devices or versions ({'; '.join(devices)}), which round differently.",
        0.9, "rank.json names the devices and versions",
        (_prescribe("devices", list(devices), "one kind", "use one kind of device", count, _BROADCAST),),
        mild=True,
    )  # fmt: skip


def _other_updates(first: Difference, count: int) -> Cause:
    return Cause(
        "unequal-updates",
        f"Many weights part at once, after step {first.equal}: the optimizers made different steps of equal weights, "
        "as with noise drawn from each rank's own random state, or one rank's weights were written to.",
        0.8, "many weights part on one step, so no single tensor was written to",
        (_prescribe("random_state", "per rank", "one", "draw the same numbers on every rank", count, _SAME_DRAWS),),
    )  # fmt: skip


def _one_rank(first: Difference, copies: Copies, count: int) -> Cause:
    who = "one rank" if copies.suspect is None else f"rank {copies.suspect}"
    gradients = " although the optimizers got equal gradients" if copies.gradients_differ is False else ""
    return Cause(
        "rank-local-change",
        f"After step {first.equal} it parts{gradients}: {who} wrote to it outside of the optimizer's step, or its "
        "device is faulty.",
        0.6, "a write by the script and a fault of the device look the same",
        (
            _prescribe("rank_local_writes", 1, 0, f"find what writes to `{first.name}` on {who}", count, _CHECK),
            _prescribe("device", "suspected", "tested", f"test the device of {who}", count, _DEVICE),
        ),
    )  # fmt: skip


def _prescribe(setting: str, before: object, after: object, what: str, count: int, snippet: str) -> Prescription:
    return Prescription(
        title=f"{what}: differing weights {count} -> 0",
        change={setting: {"from": before, "to": after}},
        predicted={"differing_weights": {"from": count, "to": 0}},
        snippet=snippet.lstrip("\n"),
    )


def _devices(view: RunView, first: Difference) -> Sequence[str]:
    """Return devices and torch versions of the ranks; empty if all have the same."""
    found = set()
    for process in first.holders:
        facts = view.facts(process)
        device, versions = facts.get("device") or {}, facts.get("versions") or {}
        found.add(f"{text(device.get('name'))}, torch {text(versions.get('torch'))}")
    return sorted(found)[:4] if len(found) > 1 else ()
