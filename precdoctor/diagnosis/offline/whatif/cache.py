"""Size of the key-value cache in bytes per token, now and under a recipe, from recorded shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from precdoctor.diagnosis.offline.whatif.gather import Seen
from precdoctor.diagnosis.offline.whatif.recipe import CACHED, SCALE_BITS, Recipe
from precdoctor.diagnosis.survey.rows import grouped


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer; bytes are of one token of one sequence.

    Attributes:
        tensors: 2, or 1 if only keys or only values were recorded.
        heads, features: number of heads in the cache (not of the queries), and features of each.
        now, asked: bytes as recorded; bytes under the recipe, with the token's own scales. Scales that all tokens share
            are negligible and left out.
    """

    root: str
    module: str
    name: str
    tensors: int
    heads: int
    features: int
    now: float
    asked: float


def cache_of(seen: Iterable[Seen], recipe: Callable[[Seen], Recipe | None]) -> list[LayerCache]:
    """Return the layers of a cache in execution order; empty without keys and values.

    Args:
        seen: tensors; other kinds are left out.
        recipe: returns the recipe of a tensor; None if it stays as recorded.
    """
    tensors = [s for s in seen if s.key.kind in CACHED and len(s.shape) == 4]
    tensors.sort(key=lambda s: (s.place[:3], s.place[3] or 0))
    layers = grouped(((s.key.root, s.key.module, s.key.name), s) for s in tensors)
    found = []
    for (root, module, name), both in layers.items():
        first = min(both, key=lambda s: s.key.kind)
        asked = sum(token_bytes(s, recipe(s)) for s in both)
        now = sum(token_bytes(s, None) for s in both)
        found.append(LayerCache(root, module, name, len(both), first.shape[1], first.shape[3], now, asked))
    return found


def token_bytes(seen: Seen, recipe: Recipe | None) -> float:
    """Return the bytes of one token in a tensor of keys or values; as recorded without a recipe."""
    heads, features = seen.shape[1], seen.shape[3]
    if recipe is None:
        return heads * features * seen.bits / 8
    bits = features * float(recipe.format.bits)
    if recipe.block is not None:
        bits += math.ceil(features / recipe.block.block[1]) * recipe.block.scale.bits
    elif recipe.scaling == "token":
        bits += SCALE_BITS
    elif recipe.scaling == "group128":
        bits += math.ceil(features / 128) * SCALE_BITS
    return heads * bits / 8
