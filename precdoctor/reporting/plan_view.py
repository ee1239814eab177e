"""Renders a precision plan, for training or for inference, as a table, as TOML and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.claims.words import memory, module_label, percent, plural, several_models
from precdoctor.diagnosis.offline.whatif.inference_plan import InferencePlan, TensorPlan
from precdoctor.diagnosis.offline.whatif.native import not_native
from precdoctor.diagnosis.offline.whatif.plan import WIDE, ModulePlan, OperandPlan, Plan
from precdoctor.reporting.json_report import answer_head
from precdoctor.reporting.run_head import print_head
from precdoctor.reporting.tables import Name, folded, left, right, table
from precdoctor.reporting.text import clean, tensor_label
from precdoctor.reporting.whatif_report import cache, described
from precdoctor.reporting.whatif_view import cache_words, decibels
from precdoctor.runlog.atomic import jsonable
from precdoctor.runlog.toml import toml_value

_STYLES = {"fp8": "pd.good", "mxfp8": "pd.good", "bf16": "", WIDE: "pd.near"}
_WORDS = {
    "fp8": "weight and input E4M3FN, grad_output E5M2, amax scaling per tensor",
    "mxfp8": "all three MXFP8_E4M3, blocks of 32",
    "bf16": "all three BF16",
    WIDE: "as recorded",
}


def print_plan(plan: Plan, run: Mapping[str, Any], console: Console, *, remark: str | None = None) -> None:
    """Print a plan for training: ``remark`` on the run, table, memory saved, and assumptions."""
    counts = Counter(m.precision for m in plan.modules)
    totals = [
        Text.assemble((f"{name:<6}", _STYLES[name]), f"{plural(counts[name], 'module')}: {words}")
        for name, words in _WORDS.items()
        if counts[name]
    ]
    module, why = {"header": "module", "ratio": 2}, folded("why not narrower", ratio=3)
    shown = table(module, *left("precision"), *right("flushed", "SQNR"), *why)
    several = several_models((m.root, m.module) for m in plan.modules)
    for m in plan.modules:
        worst = min(m.operands, key=lambda o: o.prediction.sqnr_db.estimate, default=None)
        flushed = max((o.prediction.flushed.estimate for o in m.operands), default=None)
        shown.add_row(
            Name(module_label(m.root, m.module, several=several)),
            Text(m.precision, _STYLES[m.precision]),
            percent(flushed),
            "–" if worst is None else decibels(worst.prediction.sqnr_db.estimate),
            clean(m.reason),
        )
    _print(run, console, "Precision plan", remark, totals, shown, _lines(plan, run))


def _print(
    run: Mapping[str, Any],
    console: Console,
    title: str,
    remark: str | None,
    totals: Iterable[Text],
    shown: Table,
    lines: Iterable[str],
) -> None:
    print_head(run, console, title)
    if remark is not None:
        console.print(Text(remark, "pd.near"))
    for total in totals:
        console.print(total)
    console.print(Padding(shown, (1, 0, 0, 0)))
    console.print()
    for line in lines:
        console.print(Text(line))


def _lines(plan: Plan, run: Mapping[str, Any]) -> Iterator[str]:
    """The sentences below the table: memory saved, assumptions, warnings."""
    pairs = (plan.memory.weights, plan.memory.inputs)
    weights, inputs = (" -> ".join(memory(count) for count in pair) for pair in pairs)
    yield (
        f"Weights as products take them: {weights}; inputs kept for the backward pass: {inputs} per micro-step. "
        "Master weights, gradients and optimizer state stay as they are."
    )
    yield (
        f"Numbers are of the worst operand at its worst step, with amax extrapolated from step {plan.steps[-1]} to "
        f"step {plan.horizon} by its trend. What has no weight matrix (norms, softmax, loss) stays wide."
    )
    yield from plan.warnings
    yield from filter(None, [not_native(plan.recipes, run.get("device"))])


def document(plan: Plan, run: Mapping[str, Any], remark: str | None = None) -> dict[str, Any]:
    """A plan for training as JSON values; a ``remark`` on the run is the first of its warnings."""
    return {
        **answer_head(run),
        "plan": {
            **_steps(plan),
            "horizon": plan.horizon,
            "target": jsonable(plan.target),
            "precisions": _WORDS,
            "memory": {
                name: dict(zip(("now_bytes", "plan_bytes"), getattr(plan.memory, name), strict=True))
                for name in ("weights", "inputs")
            },
            **_caveats(plan, run, remark),
        },
        "modules": [_module(m) for m in plan.modules],
    }


def _steps(plan: Plan | InferencePlan) -> dict[str, int]:
    return {"first_step": plan.steps[0], "last_step": plan.steps[-1], "recorded_steps": len(plan.steps)}


def _caveats(plan: Plan | InferencePlan, run: Mapping[str, Any], remark: str | None) -> dict[str, Any]:
    warnings = [*filter(None, [remark]), *plan.warnings]
    return {"not_native": not_native(plan.recipes, run.get("device")), "warnings": warnings}


def _module(m: ModulePlan) -> dict[str, Any]:
    return {
        "root": m.root,
        "module": m.module,
        "module_class": m.module_class or None,
        "precision": m.precision,
        "reason": m.reason or None,
        "not_recorded": list(m.not_recorded),
        "weight_elements": m.weight_elements,
        "operands": {o.role: _operand(o) for o in m.operands},
    }


def _operand(o: OperandPlan) -> dict[str, Any]:
    return {
        "tensor": o.source,
        **described(o.recipe),
        "scale": None,  # follows amax; a plan fixes none
        "step": o.step,
        "growth_binades": o.growth,
        **{name: jsonable(getattr(o.prediction, name)) for name in ("flushed", "saturated", "sqnr_db")},
    }


def toml(document: Mapping[str, Any]) -> str:
    """The JSON document of a plan, for training or inference, as TOML 1.0; keys with None are left out."""
    whole = dict(document)
    whole["run"] = {k: whole["run"].get(k) for k in ("path", "first_step", "last_step", "steps", "sampled_steps")}
    modules = whole.pop("modules")
    lines = ["# A precision plan: which modules can go how narrow. Made by precdoctor whatif --plan."]
    scalars = {k: v for k, v in whole.items() if not isinstance(v, dict)}
    lines += _pairs(scalars)
    for name, entries in whole.items():
        if isinstance(entries, dict):
            lines += ["", f"[{name}]", *_pairs(entries)]
    for module in modules:
        lines += ["", "[[modules]]", *_pairs({k: v for k, v in module.items() if k != "operands"})]
        for role, operand in module["operands"].items():
            lines += [f"[modules.{role}]", *_pairs(operand)]
    return "\n".join(lines) + "\n"


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {toml_value(value, clean)}" for key, value in table.items() if value is not None]


def print_inference_plan(
    plan: InferencePlan, run: Mapping[str, Any], console: Console, *, remark: str | None = None
) -> None:
    """Print a plan for inference: ``remark`` on the run, table, memory saved, and assumptions."""
    totals = []
    for kinds, words in ((("weight",), "weight"), (("kv_key", "kv_value"), "cache tensor")):
        counts = Counter(_choice(t) for t in plan.tensors if t.seen.key.kind in kinds)
        totals += [Text(f"{choice}: {plural(count, words)}") for choice, count in counts.most_common()]
    tensor, why = {"header": "tensor", "ratio": 2}, folded("why not narrower", ratio=2)
    shown = table(tensor, *left("format"), *right("bits", "SQNR"), *why)
    several = several_models((t.seen.key.root, t.seen.key.module) for t in plan.tensors)
    for t in plan.tensors:
        key = t.seen.key
        shown.add_row(
            Name(tensor_label(module_label(key.root, key.module, several=several), key.kind, key.name)),
            Text(_choice(t), "pd.near" if t.recipe is None else "pd.good"),
            f"{t.bits:.4g}",
            "–" if t.prediction is None else decibels(t.prediction.sqnr_db.estimate),
            clean(t.reason),
        )
    title = f"Plan for inference, SQNR at least {plan.target.min_sqnr_db:g} dB"
    _print(run, console, title, remark, totals, shown, _inference_lines(plan, run))


def _choice(t: TensorPlan) -> str:
    return _WORDS[WIDE] if t.recipe is None else t.recipe.short()


def _inference_lines(plan: InferencePlan, run: Mapping[str, Any]) -> Iterator[str]:
    now, then = (memory(count) for count in plan.weights)
    yield f"Weights: {now} -> {then}. What has no weight matrix (norms, biases) stays as it is."
    if plan.cache:
        yield cache_words(plan.cache, "under the plan")
    yield "Scales follow the amax of what shares them. Numbers are of each tensor's worst call."
    yield from plan.warnings
    yield from filter(None, [not_native(plan.recipes, run.get("device"))])


def inference_document(plan: InferencePlan, run: Mapping[str, Any], remark: str | None = None) -> dict[str, Any]:
    """A plan for inference as JSON values: modules with their tensors by kind; ``remark`` as in :func:`document`."""
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
        operands[key.kind if key.kind not in operands else f"{key.kind}.{key.name}"] = _planned_tensor(t)
    return {
        **answer_head(run),
        "plan": {
            "of": "inference",
            **_steps(plan),
            "min_sqnr_db": plan.target.min_sqnr_db,
            "weights": dict(zip(("now_bytes", "plan_bytes"), plan.weights, strict=True)),
            "cache": cache(plan.cache),
            **_caveats(plan, run, remark),
        },
        "modules": list(modules.values()),
    }


def _planned_tensor(t: TensorPlan) -> dict[str, Any]:
    recipe = {"format": None, "scaling": None} if t.recipe is None else {**described(t.recipe), "scale": None}
    figures = {name: jsonable(getattr(t.prediction, name, None)) for name in ("flushed", "saturated", "sqnr_db")}
    return {
        "tensor": t.seen.key.name,
        **recipe,
        "dtype": t.seen.key.dtype,
        "bits_per_element": t.bits,
        "step": t.step,
        **figures,
        "reason": t.reason or None,
    }
