"""PD203, layers that no gradient ever reaches: detached, or not used by the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from precdoctor.diagnosis.analyses.parameters import recorded_parameters
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import named, plural
from precdoctor.diagnosis.survey.frames import PARAMETER, firsts, groups, parameters
from precdoctor.diagnosis.survey.rows import Parameter, dotted, integer
from precdoctor.diagnosis.survey.view import RunView


def find_unreached(
    view: RunView, gradients: Collection[Parameter], steps: Sequence[int], least: float
) -> dict[Parameter, bool]:
    """The trainable weight matrices that never got a gradient, and whether their module runs under ``no_grad`` only.

    Their module ran on at least ``least`` of the steps, in training mode if an optimizer holds them that trains others.
    Without one it ran in a root whose other weights were trained, and not only under ``no_grad``. Left out are weights
    that move all the same: an average of other weights, or one that shares their memory.
    """
    trained = {root for root, _, _ in gradients}
    reached = {(root, module) for root, module, _ in gradients} | _stepped_modules(view, steps)
    rows = view.measured((), ("output",), columns=("phase",), steps=steps)
    rows = rows[rows["phase"].isin(("train", "no_grad"))]
    rows = rows.iloc[firsts(groups(rows, ("root", "module", "step", "phase")))]
    runs = {phase: Counter(zip(r["root"], r["module"], strict=True)) for phase, r in rows.groupby("phase")}
    with_grad, without = (runs.get(phase, Counter()) for phase in ("train", "no_grad"))
    moved = _moved_weights(view, steps)
    found: dict[Parameter, bool] = {}
    for process in view.processes:
        known = list(recorded_parameters(view, process))
        training = {g for place, p in known if place in gradients and (g := _optimizer_of(p)) is not None}
        for place, p in known:
            layer = place[:2]
            if layer in reached or place in moved or not p.get("requires_grad") or len(p.get("shape") or ()) < 2:
                continue
            held = _optimizer_of(p) in training and not p.get("evaluating")
            blocked = held and not with_grad[layer] and without[layer] >= least
            if blocked or ((held or place[0] in trained) and with_grad[layer] >= least):
                found[place] = blocked
    return found


def _optimizer_of(parameter: Mapping[str, Any]) -> int | None:
    """Return the number of the optimizer that holds a parameter; None without one."""
    group = parameter.get("group")
    return integer(group[0]) if isinstance(group, list) and group else None


def _moved_weights(view: RunView, steps: Sequence[int]) -> set[Parameter]:
    """The weights whose bits differ between steps of a process."""
    rows = view.measured((), ("weight",), columns=("fingerprint",), steps=steps)
    rows = rows[rows["fingerprint"].notna()].drop_duplicates(["rank", "attempt", *PARAMETER, "fingerprint"])
    seen = rows.duplicated(["rank", "attempt", *PARAMETER])
    return set(parameters(rows[seen]))


def _stepped_modules(view: RunView, steps: Sequence[int]) -> set[tuple[str, str]]:
    """Root and module of all weights for which an optimizer received a non-zero gradient.

    A pipeline schedule may write ``grad`` itself, so that the log has no ``weight_grad`` for a trained module.
    """
    rows = view.measured((), ("weight_grad_step",), columns=("numel", "zero"), steps=steps)
    rows = rows[rows["zero"] != rows["numel"]]
    return set(zip(rows["root"], rows["module"], strict=True))


def unreached_finding(rule: Rule, view: RunView, places: Mapping[Parameter, bool], steps: int, least: float) -> Finding:
    """The finding for all weights that no gradient reached on this number of steps, at the first of them."""
    (root, module, _), blocked = next(iter(places.items()))
    names = [dotted(m, n) for _, m, n in places]
    why = "detached, or not used by the loss"
    if blocked:
        why = "it ran under `torch.no_grad()` only" if len(names) == 1 else "the first ran under `torch.no_grad()` only"
        why += ", in training mode, and the optimizer holds it"
    return rule.finding(
        severity=Severity.INFO,
        confidence=0.8,
        title=f"no gradient ever reaches `{module or root}`, although it runs and requires one",
        message=f"Over {plural(steps, 'recorded step')} (limit {least:g}) {named(names)} took part in "
        f"the forward pass and never got a gradient: {why}. Freeze weights that need no training.",
        location=Location(root, module, view.module_classes.get((root, module)) or None, "weight_grad", Phase.BACKWARD),
        evidence={
            "weights": names[:16],
            "steps": steps,
            "limit": least,
            "under_no_grad": blocked,
            "confidence_reason": "its gradient was never recorded, those of other layers of the model were",
        },
        prescription=freeze(root, module, len(names)),
    )


def freeze(root: str, module: str, weights: int, name: str = "") -> Prescription:
    """Freeze a module that the loss gives no gradient, or use its output; or one of its parameters (``name``)."""
    what, change, target = f"freeze `{module or root}`, or use its output in the loss", {}, module_expression(module)
    if name:
        what, change = f"feed `{dotted(module, name)}` something other than zeros, or freeze it", {"parameter": name}
        target += f".get_parameter({name!r})"
    return Prescription(
        title=f"{what}: weights without gradient {weights} -> 0",
        change={"module": module, **change, "requires_grad": {"from": True, "to": False}},
        predicted={"weights_without_gradient": {"from": weights, "to": 0}},
        snippet=f"{target}.requires_grad_(False)\n",
    )
