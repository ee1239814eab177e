"""A plan for inference as a table, as JSON and as TOML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import precdoctor
from precdoctor.diagnosis.claims.finding import jsonable
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.offline.whatif.inference_plan import InferencePlan, TensorPlan
from precdoctor.diagnosis.offline.whatif.native import not_native
from precdoctor.reporting.json_report import SCHEMA_VERSION
from precdoctor.reporting.names import Name
from precdoctor.reporting.terminal import run_facts
from precdoctor.reporting.text import clean, size
from precdoctor.reporting.whatif_report import cache, described
from precdoctor.reporting.whatif_view import cache_words, decibels

_WIDE = "as recorded"


def print_plan(plan: InferencePlan, run: Mapping[str, Any], console: Console) -> None:
    """The plan as a table, with what it rests on."""
    console.print(Text(clean(run.get("path", "")), "pd.strong"), soft_wrap=True)
    console.print(Text(run_facts(run)))
    console.print(Text(f"\nPlan for inference, SQNR at least {plan.target.min_sqnr_db:g} dB", "pd.strong"))
    for kinds, words in ((("weight",), "weight"), (("kv_key", "kv_value"), "cache")):
        counts = Counter(_choice(t) for t in plan.tensors if t.seen.key.kind in kinds)
        for choice, count in counts.most_common():
            console.print(Text(f"{choice}: {plural(count, f'{words} tensor' if words == 'cache' else words)}"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="pd.label", pad_edge=False)
    table.add_column("tensor", ratio=2)
    table.add_column("format", no_wrap=True)
    table.add_column("bits", justify="right", no_wrap=True)
    table.add_column("SQNR", justify="right", no_wrap=True)
    table.add_column("why not narrower", overflow="fold", ratio=2)
    for t in plan.tensors:
        table.add_row(
            Name(_place(t)),
            Text(_choice(t), "pd.near" if t.recipe is None else "pd.good"),
            f"{t.bits:.4g}",
            "–" if t.prediction is None else decibels(t.prediction.sqnr_db.estimate),
            clean(t.reason),
        )
    console.print(Padding(table, (1, 0, 0, 0)))
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
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "precdoctor", "version": precdoctor.__version__},
        "run": jsonable(run),
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
