"""PD710, causes: why copies differ, by the steps and weights that differ and the gradients of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.analyses.replicas import Weight
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.families.configuration.unequal_replicas_copies import Copies, Difference
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import RunView

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
