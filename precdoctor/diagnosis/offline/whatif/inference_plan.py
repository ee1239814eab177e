"""Precision plans for inference: the narrowest format for each weight matrix and each cache of keys or values.

The flushed share is not limited: it matters for small gradients and updates, which inference does not have. The limits
are those of the SQNR (for integers also that of the smaller elements) and of saturation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from precdoctor.diagnosis.offline.whatif.cache import LayerCache, cache_of, token_bytes
from precdoctor.diagnosis.offline.whatif.forecast import Forecast, forecast_of
from precdoctor.diagnosis.offline.whatif.gather import FEW_STEPS, Gathered, Seen, Selection, gather
from precdoctor.diagnosis.offline.whatif.operands import modules_with_operands
from precdoctor.diagnosis.offline.whatif.recipe import CACHED, INFERENCE_LADDER, Recipe
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.errors import UsageError
from precdoctor.numerics.prediction import Prediction
from precdoctor.runlog.shell import quoted_path

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

_KINDS = ("batch", "input", "output", "weight", *CACHED)


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one weight, or of the keys or values of one layer.

    Attributes:
        recipe: None if the tensor stays as it was recorded.
        bits: per element, with scales; those that all tokens share are left out.
        step: the worst step; None if the tensor stays as it is.
        prediction: at the worst step; None if the tensor stays as it is.
        reason: why the next narrower choice fails; empty if there is none.
    """

    seen: Seen
    recipe: Recipe | None
    bits: float
    step: int | None
    prediction: Prediction | None
    reason: str


@dataclass(frozen=True)
class InferencePlan:
    """A precision plan for inference.

    Attributes:
        tensors: weights and caches in execution order.
        steps: the recorded calls it is based on, ascending.
        weights: bytes of the planned weights, now and under the plan.
        cache: the layers of the cache, in execution order.
    """

    target: Target
    tensors: tuple[TensorPlan, ...]
    steps: tuple[int, ...]
    weights: tuple[int, int]
    cache: tuple[LayerCache, ...]
    warnings: tuple[str, ...]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(dict.fromkeys(t.recipe for t in self.tensors if t.recipe is not None))


def make_inference_plan(
    run: Run, target: Target, *, module: str | None = None, steps: tuple[int | None, int | None] = (None, None)
) -> InferencePlan:
    """Plan every weight matrix and every cache of keys and values.

    Args:
        run: a recording by ``record --inference``.
        target: the limits to meet; that of the flushed share is ignored.
        module: a glob over module names; None means all.
        steps: half-open range of the calls to base the plan on.

    Raises:
        UsageError: there is no such tensor.
        RunUnreadableError: the log is damaged.
    """
    target = replace(target, max_flushed=math.inf)
    gathered = gather(run, Selection(lambda _key: True, _KINDS, steps), INFERENCE_LADDER, target)
    keep = _wide_weights(gathered, run)
    chosen = [s for s in gathered.seen if module is None or fnmatchcase(s.key.module, module)]
    planned = [s for s in chosen if s.key.kind in CACHED or (s.key.kind == "weight" and s.is_matrix)]
    if not planned:
        among = f" matching {module!r}" if module is not None else ""
        hint = f"`precdoctor show {quoted_path(run.path)}` lists what is there"
        raise UsageError(f"no module{among} has a recorded weight matrix or cache to plan for; {hint}")
    tensors = tuple(_tensor_plan(s, target, keep.get((s.key.root, s.key.module), "")) for s in _in_order(planned))
    recipes = {t.seen.key: t.recipe for t in tensors}
    weights = [t for t in tensors if t.seen.key.kind == "weight"]
    return InferencePlan(
        target,
        tensors,
        tuple(gathered.steps),
        (round(sum(_bytes(t.seen, None) for t in weights)), round(sum(_bytes(t.seen, t.recipe) for t in weights))),
        tuple(cache_of(planned, lambda s: recipes[s.key])),
        tuple(_warnings(gathered, any(s.key.kind in CACHED for s in planned))),
    )


def _wide_weights(gathered: Gathered, run: Run) -> dict[tuple[str, str], str]:
    """Return why weights stay wide whatever their numbers say, by module: embeddings, routers, the final logits."""
    modules = modules_with_operands(gathered.seen, run)
    return {(m.weight.key.root, m.weight.key.module): m.keep for m in modules if m.keep}


def _in_order(tensors: Sequence[Seen]) -> list[Seen]:
    """Sort tensors in the log's order, with the caches of a module after the weights of its children."""
    places: dict[tuple[str, str], int] = {}
    for s in tensors:
        places.setdefault((s.key.root, s.key.module.rpartition(".")[0]), len(places))
    kinds = ("weight", *CACHED)

    def key(s: Seen) -> tuple[int, int]:
        at = places.get((s.key.root, s.key.module)) if s.key.kind in CACHED else None
        own = places[s.key.root, s.key.module.rpartition(".")[0]]
        return own if at is None else at, kinds.index(s.key.kind)

    return sorted(tensors, key=key)


def _tensor_plan(seen: Seen, target: Target, keep: str) -> TensorPlan:
    """Choose the recipe with the fewest bits that meets the target; none if no recipe does, or because of ``keep``."""
    now = _bits(seen, None)
    if keep:
        return TensorPlan(seen, None, now, None, None, f"{keep}: kept wide whatever the numbers say")
    fitting = [r for r in INFERENCE_LADDER if r.applies_to(seen.key.kind) and _bits(seen, r) < now]
    reason = ""
    for recipe in sorted(fitting, key=lambda r: _bits(seen, r)):
        one = forecast_of(seen, recipe, target)
        if one.prediction is None:
            reason = reason or (one.unknown or "")
        elif one.misses:
            reason = f"{recipe.short()} at step {one.step}: {_miss_words(one)}"
        else:
            return TensorPlan(seen, recipe, _bits(seen, recipe), one.step, one.prediction, reason)
    return TensorPlan(seen, None, now, None, None, reason)


def _miss_words(one: Forecast) -> str:
    assert one.prediction is not None
    if "sqnr" not in one.misses and one.prediction.bulk_sqnr_db is not None:
        return f"SQNR {one.prediction.bulk_sqnr_db:.1f} dB without the largest tenth"
    return f"SQNR {one.prediction.sqnr_db.estimate:.1f} dB"


def _bits(seen: Seen, recipe: Recipe | None) -> float:
    return 8 * _bytes(seen, recipe) / max(math.prod(seen.shape), 1)


def _bytes(seen: Seen, recipe: Recipe | None) -> float:
    """Return the bytes of the whole tensor under a recipe; as recorded without one."""
    elements = math.prod(seen.shape)
    if seen.key.kind in CACHED and len(seen.shape) == 4:
        return token_bytes(seen, recipe) * elements / max(seen.shape[1] * seen.shape[3], 1)
    return elements * (seen.bits if recipe is None else recipe.bits_per_element) / 8


def _warnings(gathered: Gathered, cached: bool) -> Iterator[str]:
    first, last, count = gathered.steps[0], gathered.steps[-1], len(gathered.steps)
    calls = f"{count} recorded call{'s' * (count > 1)} (steps {first} to {last})"
    few = "few, so record more prompts" if count < FEW_STEPS else "prompts unlike these may hold larger outliers"
    yield f"Rests on {calls}: {few}."
    if not cached:
        yield "No keys and values were recorded: the model keeps no cache that can be found, and attends unseen."
