"""A plan for inference as a table, as JSON and as TOML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from precdoctor.diagnosis.claims.finding import jsonable
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.offline.whatif.inference_plan import InferencePlan, TensorPlan
from precdoctor.diagnosis.offline.whatif.native import not_native
from precdoctor.reporting.json_report import answer_head
from precdoctor.reporting.run_head import print_head
from precdoctor.reporting.tables import Name, folded, left, right, table
from precdoctor.reporting.text import clean, size
from precdoctor.reporting.whatif_report import cache, described
from precdoctor.reporting.whatif_view import cache_words, decibels

_WIDE = "as recorded"


def print_plan(plan: InferencePlan, run: Mapping[str, Any], console: Console) -> None:
    """The plan as a table, with what it rests on."""
    print_head(run, console, f"Plan for inference, SQNR at least {plan.target.min_sqnr_db:g} dB")
    for kinds, words in ((("weight",), "weight"), (("kv_key", "kv_value"), "cache")):
        counts = Counter(_choice(t) for t in plan.tensors if t.seen.key.kind in kinds)
        for choice, count in counts.most_common():
            console.print(Text(f"{choice}: {plural(count, f'{words} tensor' if words == 'cache' else words)}"))
    tensor, why = {"header": "tensor", "ratio": 2}, folded("why not narrower", ratio=2)
    shown = table(tensor, *left("format"), *right("bits", "SQNR"), *why)
    for t in plan.tensors:
        shown.add_row(
            Name(_place(t)),
            Text(_choice(t), "pd.near" if t.recipe is None else "pd.good"),
            f"{t.bits:.4g}",
            "–" if t.prediction is None else decibels(t.prediction.sqnr_db.estimate),
            clean(t.reason),
        )
    console.print(Padding(shown, (1, 0, 0, 0)))
    console.print()
    for line in _lines(plan, run):
        console.print(Text(line))


def _choice(t: TensorPlan) -> str:
    return _WIDE if t.recipe is None else t.recipe.short()


def _place(t: TensorPlan) -> str:
    key = t.seen.key
    name = "" if key.kind == "weight" and key.name == "weight" else key.name
    return " ".join(word for word in (key.module or key.root, key.kind, name) if word)


def _lines(plan: InferencePlan, run: Mapping[str, Any]) -> Iterator[str]:
    now, then = (size(count) for count in plan.weights)
    yield f"Weights: {now} -> {then}. What has no weight matrix (norms, biases) stays as it is."
    if plan.cache:
        yield cache_words(plan.cache, "under the plan")
    yield "Scales follow the amax of what shares them. Numbers are of each tensor's worst call."
    yield from plan.warnings
    sentence = not_native(plan.recipes, run.get("device"))
    if sentence:
        yield sentence


def document(plan: InferencePlan, run: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as plain JSON values: modules with their tensors by kind."""
    modules: dict[tuple[str, str], dict[str, Any]] = {}
    for t in plan.tensors:
        key = t.seen.key
        entry: dict[str, Any] = {
            "root": key.root,
            "module": key.module,
            "module_class": t.seen.module_class or None,
            "operands": {},
        }
        operands = modules.setdefault((key.root, key.module), entry)["operands"]
        operands[key.kind if key.kind not in operands else f"{key.kind}.{key.name}"] = _tensor(t)
    return {
        **answer_head(run),
        "plan": {
            "of": "inference",
            "first_step": plan.steps[0],
            "last_step": plan.steps[-1],
            "recorded_steps": len(plan.steps),
            "min_sqnr_db": plan.target.min_sqnr_db,
            "weights": dict(zip(("now_bytes", "plan_bytes"), plan.weights, strict=True)),
            "cache": cache(plan.cache),
            "not_native": not_native(plan.recipes, run.get("device")),
            "warnings": list(plan.warnings),
        },
        "modules": list(modules.values()),
    }


def _tensor(t: TensorPlan) -> dict[str, Any]:
    kept = {"format": None, "scaling": None} if t.recipe is None else {**described(t.recipe), "scale": None}
    told = {name: jsonable(getattr(t.prediction, name, None)) for name in ("flushed", "saturated", "sqnr_db")}
    return {
        "tensor": t.seen.key.name,
        **kept,
        "dtype": t.seen.key.dtype,
        "bits_per_element": t.bits,
        "step": t.step,
        **told,
        "reason": t.reason or None,
    }
