"""Pairs rows of two runs: the same tensor on the same step and rank.

Modules that were renamed between the runs are matched by class, shapes and order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from precdoctor.diagnosis.survey.frames import firsts, groups, keys
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import IDENTITY
from precdoctor.numerics.arrays import Ints

if TYPE_CHECKING:
    from precdoctor.comparison.baseline import Expected
    from precdoctor.comparison.summary import Summary


#: Root and FQN of a module.
Module = tuple[str, str]
#: Module class, and ``(kind, name, shape)`` of its tensors: the facts that do not change when a module is renamed.
_Signature = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]


def names_by_structure(found: Mapping[Key, Summary], expected: Mapping[Key, Expected]) -> dict[Module, Module]:
    """Renamed modules, ``module in found -> module in expected``.

    Modules that only one side has are aligned in the order in which they were first recorded. The two of a pair have
    the same class, weights of the same names and shapes, and outputs of the same names. Modules without such a partner
    are left out.
    """
    ours, theirs = _signatures(found), _signatures(expected)
    alone = [m for m in ours if m not in theirs]
    missing = [m for m in theirs if m not in ours]
    matcher = SequenceMatcher(None, [ours[m] for m in alone], [theirs[m] for m in missing], autojunk=False)
    pairs: dict[Module, Module] = {}
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            pairs[alone[block.a + offset]] = missing[block.b + offset]
    return pairs


def translated(table: Mapping[Key, Summary], names: Mapping[Module, Module]) -> dict[Key, Summary]:
    """``table`` with its modules renamed by ``names``."""
    return {translate(key, names): summary for key, summary in table.items()}


def translate(key: Key, names: Mapping[Module, Module]) -> Key:
    """``key`` with its module renamed by ``names``."""
    root, module, kind, name, call = key
    new_root, new_module = names.get((root, module), (root, module))
    return (new_root, new_module, kind, name, call)


def names_by_rules(keys: Iterable[Key], rules: Iterable[tuple[str, str]]) -> dict[Module, Module]:
    """The modules that the rules ``(old prefix, new prefix)`` rename, ``module -> renamed module``.

    A prefix must end at a dot or at the end of the FQN; the empty prefix matches every module.
    """
    names: dict[Module, Module] = {}
    for root, module, *_ in keys:
        for old, new in rules:
            if old in ("", module) or module.startswith(f"{old}."):
                rest = module if old == "" else module[len(old) :].lstrip(".")
                names[root, module] = (root, ".".join(part for part in (new, rest) if part))
                break
    return names


def _signatures(table: Mapping[Key, Summary] | Mapping[Key, Expected]) -> dict[Module, _Signature]:
    tensors: dict[Module, list[tuple[str, str, tuple[int, ...]]]] = {}
    classes: dict[Module, str] = {}
    for (root, module, kind, name, _), summary in table.items():
        # Only shapes of weights count: those of activations vary with the batch. Only weights and outputs count:
        # optimizer rows are missing on some steps.
        shape = summary.shape if kind == "weight" else ()
        if kind in ("weight", "output"):
            tensors.setdefault((root, module), []).append((kind, name, shape))
            classes[root, module] = summary.module_class
    return {module: (classes[module], tuple(sorted(set(found)))) for module, found in tensors.items()}


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of rows of two frames, ordered by step and rank, then as in the first frame.

    Attributes:
        keys: the tensors, named as in the first run.
        tensor: index into ``keys`` for each pair, shape ``(pairs,)``.
        first, second: the paired rows of the two frames, numbered from 0.
    """

    keys: Sequence[Key]
    tensor: Ints
    first: pd.DataFrame
    second: pd.DataFrame


def pair_rows(first: pd.DataFrame, second: pd.DataFrame, names: Mapping[Module, Module]) -> Pairs:
    """Pair rows by step, rank, tensor and phase; if several attempts have the row, the last attempt's counts.

    Args:
        first, second: measured frames with the column ``phase``.
        names: renamed modules, ``module in second -> module in first``.
    """
    known: dict[Key, int] = {}
    phases: dict[str, int] = {}
    tables = []
    for frame, renames in ((first, {}), (second, names)):
        tensors, phase = groups(frame, IDENTITY), groups(frame, ("phase",))
        own = [known.setdefault(translate(k, renames), len(known)) for k in keys(frame.iloc[firsts(tensors)])]
        run_through = [phases.setdefault(str(p), len(phases)) for p in frame["phase"].iloc[firsts(phase)]]
        numbers = {"tensor": np.array(own, np.int64)[tensors], "phase": np.array(run_through, np.int64)[phase]}
        at = {name: frame[name].to_numpy() for name in ("step", "rank", "attempt")}
        tables.append(pd.DataFrame({**at, **numbers, "row": np.arange(len(frame))}))
    identity = ["step", "rank", "tensor", "phase"]
    ours, theirs = (t.sort_values("attempt", kind="stable").drop_duplicates(identity, keep="last") for t in tables)
    pairs = ours.merge(theirs, on=identity, suffixes=("_a", "_b")).sort_values(["step", "rank", "row_a"], kind="stable")
    a, b = (frame.iloc[pairs[row]].reset_index(drop=True) for frame, row in ((first, "row_a"), (second, "row_b")))
    return Pairs(list(known), pairs["tensor"].to_numpy(), a, b)
