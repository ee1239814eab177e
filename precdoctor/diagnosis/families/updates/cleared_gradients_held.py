"""PD510, weights that an optimizer holds and that never get a gradient from it, while other weights are trained.

A weight that is in the optimizer need not be meant for training: a frozen encoder often stays there. What says that it
is meant: an optimizer or a parameter group of its own, or neighbours that were frozen one by one (adapters). Without
such a sign, weights whose gradients are made and then removed are worth a note: some training recipes freeze a layer
like that, and surgery on gradients that writes back too few looks the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from precdoctor.diagnosis.analyses.parameters import module_of_only, modules_around, recorded_parameters
from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.survey.frames import AT, firsts, groups, parameters
from precdoctor.diagnosis.survey.rows import Parameter, grouped, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView


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
    """Return the first such weights.

    Args:
        view: of the run.
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
            candidates = _meant(own, held, steps, name, starved, silent)
            removed = _removed(own, starved - given, made_on, min_steps)
            for weights, meant in (*candidates, *removed):
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


def same_weights(cause: Finding, effect: Finding) -> bool:
    """Return whether both findings list a weight in common."""
    causes, effects = (f.evidence.get("weights") for f in (cause, effect))
    return isinstance(causes, list) and isinstance(effects, list) and not set(causes).isdisjoint(effects)


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
        own: the trainable weights of the optimizer.
        held: all weights of the process.
        steps, name: of the optimizer.
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


def _removed(
    own: Sequence[_Held], starved: set[Parameter], made_on: Mapping[Parameter, int], min_steps: float
) -> Iterator[tuple[tuple[Parameter, ...], str]]:
    """Yield the weights of an optimizer whose gradients are made and then removed, unless it has no others.

    Args:
        own: the trainable weights of the optimizer.
        starved: weights that have no gradient at its steps and keep their bits.
        made_on: number of sampled steps on which a weight has a gradient after the backward pass.
        min_steps: fewest such steps.
    """
    weights = tuple(h.place for h in own if h.place in starved and made_on[h.place] >= min_steps)
    if 0 < len(weights) < len(own):
        yield weights, ""


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
