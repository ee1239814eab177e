"""The answers of the replaying modes of ``precdoctor whatif`` as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from precdoctor.diagnosis.claims.finding import jsonable
from precdoctor.diagnosis.offline.replay.accumulator import AccumulatorReplay
from precdoctor.diagnosis.offline.replay.fp8 import RecipeReplay
from precdoctor.diagnosis.offline.replay.loss_scale import LossScaleReplay
from precdoctor.reporting.json_report import answer_head


def answer_document(mode: str, asked: str, run: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """The envelope of an answer to a question other than the plain one: run, question, and the answer itself."""
    return {**answer_head(run), "question": {"mode": mode, "asked": asked}, **body}


def loss_scale_document(answer: LossScaleReplay, asked: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """One entry per scaler update under ``steps``: what the run did, what the policy would have done, the ideal."""
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
        "process": jsonable(answer.process),
        "format": answer.format,
        "hypothetical": answer.hypothetical,
        "policy": jsonable(replay.policy),
        "policy_used": jsonable(answer.used),
        "updates": answer.steps,
        "sampled": answer.sampled,
        "bounded_by_norm": answer.bounded,
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
    """Totals of every recipe tried; steps and tensors of the one asked for or found best."""
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
    """One entry per length of sum, the longest first."""
    return answer_document("accumulator", asked, run, jsonable(answer))
