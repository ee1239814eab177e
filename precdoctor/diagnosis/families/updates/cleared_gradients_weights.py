"""PD510, weights that get no gradient from an optimizer, while other weights are trained.

An optimizer holds them and never gets a gradient of them. Such a weight need not be meant for training: a frozen
encoder often stays in the optimizer. What says that it is meant: an optimizer or a parameter group of its own, or
neighbours that were frozen one by one (adapters). Without such a sign, weights whose gradients are made and then
removed are worth a note: some training recipes freeze a layer like that, and surgery on gradients that writes back too
few looks the same.

Or no optimizer holds them. They were replaced after the optimizer was made: it holds tensors of no model, while the
model's own weights are held by none (a new head, ``load_state_dict`` with ``assign=True``, a layer that was rebuilt or
parametrized). Or they were frozen then, so that the optimizer did not get them, and were unfrozen later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.parameters import (
    module_of_only,
    modules_around,
    parameter_label,
    recorded_parameters,
)
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.claims.words import named, plural
from precdoctor.diagnosis.survey.frames import AT, firsts, groups, parameters
from precdoctor.diagnosis.survey.rows import Parameter, grouped, tensor_location, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView

_SNIPPET = """model = build()  # replace layers, load, convert and wrap first
optimizer = torch.optim.AdamW(model.parameters())  # then
"""
_Shape = tuple[int, ...]


# -- held --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Untrained:
    """Weights of one process that get no gradient from the optimizer that holds them, and keep their bits.

    Attributes:
        process, optimizer: where they are; name of the optimizer.
        weights: in the model's order.
        meant: why they are meant for training, in words; empty if nothing says so.
        module: the largest module that holds the first of them and no other weights.
        steps: number of the optimizer's steps at a learning rate above 0.
        first: the first sampled step.
        made: number of sampled steps whose backward pass left them gradients; 0 if they never get any.
        blocked: whether their modules are only called under ``no_grad``.
    """

    process: Process
    optimizer: str
    weights: tuple[Parameter, ...]
    meant: str
    module: tuple[str, str]
    steps: int
    first: int
    made: int
    blocked: bool

    @property
    def others(self) -> bool:
        """Whether some of the weights are outside ``module``."""
        root, module = self.module
        return any(p[0] != root or (module and not f"{p[1]}.".startswith(f"{module}.")) for p in self.weights)


@dataclass(frozen=True)
class _Held:
    """A weight that requires a gradient, if ``trainable``, and the numbers of the optimizer and group that hold it."""

    place: Parameter
    trainable: bool
    numel: int
    group: tuple[int, int] | None


def untrained(view: RunView, rows: pd.DataFrame, made: pd.DataFrame, min_steps: float) -> Untrained | None:
    """Return the first weights that their optimizer never gets a gradient of.

    Args:
        rows: the rows of weights and gradients on sampled, unskipped steps at a learning rate above 0.
        made: those of the gradients that the backward pass left non-zero, one per step and weight.
        min_steps: on how many sampled steps the weights must be seen, and how many steps the optimizer must make.
    """
    for process in view.processes:
        mine, gradients = (f[(f["rank"] == process.rank) & (f["attempt"] == process.attempt)] for f in (rows, made))
        starved = _starved(mine, min_steps)
        if not starved or gradients.empty:
            continue
        made_by_pass, given = (set(parameters(mine[mine["kind"] == k])) for k in ("weight_grad", "weight_grad_step"))
        silent = _silent(view, process, starved - made_by_pass, min_steps)
        held, made_on = _held(view, process), Counter(parameters(gradients))
        for number, facts in enumerate(view.facts(process).get("optimizers") or ()):
            name = text(facts.get("name"))
            steps = [s for s in view.timeline[process] if s.optimizer == name and s.complete and not s.skipped and s.lr]
            if len(steps) < min_steps:
                continue
            own = [h for h in held if h.group is not None and h.group[0] == number and h.trainable]
            candidates = [*_meant(own, held, steps, name, starved, silent)]
            # Gradients that are made and then removed, unless the optimizer has no others.
            removed = tuple(h.place for h in own if h.place in starved - given and made_on[h.place] >= min_steps)
            if 0 < len(removed) < len(own):
                candidates.append((removed, ""))
            for weights, meant in candidates:
                seen = gradients[[p in weights for p in parameters(gradients)]]
                count = firsts(groups(seen, AT)).size
                if count < min_steps and not silent.keys() >= set(weights):  # zeros, as at a loss weight of 0
                    continue
                module = module_of_only(weights[0], weights, [h.place for h in held])
                first = int(mine["step"].min())
                blocked = not count and all(silent[p] for p in weights)
                return Untrained(process, name, weights, meant, module, len(steps), first, count, blocked)
    return None


def _starved(rows: pd.DataFrame, min_steps: float) -> set[Parameter]:
    """Return the weights that are given no gradient: zeros only, or none, and the same bits on ``min_steps`` steps."""
    given = rows[rows["kind"] == "weight_grad_step"]
    fed = set(parameters(given[given["alive"]]))
    zeros = set(parameters(given)) - fed
    weights = rows[(rows["kind"] == "weight") & rows["fingerprint"].notna()]
    bits = grouped(zip(parameters(weights), weights["fingerprint"], strict=True))
    steps = grouped(zip(parameters(weights), weights["step"], strict=True))
    still = {p for p, found in bits.items() if len(set(found)) == 1 or p in zeros}
    return {p for p in still - fed if len(set(steps[p])) >= min_steps}


def _silent(view: RunView, process: Process, weights: set[Parameter], min_steps: float) -> dict[Parameter, bool]:
    """Return those of ``weights`` whose module, or the one around it, is called on ``min_steps`` sampled steps.

    The value says whether all these calls are under ``no_grad``.
    """
    if not weights:
        return {}
    rows = view.measured((), ("output",), columns=("phase",))
    rows = rows[(rows["rank"] == process.rank) & (rows["attempt"] == process.attempt)]
    modules = list(zip(rows["root"], rows["module"], strict=True))
    steps, phases = (grouped(zip(modules, rows[name], strict=True)) for name in ("step", "phase"))
    called = {module for module, seen in steps.items() if len(set(seen)) >= min_steps}
    found = {}
    for place in weights:
        module = next((m for m in (place[:2], *modules_around(place)[-2:-1]) if m in called), None)
        if module is not None:
            found[place] = set(phases[module]) == {"no_grad"}
    return found


def _held(view: RunView, process: Process) -> list[_Held]:
    found = []
    for place, p in recorded_parameters(view, process):
        group = list(p.get("group") or ())
        numel = math.prod(int(n) for n in p.get("shape") or ())
        key = (group[0], group[1]) if len(group) == 2 and all(type(n) is int for n in group) else None
        found.append(_Held(place, bool(p.get("requires_grad")), numel, key))
    return found


def _meant(
    own: Sequence[_Held],
    held: Sequence[_Held],
    steps: Sequence[StepFacts],
    name: str,
    starved: set[Parameter],
    silent: Mapping[Parameter, bool],
) -> Iterator[tuple[tuple[Parameter, ...], str]]:
    """Yield weights of an optimizer that are meant for training and starved, and what says that they are meant.

    Args:
        own: the trainable weights of the optimizer; ``held``: all weights of the process.
        starved: weights that are given no gradient and keep their bits.
        silent: those that have no gradient after the backward pass either, as in :func:`_silent`.
    """
    places = [h.place for h in own]
    if places and starved.issuperset(places) and not any(s.grad_norm for s in steps):
        weights = tuple(places if silent.keys() >= set(places) else (p for p in places if p not in silent))
        yield weights, f"`{name}` trains nothing else"
        return
    if alone := _with_own_rate(own, steps, silent):
        yield alone, f"they have parameter groups of `{name}` to themselves, at a learning rate of their own"
    if chosen := _chosen(own, held, silent):
        yield chosen, f"most weights around them were frozen, and `{name}` was given these"


def _with_own_rate(
    own: Sequence[_Held], steps: Sequence[StepFacts], silent: Mapping[Parameter, bool]
) -> tuple[Parameter, ...]:
    """Return the weights of all parameter groups that are silent as a whole, at rates above 0 that no other group has.

    Groups at the same rate may differ in weight decay only, and there may be one for each weight.
    """
    members = grouped((h.group[1], h.place) for h in own if h.group is not None)
    rates = {n: tuple(s.lrs[n] for s in steps if n < len(s.lrs)) for n in members}
    quiet = {n for n, places in members.items() if silent.keys() >= set(places)}
    others = {rates[n] for n in members.keys() - quiet}
    found = [n for n in sorted(quiet) if others and rates[n] and min(rates[n]) > 0 and rates[n] not in others]
    return tuple(p for n in found for p in members[n])


def _chosen(own: Sequence[_Held], held: Sequence[_Held], silent: Mapping[Parameter, bool]) -> tuple[Parameter, ...]:
    """Return the weights that some largest module leaves trainable, most of its elements being frozen; all silent.

    Unless they are called under ``no_grad``, a frozen weight follows the first of them: else nothing may use what they
    make (a pooler on top).
    """
    mine = {h.place for h in own}
    inside = grouped((module, h) for h in held for module in modules_around(h.place))
    for _, members in sorted(inside.items(), key=lambda item: item[0][1].count(".")):
        trainable = [h for h in members if h.trainable]
        frozen = sum(h.numel for h in members if not h.trainable)
        if trainable and frozen > sum(h.numel for h in trainable):
            places = [h.place for h in trainable]
            followed = any(not h.trainable for h in members[members.index(trainable[0]) :])
            known = silent.keys() >= set(places) and mine.issuperset(places)
            if known and (followed or all(silent[p] for p in places)):
                return tuple(places)
    return ()


# -- not held ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unheld:
    """Weights of one process that no optimizer holds.

    Attributes:
        optimizer: the one whose unused parameters are their counterparts; empty if they were frozen at first.
        same: whether the counterparts have the same shapes; else they differ in one dimension.
    """

    weights: frozenset[Parameter]
    optimizer: str = ""
    same: bool = True


def replaced_weights(view: RunView, process: Process) -> Unheld:
    """Return the weights that no optimizer holds and that the unused parameters of one are counterparts of.

    If no counterparts have the same shape, weights are taken whose shape differs from that of a counterpart in one
    dimension (a head for another number of classes). No weights are returned if the process has none such, or the log
    is too old to tell.
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
            return Unheld(found, name)
    for name, shapes in unused.items():
        if resized := _resized(free, list(shapes.elements())):
            return Unheld(resized, name, same=False)
    return Unheld(frozenset())


def unfrozen_weights(view: RunView, process: Process, rows: pd.DataFrame) -> Unheld:
    """Return the weights that were frozen at first, and that no optimizer was given by ``rows``, as in `untrained`."""
    given = set(parameters(rows[rows["kind"].isin(["weight_grad_step", "update"])]))
    known = recorded_parameters(view, process) if given else ()
    frozen = {place for place, p in known if p.get("requires_grad") is False and p.get("group") is None}
    return Unheld(frozenset(frozen - given))


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


def unheld_finding(
    rule: Rule, process: Process, unheld: Unheld, gradients: pd.DataFrame, options: Options
) -> Finding | None:
    """Return the finding about weights that no optimizer holds; None unless they get gradients on enough sampled steps.

    ``gradients``: one row per step and weight whose gradient is not all zeros after the backward pass, and that no
    optimizer was given.
    """
    rows = gradients[(gradients["rank"] == process.rank) & (gradients["attempt"] == process.attempt)]
    rows = rows.loc[np.array([place in unheld.weights for place in parameters(rows)], dtype=bool)]  # may be empty
    steps = sorted(set(rows["step"].tolist()))
    if len(steps) < options["min_steps"]:
        return None
    weights = sorted(set(parameters(rows.iloc[firsts(groups(rows, IDENTITY))])))
    labels, count, optimizer = [parameter_label(p) for p in weights], len(weights), unheld.optimizer
    root, module = weights[0][0], _common_module(weights)
    title = f"no optimizer holds {plural(count, 'weight')} of `{module or root}`"
    seen = f"got non-zero gradients on {plural(len(steps), 'sampled step')} (limit {options['min_steps']:g}), and no"
    predicted = {"weights_in_no_optimizer": {"from": count, "to": 0}}
    if optimizer:
        shapes = "of the same shapes" if unheld.same else "whose shapes differ in one dimension"
        title += f", and `{optimizer}` holds as many that no model has, {shapes}"
        message = (
            f"{named(labels)} {seen} optimizer holds them. `{optimizer}` holds {count:,} others {shapes}; they belong "
            "to no model and had no gradient at its first step. Most likely the parameters were replaced after the "
            "optimizer was made; those in the model stay as they are."
        )
        reason = "parameters were compared by identity when the log of the process was written"
        prescription = Prescription(
            title=f"make the optimizer after the model has its final parameters: weights in no optimizer {count} -> 0",
            change={"order": {"from": "optimizer, then model", "to": "model, then optimizer"}},
            predicted=predicted,
            snippet=_SNIPPET,
        )
    else:
        title += f", unfrozen by step {steps[0]:,}"
        message = (
            f"{named(labels)} required no gradient at first. From step {steps[0]:,} on they {seen} optimizer was given "
            "them: unless the script moves these weights itself, they stay as they were. Most likely the optimizer was "
            "made of the weights that were not frozen then."
        )
        reason = "the gradients were recorded, and what each optimizer was given"
        prescription = Prescription(
            title=f"give the weights to the optimizer as they are unfrozen: weights in no optimizer {count} -> 0",
            change={"parameter_group": {"from": None, "to": module or root}},
            predicted=predicted,
            snippet="optimizer.add_param_group({'params': part.parameters(), 'lr': 1e-4})  # as it is unfrozen\n",
        )
    return rule.finding(
        severity=None if optimizer else Severity.WARNING,
        confidence=0.95 if optimizer and unheld.same else 0.9,
        title=title,
        message=message,
        location=tensor_location((root, module), "", "weight_grad", Phase.OPTIMIZER, process, steps[0]),
        evidence={
            "weights": labels[:16],
            **({"optimizer": optimizer} if optimizer else {}),
            "steps": len(steps),
            "limit": options["min_steps"],
            "confidence_reason": reason,
        },
        prescription=prescription,
    )


def _common_module(weights: Sequence[Parameter]) -> str:
    """Return the innermost module that holds all of these weights of one model; empty for the model itself."""
    names = [module.split(".") for root, module, _ in weights if root == weights[0][0]]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return ".".join(parts[0] for parts in shared)
