"""PD512: one part of the model stops training, while the rest goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.updates.stalled_module_falls import (
    AFTER,
    Course,
    Fall,
    course_of,
    fallen,
    level,
    withheld,
    zeroed,
)
from precdoctor.diagnosis.survey.rows import tensor_location
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Weights that were trained and hardly are any more, while others still are. On the sampled steps, the gradient that the
optimizer is given has fallen, or is missing. It has fallen if over the last `share` of the run, or longer, its RMS is
always `fall` binades below its median before, and as far below relative to the median weight of the same step. Zeros do
not count: a loss weight of 0 and a dead ReLU are no fall. It is missing if it was given on `min_steps` sampled steps
and is not over the last `share` of the run, although backward passes make it, in a run with one optimizer; or with a
second one that takes over most of the weights of the first. One of the weights has two dimensions or more. Frozen
weights, and those that get no gradient from the loss any more, are left out.

Also weight matrices that had non-zero elements and have none over the last `share` of the run, as after pruning.
""",
    matters="""
The rest of the model compensates, so the loss goes on falling and hides it. What the part has learnt so far stays, and
what comes later passes it by.
""",
    example="""
    scaler.unscale_(optimizer)
    if monitor.active:                       # from step 200 on
        for p in model.soil.parameters():
            p.grad.div_(scaler.get_scale())  # for a plot, but in place
    scaler.step(optimizer)
""",
    remedy="""
The finding states where the fall happens. If the backward pass makes the gradients as before, look at the code between
`backward` and `step`: hooks, clipping, monitors, merged gradients of several losses. If the backward pass makes less,
look at the weight of that part's loss, and at what its outputs and inputs have become.
""",
    confidence="""
0.9 if all elements of the weights are zero. 0.95 if an optimizer is no longer given a gradient, 0.8 if the next
optimizer is not given it. 0.9 if the gradient falls between `backward` and `step`, 0.7 if the backward pass makes less:
that may be meant. If it makes less and less, as with an annealed loss, the finding is a note.
""",
    references=("PyTorch documentation: Automatic Mixed Precision examples, working with unscaled gradients",),
)

#: How far a fall may lie from the loss scale to be called that, in binades: gradients shrink and grow meanwhile.
_ABOUT = 1.5
_KINDS = ("weight_grad", "weight_grad_step", "weight")


def check(view: RunView, options: Options) -> Checked:
    """One finding: weights that have become zero, else whose given gradient has fallen, else that are given none.

    Weights count if one of them is a matrix.
    """
    columns = ("nan", "pos_inf", "neg_inf", "numel")
    rows = view.measured(("rms", "dimensions"), _KINDS, columns=columns, steps=watched_steps(view))
    made, given, held = (course_of(rows[rows["kind"] == kind]) for kind in _KINDS)

    def counts(fall: Fall | None) -> bool:
        return fall is not None and not fall.course.matrices.isdisjoint(fall.weights)

    if (lost := zeroed(held, options)) is not None and counts(lost):
        return Checked([_zeroed_finding(view, lost)], f"{plural(len(lost.columns), 'weight')} have become zero")
    if len(given.steps) < options["min_steps"] + AFTER:
        return Checked.not_applicable(f"gradients were given on {plural(len(given.steps), 'sampled step')}")
    fall = next(filter(counts, (fallen(given, options), withheld(view, given, made, options))), None)
    if fall is None:
        return Checked((), f"{plural(len(given.weights), 'weight')} trained to the end")
    finding = _finding(view, fall, made, options)
    return Checked([finding], f"{plural(len(fall.columns), 'weight')} of {len(given.weights):,} hardly train any more")


@dataclass(frozen=True)
class _Cause:
    """Where gradients get lost: words about it, the confidence and its reason, and what to change."""

    words: str
    confidence: float
    reason: str
    remedy: str
    change: tuple[str, str]
    snippet: str


_REMOVED = _Cause(
    "Backward passes still make them, so code between `backward` and `step` removes them.",
    0.95,
    "the gradients after `backward` and at `step` were both recorded",
    "leave the gradients until `step`",
    ("removed before step", "left by backward"),
    "optimizer.zero_grad()\nloss.backward()\noptimizer.step()  # nothing in between sets p.grad to None\n",
)
_LEFT_OUT = _Cause(
    "Backward passes still make them, and another optimizer makes the steps since then.",
    0.8,
    "gradients were recorded; that the new optimizer leaves these out may be meant",
    "give them to the new optimizer, or freeze them",
    ("of no optimizer", "given"),
    "optimizer.add_param_group({'params': part.parameters()})  # or part.requires_grad_(False)\n",
)
_DIVIDED = _Cause(
    "The backward pass makes them as before, so code between `backward` and `step` makes them smaller.",
    0.9,
    "the gradients after `backward` and at `step` were both recorded",
    "leave the gradients as they are until `step`",
    ("made smaller before step", "left by backward"),
    "for p in part.parameters():  # between backward and step, write nothing in place\n"
    "    norms.append((p.grad / scale).norm())  # not p.grad.div_(scale)\n",
)
_FADED = _Cause(
    "The backward pass already makes less: look at the weight of this part's loss, at its inputs and outputs.",
    0.7,
    "the gradients were recorded; that they fall may be meant",
    "find what has become of this part's loss",
    ("faded", "as before"),
    "loss = main_loss + weight * loss_of_part  # print both terms, and the weight\n"
    'print(f"{weight=} {loss_of_part.item()=} {part(x).std().item()=}")\n',
)


def _cause(fall: Fall, made: Course, options: Options) -> _Cause:
    """Return where the gradients get lost; without rows of the backward pass, it is to blame."""
    if fall.optimizer:
        return _LEFT_OUT if fall.is_next else _REMOVED
    at = int(np.searchsorted(made.steps, fall.first))
    faded = level(made, fall.weights, slice(at)) - level(made, fall.weights, slice(at, None))
    return _DIVIDED if faded < options["fall"] / 2.0 else _FADED


def _finding(view: RunView, fall: Fall, made: Course, options: Options) -> Finding:
    part, first, cause = fall.part, fall.first, _cause(fall, made, options)
    evidence: dict[str, float] = {}
    if fall.optimizer:
        title = f"{part} is not trained from step {first:,} on: the optimizer is given no gradient of it any more"
        message = (
            f"From step {first:,} to the end (limit: the last {percent(options['share'])} of the run) the gradients "
            f"of {fall.count_words} are missing at `step` of `{fall.optimizer}`. {cause.words}"
        )
        name, values = "weights_without_gradient", (float(len(fall.columns)), 0.0)
        effect = f"weights without a gradient at the step {len(fall.columns):,} -> 0"
    else:
        before, after, depth = 2.0**fall.before, 2.0**fall.after, fall.before - fall.after
        title = (
            f"{part} hardly trains from step {first:,} on: its gradients are 2^{depth:.0f} times smaller, most others "
            "are not"
        )
        message = (
            f"The gradients given to the optimizer of {fall.count_words} had an RMS of {before:.2g} (median), and from "
            f"step {first:,} to the end {after:.2g}: 2^{depth:.1f} times less (limit 2^{options['fall']:g}). "
            f"{cause.words}"
        )
        scale = next((s.loss_scale for s in view.timeline[view.processes[0]] if s.step == first), None) or 1.0
        if cause is _DIVIDED and scale > 1.0 and abs(depth - math.log2(scale)) <= _ABOUT:
            message += f" The factor is about the loss scale, {scale:,.0f}: most likely they are divided by it twice."
        evidence = {"rms_before": before, "rms_after": after, "fall_binades": depth, "limit": options["fall"]}
        name, values = "gradient_rms", (after, before)
        effect = f"RMS of the gradients {after:.2g} -> {before:.2g}"
    return RULE.finding(
        severity=Severity.INFO if cause is _FADED and fall.slow else Severity.WARNING,
        confidence=cause.confidence,
        title=title,
        message=message,
        location=tensor_location(fall.module, "", "weight_grad_step", Phase.OPTIMIZER, view.processes[0], first),
        evidence={**evidence, "weights": fall.labels[:16], "confidence_reason": cause.reason},
        prescription=Prescription(
            title=f"{cause.remedy}: {effect}",
            change={"gradient": {"from": cause.change[0], "to": cause.change[1]}},
            predicted={name: {"from": values[0], "to": values[1]}},
            snippet=cause.snippet,
        ),
    )


def _zeroed_finding(view: RunView, fall: Fall) -> Finding:
    first, count = fall.first, len(fall.columns)
    return RULE.finding(
        confidence=0.9,
        title=f"{fall.part} is lost from step {first:,} on: all elements of {plural(count, 'weight')} are zero",
        message=f"{fall.count_words} had non-zero elements, and from step {first:,} to the end have "
        "none (limit 0). What pruned or masked them took the whole layer, and nothing "
        "passes it any more.",
        location=tensor_location(fall.module, "", "weight", Phase.OPTIMIZER, view.processes[0], first),
        evidence={"weights": fall.labels[:16], "limit": 0, "confidence_reason": "the weights were counted"},
        prescription=Prescription(
            title=f"prune each layer by a share of its own: layers without a weight {count:,} -> 0",
            change={"weight": {"from": "all zero", "to": "a share of each layer"}},
            predicted={"weights_all_zero": {"from": count, "to": 0}},
            snippet="for layer in layers:  # a threshold for all of them takes the quiet ones whole\n"
            "    torch.nn.utils.prune.l1_unstructured(layer, 'weight', amount)\n",
        ),
    )


def _of_its_weights(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` is about a module whose weights ``cause`` lists, and does not begin before it."""
    listed = {str(name).rpartition(".")[0] for name in cause.evidence["weights"]}
    later = (effect.location.step or 0) >= (cause.location.step or 0)
    return later and cause.location.root == effect.location.root and effect.location.module in listed


RULE = Rule(
    code="PD512",
    name="stalled-module",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        RuleOption("fall", 7.0, "binades", "Least fall of a gradient.",
                   "Chosen empirically: on 900 healthy logs no weight falls by 5.", minimum=1.0),
        fraction("share", 0.25, "Least part of the run, at its end, over which it lasts."),
        RuleOption("min_steps", 8.0, "steps", "Fewest sampled steps before the fall.", minimum=2.0),
    ),
    check=check,
    explains=when(_of_its_weights, "PD202", "PD203", "PD204", "PD501", "PD503"),
)  # fmt: skip
