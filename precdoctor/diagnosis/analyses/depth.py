"""Chains of layers of one class, or of the calls of one module, and a tensor's magnitude along them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.survey.frames import firsts, groups, lasts
from precdoctor.diagnosis.survey.measures import column
from precdoctor.diagnosis.survey.rows import grouped, text
from precdoctor.diagnosis.survey.view import RunView, remembered

#: Part of an FQN that is a number (``blocks.3``); part that ends in one (``body.conv3``).
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_NUMBERED = re.compile(r"(?:^|\.)[^\d.]*(\d+)(?=\.|$)")
_COLUMNS = ("module_class", "dtype", "phase", "numel", "order")
#: Most examined steps, evenly spread; bounds the work.
_STEPS = 32
#: The recorder merges this call of a module and all later ones of the step into one row.
LAST_CALL = 15

#: Root, pattern of the FQN (``blocks.*.mlp``), class, kind.
ChainKey = tuple[str, str, str, str]


@dataclass(frozen=True)
class Link:
    """One layer or call of a chain.

    Attributes:
        index: number of the layer or call in the chain.
        norm, rms: L2 norm and root mean square without the loss scale, medians over steps.
        order: execution order in a step; None if unknown, and for calls.
    """

    index: int
    module: str
    dtype: str
    norm: float
    rms: float
    order: int | None = None


@dataclass(frozen=True)
class Chain:
    """Layers of one class whose names differ in one number, several such chains joined, or the calls of one module."""

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

    @property
    def alive(self) -> list[Link]:
        """The links with a norm above 0."""
        return [k for k in self.links if k.norm > 0.0]

    @property
    def norms(self) -> list[float]:
        """The L2 norms above 0, from the first link to the last."""
        return [k.norm for k in self.alive]

    @property
    def sizes(self) -> list[float]:
        """The RMS of the links with a norm above 0, from the first to the last."""
        return [k.rms for k in self.alive]

    def as_evidence(self) -> list[dict[str, Any]]:
        """Return every link with its magnitude, for a finding."""
        return [{"module": k.module, "norm": k.norm, "rms": k.rms} for k in self.links]


def slope(values: Sequence[float]) -> float:
    """Return the slope of a straight line through log2 of positive ``values``, in binades per layer."""
    return float(np.polyfit(np.arange(len(values), dtype=np.float64), np.log2(values), 1)[0])


def rising_share(values: Sequence[float]) -> float:
    """Return the share of layers with a larger value than the layer before; 0 for fewer than two values."""
    moves = [b > a for a, b in itertools.pairwise(values)]
    return sum(moves) / len(moves) if moves else 0.0


def call_chains(view: RunView, kind: str, least: int) -> list[Chain]:
    """Return, as chains, the calls of modules that a step calls at least ``least`` times, such as a recurrent cell."""
    rows = _norms(view, kind)
    links = _links(rows[rows["name"].isin(["", "0"])])
    found: dict[ChainKey, list[tuple[Link, int]]] = grouped(
        ((root, link.module, module_class, kind), (replace(link, order=None), count))
        for link, (root, module_class), count in links
    )
    return [_chain(key, own) for key, own in found.items() if len(own) >= least]


def chains(view: RunView, kind: str, least: int) -> list[Chain]:
    """Return the chains of at least ``least`` layers for one kind of tensor; of each module the first tensor only."""
    rows = _norms(view, kind)
    found: dict[ChainKey, list[tuple[Link, int]]] = {}
    for link, (root, module_class), count in _links(rows[(rows["call"] == 0) & rows["name"].isin(["", "0", "weight"])]):
        match = _NUMBER.search(link.module) or _NUMBERED.search(link.module)  # the first number is the layer's
        if match is not None:
            pattern = f"{link.module[: match.start(1)]}*{link.module[match.end(1) :]}"
            key = root, pattern, module_class, kind
            found.setdefault(key, []).append((replace(link, index=int(match.group(1))), count))
    return [_chain(key, own) for key, own in found.items() if len(own) >= least]


def joined_chains(view: RunView, kind: str, least: int) -> list[Chain]:
    """Join chains of one class that run one after the other, such as an encoder's and a decoder's.

    Only for kinds of the backward pass, which runs from the last layer to the first. Chains that alternate
    (``blocks.*.up`` and ``blocks.*.down``) or whose order is unknown are not joined.
    """
    in_order = (c for c in chains(view, kind, 2) if all(k.order is not None for k in c.links))
    found = grouped(((c.root, c.module_class), c) for c in in_order)
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


@remembered
def _norms(view: RunView, kind: str) -> pd.DataFrame:
    """Return the rows of finite tensors of one kind on the examined steps."""
    steps = watched_steps(view)
    steps = steps[:: max(1, math.ceil(len(steps) / _STEPS))]
    rows = view.measured(("norm", "non_finite"), (kind,), columns=_COLUMNS, steps=steps)
    whole = (rows["non_finite"] == 0) & rows["norm"].notna() & (rows["numel"] > 0)
    return rows[whole & (rows["phase"] != "recompute")]


def _links(rows: pd.DataFrame) -> Iterator[tuple[Link, tuple[str, str], int]]:
    """Yield each call of a module as a link, its root and class, and the number of its rows; medians over the rows.

    The link's ``index`` is the call, its ``order`` that of the module's last row.
    """
    ids, modules = groups(rows, ("root", "module", "module_class", "call", "dtype")), groups(rows, ("root", "module"))
    sizes = pd.DataFrame({"norm": column(rows, "norm"), "rms": column(rows, "norm") / np.sqrt(column(rows, "numel"))})
    first = rows.iloc[firsts(ids)]
    order = column(rows, "order")[lasts(modules)][modules[firsts(ids)]].tolist()
    named = zip(*(first[c] for c in ("call", "module", "dtype", "root")), first["module_class"].map(text), strict=True)
    medians = zip(sizes.groupby(ids).median().to_numpy().tolist(), order, np.bincount(ids).tolist(), strict=True)
    for (call, module, dtype, root, module_class), ((norm, rms), place, count) in zip(named, medians, strict=True):
        known = None if math.isnan(place) else int(place)
        yield Link(call, module, dtype, norm, rms, known), (root, module_class), count


def _chain(key: ChainKey, links: Sequence[tuple[Link, int]]) -> Chain:
    ordered = sorted((k for k, _ in links), key=lambda k: (k.index, k.module, k.dtype))
    return Chain(*key, ordered, max(count for _, count in links))
