"""Chains of like layers, or of the calls of one module, and the course of a magnitude along them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import integer, number, text
from precdoctor.diagnosis.survey.view import RunView

#: A part of a name that is a number (``blocks.3``), or else ends in one (``body.conv3``).
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_NUMBERED = re.compile(r"(?:^|\.)[^\d.]*(\d+)(?=\.|$)")
_COLUMNS = ("root", "module", "module_class", "kind", "name", "call", "dtype", "phase", "numel", "nan", "pos_inf",
            "neg_inf", "sum_sq", "scale", "order")  # fmt: skip
#: Examined steps, evenly spread: bounds the work.
_STEPS = 32
#: The recorder merges this call of a module and all later ones of the step into one row.
LAST_CALL = 15

#: Root, pattern of the FQN (``blocks.*.mlp``), class, kind.
ChainKey = tuple[str, str, str, str]


@dataclass(frozen=True)
class Link:
    """One layer or call of a chain.

    Attributes:
        norm, rms: L2 norm and root mean square without the loss scale, median over steps.
        order: place in the execution order of a step, if known.
    """

    index: int
    module: str
    dtype: str
    norm: float
    rms: float
    order: int | None = None


@dataclass(frozen=True)
class Chain:
    """Layers of one class whose names differ in one number only, in its order; or several such chains, end to end."""

    root: str
    pattern: str
    module_class: str
    kind: str
    links: Sequence[Link]
    steps: int

    @property
    def of_calls(self) -> bool:
        """Whether the links are calls of one module."""
        return self.links[0].module == self.links[-1].module

    def as_evidence(self) -> list[dict[str, Any]]:
        """Every layer with its magnitude."""
        return [{"module": k.module, "norm": k.norm, "rms": k.rms} for k in self.links]


def slope(values: Sequence[float]) -> float:
    """Binades per layer of a straight line through log2 of positive ``values``."""
    return float(np.polyfit(np.arange(len(values), dtype=np.float64), np.log2(values), 1)[0])


def consistent_share(values: Sequence[float], sign: float) -> float:
    """Share of the steps from layer to layer that go in the direction of ``sign``."""
    moves = [sign * (math.log2(b) - math.log2(a)) > 0.0 for a, b in itertools.pairwise(values)]
    return sum(moves) / len(moves) if moves else 0.0


def call_chains(view: RunView, kind: str, least: int) -> list[Chain]:
    """Modules that a step calls at least ``least`` times, as it does a recurrent cell; every call is a link."""
    return [c for c in view.remember(f"call-chains:{kind}", lambda: _call_chains(view, kind)) if len(c.links) >= least]


def _call_chains(view: RunView, kind: str) -> list[Chain]:
    norms: dict[ChainKey, dict[tuple[int, str, str], list[tuple[float, float]]]] = {}
    for r, norm in _norms(view, kind):
        if text(r["name"]) in ("", "0"):
            module, call = str(r["module"]), int(r["call"])
            key = (str(r["root"]), module, text(r["module_class"]), str(r["kind"]))
            rms = norm / math.sqrt(int(r["numel"]))
            norms.setdefault(key, {}).setdefault((call, module, str(r["dtype"])), []).append((norm, rms))
    return [_chain(key, links) for key, links in norms.items() if len(links) > 1]


def chains(view: RunView, kind: str, least: int) -> list[Chain]:
    """The chains of at least ``least`` layers among the tensors of one kind; only the first leaf of each module."""
    return [c for c in view.remember(f"chains:{kind}", lambda: _chains(view, kind)) if len(c.links) >= least]


def joined_chains(view: RunView, kind: str, least: int) -> list[Chain]:
    """Joins chains of one class that run one after the other, as an encoder's and its decoder's do.

    Only for kinds of the backward pass, which run from the last layer to the first. Chains that run side by side
    (``blocks.*.up`` and ``blocks.*.down``) or in unknown order are not joined.
    """
    found: dict[tuple[str, str], list[Chain]] = {}
    for chain in chains(view, kind, 2):
        if all(k.order is not None for k in chain.links):
            found.setdefault((chain.root, chain.module_class), []).append(chain)
    made = []
    for same in found.values():
        ordered = sorted(same, key=lambda c: -_span(c)[1])
        if len(ordered) > 1 and all(_span(a)[0] > _span(b)[1] for a, b in itertools.pairwise(ordered)):
            links = [replace(k, index=i) for i, k in enumerate(k for c in ordered for k in c.links)]
            pattern = "`, `".join(c.pattern for c in ordered)
            made.append(replace(ordered[0], pattern=pattern, links=links, steps=min(c.steps for c in ordered)))
    return [c for c in made if len(c.links) >= least]


def _span(chain: Chain) -> tuple[int, int]:
    orders = [k.order for k in chain.links if k.order is not None]
    return min(orders), max(orders)


def _chains(view: RunView, kind: str) -> list[Chain]:
    norms: dict[ChainKey, dict[tuple[int, str, str], list[tuple[float, float]]]] = {}
    orders: dict[tuple[str, str], int | None] = {}
    for r, norm in _norms(view, kind):
        found = _link_of(r)
        if found is not None:
            key, link = found
            norms.setdefault(key, {}).setdefault(link, []).append((norm, norm / math.sqrt(int(r["numel"]))))
            orders[key[0], link[1]] = integer(r["order"])
    made = [_chain(key, links) for key, links in norms.items()]
    return [replace(c, links=[replace(k, order=orders[c.root, k.module]) for k in c.links]) for c in made]


def _norms(view: RunView, kind: str) -> Iterator[tuple[Mapping[str, Any], float]]:
    """The finite tensors of the examined steps, each with its L2 norm without the loss scale."""
    steps = watched_steps(view)
    steps = steps[:: max(1, math.ceil(len(steps) / _STEPS))]
    for r in view.scan_records(_COLUMNS, (kind,), steps=steps):
        energy = number(r["sum_sq"])
        bad = r["nan"] or r["pos_inf"] or r["neg_inf"] or text(r["phase"]) == "recompute"
        if energy is not None and not bad and int(r["numel"]):
            yield r, math.sqrt(energy) / (number(r["scale"]) or 1.0)


def _link_of(r: Mapping[str, Any]) -> tuple[ChainKey, tuple[int, str, str]] | None:
    """The chain of a row and its link there; the first number in a name counts."""
    module = str(r["module"])
    match = _NUMBER.search(module) or _NUMBERED.search(module)
    if match is None or int(r["call"]) or text(r["name"]) not in ("", "0", "weight"):
        return None
    pattern = f"{module[: match.start(1)]}*{module[match.end(1) :]}"
    key = (str(r["root"]), pattern, text(r["module_class"]), str(r["kind"]))
    return key, (int(match.group(1)), module, str(r["dtype"]))


def _chain(key: ChainKey, links: Mapping[tuple[int, str, str], Sequence[tuple[float, float]]]) -> Chain:
    made = [
        Link(index, module, dtype, median(n for n, _ in seen), median(r for _, r in seen))
        for (index, module, dtype), seen in sorted(links.items())
    ]
    return Chain(*key, made, max(map(len, links.values())))
