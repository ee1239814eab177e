"""PD510: the backward pass makes gradients, and the optimizer never gets them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.parameters import parameter_label
from precdoctor.diagnosis.analyses.scans import Group, check_facts, facts
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import named, percent, plural
from precdoctor.diagnosis.families.updates.cleared_gradients_weights import (
    Untrained,
    replaced_weights,
    unfrozen_weights,
    unheld_finding,
    untrained,
)
from precdoctor.diagnosis.survey.frames import (
    AT,
    PARAMETER,
    at,
    finite,
    firsts,
    groups,
    on_steps,
    parameters,
    rows_of,
    step_values,
)
from precdoctor.diagnosis.survey.rows import integer, location, tensor_location
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Training steps whose backward pass leaves non-zero weight gradients while the optimizer is given none, or zeros, and the
weights keep their bits: on `share` of the sampled steps, and on at least `min_steps` of them. Left out are steps that a
loss scaler skips, steps at learning rate 0, runs in which `--include` or `--exclude` hides modules, and optimizers with
fewer parameters than there are gradients (one that optimizes an image in front of a fixed network). An optimizer whose
gradients are all zero is given none, whatever it holds: copies of the weights, say. Of several optimizers each counts
by itself, where all that it is given is zero and the backward pass had left it something.

Also weights in no optimizer that get non-zero gradients on `min_steps` sampled steps, while an optimizer holds as many
parameters of the same shape that belong to no model and had no gradient at its first step: the parameters were replaced
after the optimizer was made. If none of its parameters has such a shape, those count that differ in one dimension, as a
head for another number of classes does. A layer that is left out of the optimizer on purpose has no such counterpart.
A layer that was frozen when the optimizer was made has none either. If somebody unfreezes it, so that it gets non-zero
gradients on `min_steps` sampled steps, and no optimizer is given these, that is a warning.

Also weights that an optimizer holds and never moves in `min_steps` of its steps, while others are trained. An error is
an optimizer that gets no gradient, although backward passes leave its weights some. A warning is about weights whose
modules are called and that never get a gradient on the sampled steps (`no_grad`, `detach`). They must be meant for
training: they have an optimizer to themselves, or a parameter group at a rate of its own, or the rest of their
module is mostly frozen. A frozen encoder in the optimizer of everything stays silent. A note is about weights without
such a sign whose gradients are made on `min_steps` sampled steps, and are gone at all of the optimizer's steps.

Also micro-steps that do not accumulate: on deep-scanned steps with several backward passes the gradients of the first
pass are gone, or zero, when the second one begins, and no op has read them (a sum of one's own, a projection, an attack
on the input would). A pass has served its purpose if its hooks keep gradients or made a tensor of them that still
exists (K-FAC's statistics, an importance of weights), took a number from them, or detached them as for NumPy.
""",
    matters="""
Nothing is trained. The loss stays where it is, within its noise, and nothing else shows it: after `backward` the
gradients are there.
""",
    example="""
    loss.backward()
    optimizer.zero_grad()   # belongs before backward, or after step
    optimizer.step()
""",
    remedy="""
Call `zero_grad`, `backward` and `step` in this order. Where gradients are copied to other tensors (FP32 masters, flat
buffers), copy them before `step`. Make the optimizer last: after layers were replaced, weights loaded with
`assign=True`, and modules converted or wrapped.
""",
    confidence="""
0.95: both gradients were recorded, and the weights were compared bit for bit. 0.9 for micro-steps, for replaced
parameters of another shape, and for modules under `no_grad`; 0.8 if their outputs are detached or unused.
""",
    references=("PyTorch tutorial: Optimizing Model Parameters, the optimization loop",),
)
_COLUMNS = ("numel", "zero", "nan", "pos_inf", "neg_inf", "fingerprint")
_KINDS = ("weight", "weight_grad", "weight_grad_step", "update")
_ORDER = "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
_WRITTEN = """for parameter, gradient in zip(model.parameters(), merged):  # all of them, not one part of the model
    parameter.grad = gradient
"""
_GRADIENT = """with torch.no_grad():
    x = frozen(x)
x = adapter(x)  # outside, like all that is behind it up to the loss
"""


def check(view: RunView, options: Options) -> Checked:
    """One finding: the first process, else optimizer, without gradients; else micro-steps that do not accumulate."""
    if view.partial_modules:
        return Checked.not_applicable("modules were left out of the recording")
    rows = _rows(view)
    gradients = _weights_with_gradients(rows)
    steps = _steps(rows, gradients)
    emptied = steps["zeros"] | steps["emptied"]
    given_none = (~steps["fed"] & (emptied | (steps["weights"] <= steps["held"]))).to_numpy()
    for alike in (("rank", "attempt"), ("rank", "attempt", "optimizer")):
        for own in rows_of(groups(steps, alike), steps["step"]):
            starved = steps.iloc[own[given_none[own]]]
            if len(starved) < max(options["min_steps"], options["share"] * own.size):
                continue
            if "optimizer" in alike and not emptied.loc[starved.index].all():
                continue
            if not starved["zeros"].all() and not _weights_unchanged(rows, starved):
                continue
            finding = _finding(starved, own.size, _optimizer_of(view, starved), options)
            return Checked([finding], f"{plural(len(starved), 'step')} without a gradient for the optimizer")
    held = untrained(view, rows, gradients, options["min_steps"])
    if held is not None and held.meant:
        return _held(held, options)
    if (found := _unheld(view, rows, gradients, options)) is not None:
        return found
    dropped = check_facts(view, ("dropped",), lambda _: 1.0, lambda g: _dropped_finding(view, g), seen="",
                          keep=lambda g: g.stands)  # fmt: skip
    if dropped.findings:
        return Checked(dropped.findings, f"{plural(len(facts(view, 'dropped')), 'scan')} saw gradients dropped")
    if held is not None:  # a note, unless the gradients of a whole backward pass were dropped
        return _held(held, options)
    if steps.empty:
        return Checked.not_applicable("no sampled step made a weight gradient")
    return Checked((), f"the optimizer got gradients on {plural(len(steps), 'step')}, or the weights moved")


def _held(held: Untrained, options: Options) -> Checked:
    return Checked([_held_finding(held, options)], f"{plural(len(held.weights), 'weight')} without an update")


def _unheld(view: RunView, rows: pd.DataFrame, gradients: pd.DataFrame, options: Options) -> Checked | None:
    """Find weights that no optimizer holds because they were replaced, or unfrozen; None if there are none."""
    for process in view.processes:
        for unheld in (replaced_weights(view, process), unfrozen_weights(view, process, rows)):
            ungiven = _not_given(rows, gradients) if unheld.weights else gradients
            if (found := unheld_finding(RULE, process, unheld, ungiven, options)) is not None:
                unfrozen = "" if unheld.optimizer else " unfrozen,"
                return Checked([found], f"{plural(len(unheld.weights), 'weight')}{unfrozen} in no optimizer")
    return None


def _rows(view: RunView) -> pd.DataFrame:
    """Return the rows of weights, gradients and updates on sampled, unskipped steps at a learning rate above 0.

    Added columns: ``optimizer``, its number; ``held``, how many parameters it has; ``zeros``, whether the step's
    gradient norm is 0; ``alive``, whether the row's tensor has a non-zero element.
    """
    sizes = {
        str(o.get("name")): sum(integer(g.get("parameters")) or 0 for g in o.get("groups") or ())
        for o in view.optimizers
    }
    optimizer_numbers: dict[str, int] = {}
    usable = {
        (p, s.step): (
            optimizer_numbers.setdefault(s.optimizer, len(optimizer_numbers)),
            sizes.get(s.optimizer, 0),
            float(s.grad_norm == 0.0),
        )
        for p, steps in view.timeline.items()
        for s in steps
        if s.complete and s.sampled and not s.skipped and s.optimizer and s.lr
    }
    rows = view.measured((), _KINDS, columns=_COLUMNS)
    number, held, zeros = (step_values(rows, {key: value[i] for key, value in usable.items()}) for i in range(3))
    rows = rows.assign(optimizer=number, held=held, zeros=zeros == 1.0, alive=rows["zero"] < rows["numel"])
    return rows[rows["held"].notna()]


def _steps(rows: pd.DataFrame, made: pd.DataFrame) -> pd.DataFrame:
    """Return one row per process and step of ``made``, the weight gradients that the backward pass left non-zero.

    Added columns: ``weights``, the number of weights with such a gradient; ``fed``, whether a gradient given to the
    optimizer, or an update, is not zero; ``emptied``, see :func:`_emptied_steps`.
    """
    given = rows[rows["alive"] & rows["kind"].isin(["weight_grad_step", "update"]) & ~rows["zeros"]]
    ids, fed = groups(made, AT), on_steps(made, set(at(given.iloc[firsts(groups(given, AT))])))
    emptied = on_steps(made, _emptied_steps(rows, made))
    return made.assign(weights=np.bincount(ids)[ids], fed=fed, emptied=emptied).iloc[firsts(ids)]


def _emptied_steps(rows: pd.DataFrame, made: pd.DataFrame) -> set[tuple[Process, int]]:
    """Return steps on which all gradients given to the optimizer are zero, one of them non-zero after backward."""
    given = rows[rows["kind"] == "weight_grad_step"]
    fed, empty = given[given["alive"]], given[~given["alive"]]
    if empty.empty:
        return set()
    key = [*AT, *PARAMETER]
    emptied = empty[key].merge(made[key], on=key)
    return set(at(emptied)) - set(at(fed.iloc[firsts(groups(fed, AT))]))


def _weights_with_gradients(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step and weight whose gradient, after backward, is finite and not all zeros."""
    made = rows[rows["alive"] & (rows["kind"] == "weight_grad") & finite(rows)]
    return made.iloc[firsts(groups(made, (*AT, *PARAMETER)))]


def _not_given(rows: pd.DataFrame, made: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``made`` whose gradients no optimizer was given: before a layer was replaced, one was."""
    key = [*AT, *PARAMETER]
    given = rows.loc[rows["kind"] == "weight_grad_step", key].drop_duplicates()
    found = made[key].merge(given, on=key, how="left", indicator="given")
    return made[(found["given"] == "left_only").to_numpy()]


def _weights_unchanged(rows: pd.DataFrame, steps: pd.DataFrame) -> bool:
    """Return whether the weights with gradients have the same bits on the first and on the last of ``steps``.

    False if no fingerprint of such a weight was recorded on both.
    """
    first, last = (rows[on_steps(rows, set(at(steps.iloc[[i]])))] for i in (0, -1))
    fingerprinted = (f[(f["kind"] == "weight") & f["fingerprint"].notna()] for f in (first, last))
    before, after = (dict(zip(parameters(f), f["fingerprint"], strict=True)) for f in fingerprinted)
    shared = set(parameters(_weights_with_gradients(first))) & set(before) & set(after)
    return bool(shared) and all(before[k] == after[k] for k in shared)


def _optimizer_of(view: RunView, starved: pd.DataFrame) -> str:
    """Return the optimizer of the first of these steps; empty if the process has no other."""
    process = at(starved)[0][0]
    steps = {s.step: s.optimizer for s in view.timeline[process] if s.optimizer}
    return steps[int(starved["step"].iloc[0])] if len(set(steps.values())) > 1 else ""


def _finding(starved: pd.DataFrame, of: int, only: str, options: Options) -> Finding:
    steps, weights = starved["step"].tolist(), int(starved[["weights", "held"]].min(axis=1).max())
    share, whose = len(starved) / of, f" of `{only}`" if only else ""
    if starved["zeros"].all():
        gone, reason = "all gradients of the optimizer were zero", "both gradients were recorded"
    else:
        gone = "they were gone or zero, and the weights kept their bits"
        reason = "both gradients were recorded, and weights were compared bit for bit"
    return RULE.finding(
        confidence=0.95,
        title=f"{f'`{only}` trains nothing' if only else 'nothing is trained'}: the optimizer is given no gradient, "
        "although the backward pass makes them",
        message=f"On {len(starved):,} of {plural(of, 'sampled step')}{whose} ({percent(share)}, limit "
        f"{percent(options['share'])}) the backward pass left non-zero gradients in {plural(weights, 'weight')}. At "
        f"`step` {gone}. Most likely `zero_grad()` runs between `backward()` and `step()`, or `step()` before "
        "`backward()`.",
        location=location(None, Phase.OPTIMIZER, at(starved)[0][0], steps[0]),
        evidence={
            "starved_share": share,
            "limit": options["share"],
            "steps": len(starved),
            "weights": weights,
            "last_bad_step": steps[-1],
            "confidence_reason": reason,
        },
        prescription=Prescription(
            title="`zero_grad`, `backward`, `step`, in this order: steps on which the optimizer gets its gradients "
            f"0 -> {of}",
            change={"order": {"from": "zero_grad before step", "to": "zero_grad before backward"}},
            predicted={"steps_with_gradients": {"from": 0, "to": of}},
            snippet=_ORDER,
        ),
    )


def _held_finding(held: Untrained, options: Options) -> Finding:
    labels, count = [parameter_label(p) for p in held.weights], len(held.weights)
    likely = f"They are meant for training: {held.meant}. Most likely" if held.meant else "Unless that is on purpose,"
    if held.made:
        happens = f"The backward pass left gradients on {plural(held.made, 'sampled step')}, and they were gone or zero"
        cause = "`zero_grad()` runs between `backward()` and this optimizer's `step()`"
        change = {"order": {"from": "zero_grad before step", "to": "zero_grad before backward"}}
        remedy, snippet = "zero the gradients before `backward`, or after `step`", _ORDER
        if not held.meant:
            cause = "code that writes gradients back (for several losses, say) leaves these out, or clears them"
            change = {"gradient": {"from": "removed", "to": "from the loss"}}
            remedy, snippet = "write the gradients of all trained weights back", _WRITTEN
    else:
        happens = "Their modules were called, and no backward pass left a gradient"
        under = "they are called under `torch.no_grad()`"
        cause = under if held.blocked else "what they return is detached, or does not enter the loss"
        change = {"gradient": {"from": "none", "to": "from the loss"}}
        remedy, snippet = "call the module with gradients", _GRADIENT
    return RULE.finding(
        severity=Severity.INFO if not held.meant else Severity.ERROR if held.made else Severity.WARNING,
        confidence=0.95 if held.made else 0.9 if held.blocked else 0.8,
        title=f"`{held.optimizer}` never moves {plural(count, 'weight')} of "
        f"`{held.module[1] or held.module[0]}`{' and others' if held.others else ''}: it is given no gradient of them",
        message=f"`{held.optimizer}` holds {named(labels)}, and made {plural(held.steps, 'step')} (limit "
        f"{options['min_steps']:g}) at a learning rate above 0. {happens}; on the sampled steps other weights got "
        f"theirs. {likely} {cause}.",
        location=tensor_location(held.module, "", "weight_grad", Phase.OPTIMIZER, held.process, held.first),
        evidence={
            "weights": labels[:16],
            "optimizer": held.optimizer,
            "steps": held.steps,
            "limit": options["min_steps"],
            "steps_with_gradients": held.made,
            "confidence_reason": "both gradients were recorded, and the weights were compared bit for bit",
        },
        prescription=Prescription(
            title=f"{remedy}: weights without a gradient at the step {count} -> 0",
            change=change,
            predicted={"weights_without_gradient": {"from": count, "to": 0}},
            snippet=snippet,
        ),
    )


def _dropped_finding(view: RunView, group: Group) -> Finding:
    fact = group.worst
    most = max((s.micro_steps for steps in view.timeline.values() for s in steps if s.step in group.steps), default=2)
    reason = "no op had read them, and they were gone as the next backward pass began"
    return RULE.finding(
        severity=Severity.WARNING,
        confidence=0.9,
        title=f"gradients do not accumulate: the optimizer gets one of {plural(most, 'micro-step')}",
        message=f"{plural(most, 'backward pass')} precede a step. When the second one begins, the gradients of the "
        f"first one in {plural(fact.count('weights'), 'examined weight')} are zero or gone, and nothing has read "
        f"them.{group.elsewhere_words}",
        location=replace(location(None, Phase.OPTIMIZER, fact.process, group.steps[0]), source=fact.source),
        evidence=group.evidence({}, reason) | {"micro_steps": most},
        prescription=Prescription(
            title=f"zero the gradients once per step, in front of the loop: micro-steps that count 1 -> {most}",
            change={"order": {"from": "zero_grad in each micro-step", "to": "zero_grad once per step"}},
            predicted={"micro_steps": {"from": 1, "to": most}},
            snippet="optimizer.zero_grad()\nfor batch in micro_batches:\n"
            "    (compute_loss(batch) / len(micro_batches)).backward()\noptimizer.step()\n",
        ),
    )


def same_weights(cause: Finding, effect: Finding) -> bool:
    """Return whether both findings list a weight in common."""
    causes, effects = (f.evidence.get("weights") for f in (cause, effect))
    return isinstance(causes, list) and isinstance(effects, list) and not set(causes).isdisjoint(effects)


RULE = Rule(
    code="PD510",
    name="cleared-gradients",
    severity=Severity.ERROR,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        RuleOption("share", 0.9, "share of sampled steps", "Steps without a gradient for the optimizer.", maximum=1.0),
        RuleOption("min_steps", 8, "steps", "Minimum number of such steps.", minimum=2),
    ),
    check=check,
    explains=when(same_weights, "PD203", "PD512"),
)  # fmt: skip
