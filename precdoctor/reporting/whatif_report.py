"""Renders the answers of ``whatif`` as JSON: one row per tensor for a change of format, in the form of
``schema/whatif-1.schema.json``; and the replays of loss scalers, FP8 recipes and accumulators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from precdoctor.diagnosis.offline.replay.accumulator import AccumulatorReplay
from precdoctor.diagnosis.offline.replay.fp8 import RecipeReplay
from precdoctor.diagnosis.offline.replay.loss_scale import LossScaleReplay
from precdoctor.diagnosis.offline.whatif.cache import LayerCache, cache_of
from precdoctor.diagnosis.offline.whatif.forecast import Answer, Forecast
from precdoctor.diagnosis.offline.whatif.recipe import Recipe
from precdoctor.numerics.cast_counts import CastCounts
from precdoctor.numerics.prediction import Prediction
from precdoctor.reporting.json_report import answer_head
from precdoctor.runlog.atomic import jsonable

_QUANTITIES = (
    *("elements", "flushed", "subnormal", "saturated", "sqnr_db", "relative_error", "headroom_binades"),
    *("scales_flushed", "bulk_sqnr_db"),
)


def document(answer: Answer, run: Mapping[str, Any]) -> dict[str, Any]:
    """The answer on a format as JSON values; non-finite numbers are the strings "NaN", "Infinity", "-Infinity".

    ``run`` is as in a diagnosis.
    """
    question = answer.question
    return {
        **answer_head(run),
        "question": {
            **described(question.recipe),
            "loss_scale": question.recipe.loss_scale,
            "kinds": list(answer.kinds),
            "module": question.module,
            "steps": list(question.steps),
            "target": jsonable(question.target),
        },
        "tensors": [tensor(f, question.recipe) for f in answer.forecasts],
        "cache": cache(cache_of((f.seen for f in answer.forecasts), lambda _: question.recipe)),
        "totals": {
            "tensors": len(answer.forecasts),
            "failing": len(answer.failing),
            "unknown": len(answer.unknown),
            "steps": len(answer.steps),
            "rows": answer.rows,
            "rows_left_out_non_finite": answer.non_finite,
            "vectors_left_out": answer.vectors,
            **_fractions(together(answer)),
        },
    }


def cache(layers: Sequence[LayerCache]) -> dict[str, Any] | None:
    """Bytes per token of the KV cache, as recorded and in the asked format; None without rows of keys and values."""
    if not layers:
        return None
    each = [{**jsonable(layer), "bytes_per_token": _bytes([layer])} for layer in layers]
    for layer in each:
        del layer["now"], layer["asked"]
    return {"bytes_per_token": _bytes(layers), "layers": each}


def _bytes(layers: Sequence[LayerCache]) -> dict[str, float]:
    return {"now": sum(layer.now for layer in layers), "asked": sum(layer.asked for layer in layers)}


def together(answer: Answer) -> CastCounts:
    """The sums of the totals of all tensors."""
    return sum((f.totals for f in answer.forecasts), CastCounts(np.zeros(7)))


def tensor(forecast: Forecast, recipe: Recipe) -> dict[str, Any]:
    """The JSON row of a tensor: the prediction for its worst step, and shares over all its steps."""
    key, instead = forecast.seen.key, forecast.instead
    return {
        **jsonable(key),
        "module_class": forecast.seen.module_class or None,
        "step": forecast.step,
        "rank": forecast.rank,
        "call": forecast.call,
        **described(recipe),
        **_prediction(forecast.prediction),
        "holds": forecast.holds,
        "misses": list(forecast.misses),
        "unknown": forecast.unknown,
        "flushed_with_lost": jsonable(forecast.flushed),
        "lost_before": jsonable(forecast.lost_before),
        "all_steps": {
            "rows": forecast.seen.rows,
            "rows_left_out_non_finite": forecast.seen.non_finite,
            **_fractions(forecast.totals),
        },
        "instead": None if instead is None else {**described(instead.recipe), **_prediction(instead.prediction)},
    }


def described(recipe: Recipe) -> dict[str, Any]:
    """Format and scaling of a recipe as JSON values; callers replace ``scale`` by the prediction's, if there is one."""
    return {
        "format": recipe.name,
        "scaling": recipe.scaling,
        "scale": recipe.scale,
        "scale_rule": recipe.rule.value if recipe.rule is not None else None,
        "bits_per_element": recipe.bits_per_element,
    }


def _prediction(prediction: Prediction | None) -> dict[str, Any]:
    scale = {} if prediction is None else {"scale": jsonable(prediction.scale)}
    return {**{name: jsonable(getattr(prediction, name, None)) for name in _QUANTITIES}, **scale}


def _fractions(totals: CastCounts) -> dict[str, Any]:
    flushed, saturated = totals.shares()
    return {"elements": int(totals.elements), "flushed": jsonable(flushed), "saturated": jsonable(saturated)}


def answer_document(mode: str, asked: str, run: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a replay or of optimizer states: run, question, and the keys of ``body``."""
    return {**answer_head(run), "question": {"mode": mode, "asked": asked}, **body}


def loss_scale_document(answer: LossScaleReplay, asked: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """A replay of a loss scaler; ``steps`` has the recorded, the replayed and the ideal scale of each scaler update."""
    replay = answer.replay
    recorded = set(answer.recorded_overflows)
    steps = [
        {
            **jsonable(step),
            "recorded_scale": jsonable(scale),
            "recorded_overflow": step.step in recorded,
            "ideal_scale": jsonable(ideal),
        }
        for step, scale, ideal in zip(replay.steps, answer.recorded_scales, answer.ideal, strict=True)
    ]
    body = {
        "process": jsonable(answer.run.process),
        "format": answer.run.format.name,
        "hypothetical": answer.run.hypothetical,
        "policy": jsonable(replay.policy),
        "policy_used": jsonable(answer.used),
        "updates": len(answer.run.updates),
        "sampled": answer.run.sampled,
        "bounded_by_norm": answer.run.bounded,
        "skipped": answer.overflows,
        "uncertain": replay.uncertain_steps,
        "flushed": jsonable(replay.flushed),
        "flushed_steps": replay.flushed_steps,
        "lost": jsonable(replay.lost),
        "end": jsonable(replay.end),
        "best": [jsonable(score) for score in answer.scores],
        "culprits": [jsonable(culprit) for culprit in answer.culprits],
        "steps": steps,
        "notes": list(answer.notes),
    }
    return answer_document("loss-scaler", asked, run, body)


def recipe_document(
    replays: Sequence[RecipeReplay], best: RecipeReplay | None, asked: str, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Replays of FP8 recipes: the totals of each, and steps and tensors of the best, or without a search the first."""
    shown = best or replays[0]
    totals = [
        {
            "recipe": r.recipe,
            "flushed": jsonable(r.flushed),
            "saturated": jsonable(r.saturated),
            "stale_tensors": r.stale_tensors,
            "tensors": len(r.tensors),
        }
        for r in replays
    ]
    steps, tensors = ([jsonable(part) for part in parts] for parts in (shown.steps, shown.tensors))
    body = {"recipe": shown.recipe, "recipes": totals, "steps": steps, "tensors": tensors}
    return answer_document("recipe", asked, run, body)


def accumulator_document(answer: AccumulatorReplay, asked: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """A replay of accumulators, one entry per length of sum, the longest first."""
    return answer_document("accumulator", asked, run, jsonable(answer))
