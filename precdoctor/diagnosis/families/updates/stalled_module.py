"""PD512: one part of the model stops training, while the rest goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.analyses.parameters import module_of_only, parameter_label
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import named, percent, plural
from precdoctor.diagnosis.survey.frames import PARAMETER, Ints, firsts, groups, parameters
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Parameter, tensor_location
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
0.9 if all elements of the weights are zero. 0.95 if the optimizer is no longer given a gradient, 0.8 if it is another
optimizer, 0.9 if it falls between `backward` and `step`, and 0.7 if the backward pass makes less: that may be meant. If
it makes less and less, as of an annealed loss, the finding is a note.
""",
    references=("PyTorch documentation: Automatic Mixed Precision examples, working with unscaled gradients",),
)

#: Fewest sampled steps after the fall: long runs sample one of some hundred.
_AFTER = 4
#: At how many places a fall is looked for; it may have begun between two of them.
_PLACES = 16
#: How far a fall may lie from the loss scale to be called that, in binades: gradients shrink and grow meanwhile.
_ABOUT = 1.5
#: A fall is slow if it was half-way down on all of that many sampled steps before.
_SUDDEN = 2
_KINDS = ("weight_grad", "weight_grad_step", "weight")


@dataclass(frozen=True)
class _Course:
    """The level of one kind of tensor over the sampled steps.

    Attributes:
        weights: the weights, in the log's order.
        steps: shape ``(steps,)``.
        levels: log2 of the RMS, shape ``(steps, weights)``; NaN if there is no row, or all elements are zero.
        present: whether there is a row; same shape.
    """

    weights: Sequence[Parameter]
    steps: Ints
    levels: Floats
    present: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Fall:
    """Weights whose gradient has fallen, or (``before`` is NaN) that are given none any more.

    Attributes:
        course: of the gradients that the optimizer is given.
        columns: the numbers of the weights in ``course``.
        first: the first step since which all of them are down.
        before, after: median of log2 RMS over the weights, before and since.
        slow: whether it was half-way down some sampled steps earlier, as an annealed loss is.
        left_out_by: the optimizer that makes the steps since then, if another one made those before.
    """

    course: _Course
    columns: Ints
    first: int
    before: float = math.nan
    after: float = math.nan
    slow: bool = False
    left_out_by: str = ""

    @property
    def weights(self) -> list[Parameter]:
        return [self.course.weights[i] for i in self.columns]


def check(view: RunView, options: Options) -> Checked:
    """One finding: weights that have become zero, else whose given gradient has fallen, else that are given none."""
    columns = ("nan", "pos_inf", "neg_inf", "numel")
    rows = view.measured(("rms", "dimensions"), _KINDS, columns=columns, steps=watched_steps(view))
    matrices = set(parameters(rows[rows["dimensions"] >= 2].drop_duplicates(list(PARAMETER))))
    made, given, held = (_course(rows[rows["kind"] == kind]) for kind in _KINDS)
    if (zeroed := _zeroed(held, options)) is not None and not matrices.isdisjoint(zeroed.weights):
        return Checked([_zeroed_finding(view, zeroed)], f"{plural(len(zeroed.columns), 'weight')} have become zero")
    if len(given.steps) < options["min_steps"] + _AFTER:
        return Checked.not_applicable(f"gradients were given on {plural(len(given.steps), 'sampled step')}")
    fall = _fallen(given, options) or _withheld(view, given, made, options)
    if fall is None or matrices.isdisjoint(fall.weights):
        return Checked((), f"{plural(len(given.weights), 'weight')} trained to the end")
    finding = _finding(view, fall, made, options)
    return Checked([finding], f"{plural(len(fall.columns), 'weight')} of {len(given.weights):,} hardly train any more")


def _course(rows: pd.DataFrame) -> _Course:
    """Return the course of these rows; of several ranks, the largest."""
    ids, known = groups(rows, PARAMETER), rows["step"].to_numpy()
    steps, at = np.unique(known, return_inverse=True)
    shape = (steps.size, int(ids.max(initial=-1)) + 1)
    rms, levels, present = column(rows, "rms"), np.full(shape, np.nan), np.zeros(shape, np.bool_)
    with np.errstate(divide="ignore"):
        np.fmax.at(levels, (at, ids), np.where(rms > 0.0, np.log2(rms), np.nan))
    present[at, ids] = True
    return _Course(parameters(rows.iloc[firsts(ids)]), steps, levels, present)


def _last_part(steps: Ints, options: Options) -> int:
    """Return the largest row number from which on the steps cover the last ``share`` of the run."""
    begins = steps[-1] + 1 - options["share"] * (steps[-1] + 1 - steps[0])
    return min(int(np.searchsorted(steps, begins, side="right")) - 1, len(steps) - _AFTER)


def _fallen(course: _Course, options: Options) -> _Fall | None:
    """Return the weights that have fallen to stay down, themselves and relative to the median weight."""
    own, before = course.levels, int(options["min_steps"])
    last = _last_part(course.steps, options)
    if last < before or own.shape[1] < 2:
        return None
    with np.errstate(invalid="ignore"):
        relative = own - _median(own, axis=1)[:, np.newaxis]
    fall, since = np.full(own.shape[1], -np.inf), np.zeros(own.shape[1], np.int64)
    seen, ends = np.fmax.reduce(own, axis=0), np.fmax.reduce(own[last:], axis=0)
    candidates = np.flatnonzero(seen - ends >= options["fall"])
    for at in np.unique(np.linspace(before, last, _PLACES).astype(np.int64)) if candidates.size else ():
        early, late = (np.isfinite(part[:, candidates]).sum(0) for part in (own[:at], own[at:]))
        mine = candidates[(early >= before) & (late >= _AFTER)]
        falls = [_median(x[:at, mine], axis=0) - np.fmax.reduce(x[at:, mine], axis=0) for x in (own, relative)]
        deeper = np.minimum(*falls)
        better = deeper > fall[mine]
        fall[mine[better]], since[mine[better]] = deeper[better], at
    columns = np.flatnonzero(fall >= options["fall"])
    if not columns.size:
        return None
    levels, at = own[:, columns], int(since[columns].max())
    middle = _median(levels[:at], axis=0)
    depths = np.nan_to_num(np.fmax.reduce(levels - middle, axis=1))  # of the weight that has fallen least
    first = len(depths) - int(np.argmin(np.append(depths[::-1] <= -options["fall"], False)))
    slow = bool((depths[max(0, first - _SUDDEN) : first] < -0.5 * options["fall"]).all())
    after = _median(levels[first:], axis=0)
    steps = course.steps
    return _Fall(course, columns, int(steps[first]), float(np.median(middle)), float(np.median(after)), slow)


def _zeroed(held: _Course, options: Options) -> _Fall | None:
    """Return the weights that had non-zero elements and have none over the last part of the run."""
    if len(held.steps) < options["min_steps"] + _AFTER:
        return None
    last = _last_part(held.steps, options)
    zero = held.present & np.isnan(held.levels)
    lasts = zero[last:].any(0) & ~np.isfinite(held.levels[last:]).any(0)
    columns = np.flatnonzero((np.isfinite(held.levels[:last]).sum(0) >= options["min_steps"]) & lasts)
    if not columns.size:
        return None
    at = 1 + max(int(np.flatnonzero(np.isfinite(held.levels[:, i]))[-1]) for i in columns)
    return _Fall(held, columns, int(held.steps[at]))


def _withheld(view: RunView, given: _Course, made: _Course, options: Options) -> _Fall | None:
    """Return the weights whose gradients are still made, and no longer given to the run's only optimizer.

    Or to its second one, if that follows the first and holds most of what the first did.
    """
    last = _last_part(given.steps, options)
    if last < 1:
        return None
    gone = (given.present[:last].sum(0) >= options["min_steps"]) & ~given.present[last:].any(0)
    late = np.isfinite(made.levels[made.steps >= given.steps[last]]).sum(0)
    still = {place for place, count in zip(made.weights, late.tolist(), strict=True) if count >= _AFTER}
    columns = np.array([i for i in np.flatnonzero(gone).tolist() if given.weights[i] in still], np.int64)
    if not columns.size:
        return None
    at = max(int(np.flatnonzero(given.present[:, i])[-1]) for i in columns)
    until, first = (int(step) for step in given.steps[at : at + 2])
    made_by = [(s.step, s.optimizer) for steps in view.timeline.values() for s in steps if s.optimizer]
    before, since = {name for step, name in made_by if step <= until}, {name for step, name in made_by if step >= first}
    if len(before | since) == 1:
        return _Fall(given, columns, first)
    follows = before.isdisjoint(since) and 2 * columns.size < len(given.weights)
    return _Fall(given, columns, first, left_out_by=min(since)) if follows else None


def _median(values: Floats, axis: int) -> Floats:
    """Return the medians along an axis, without the NaN; NaN where all values are."""
    return pd.DataFrame(values).median(axis=axis).to_numpy()


def _level(course: _Course, weights: Iterable[Parameter], steps: slice) -> float:
    """Return the median over weights of their medians over some rows; NaN if there is none."""
    wanted = set(weights)
    columns = [i for i, place in enumerate(course.weights) if place in wanted]
    return float(np.nanmedian(_median(course.levels[steps, columns], axis=0))) if columns else math.nan


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
    "leave the gradients as `backward` and `unscale_` made them",
    ("made smaller before step", "left by backward"),
    "for p in part.parameters():  # after backward; compute from copies\n"
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


def _cause(fall: _Fall, made: _Course, options: Options) -> _Cause:
    """Return where the gradients get lost; without rows of the backward pass, it is to blame."""
    if math.isnan(fall.before):
        return _LEFT_OUT if fall.left_out_by else _REMOVED
    at = int(np.searchsorted(made.steps, fall.first))
    faded = _level(made, fall.weights, slice(at)) - _level(made, fall.weights, slice(at, None))
    return _DIVIDED if faded < options["fall"] / 2.0 else _FADED


def _finding(view: RunView, fall: _Fall, made: _Course, options: Options) -> Finding:
    weights, every, first = fall.weights, fall.course.weights, fall.first
    labels = [parameter_label(p) for p in weights]
    module = module_of_only(weights[0], weights, every)
    part, cause = f"`{module[1] or module[0]}`", _cause(fall, made, options)
    of = f"of {len(weights):,} of {plural(len(every), 'weight')} ({named(labels)})"
    evidence: dict[str, float] = {}
    if math.isnan(fall.before):
        title = f"{part} is not trained from step {first:,} on: the optimizer is given no gradient of it any more"
        message = (
            f"From step {first:,} to the end (limit: the last {percent(options['share'])} of the run) the gradients "
            f"{of} are missing at `step` of `{fall.left_out_by or view.optimizers[0]['name']}`. {cause.words}"
        )
        effect, predicted = "weights without a gradient at the step", (len(weights), 0)
    else:
        before, after, depth = 2.0**fall.before, 2.0**fall.after, fall.before - fall.after
        title = (
            f"{part} hardly trains from step {first:,} on: its gradients are 2^{depth:.0f} times smaller, most others "
            "are not"
        )
        message = (
            f"The gradients given to the optimizer {of} had an RMS of {before:.2g} (median), and from step {first:,} "
            f"to the end {after:.2g}: 2^{depth:.1f} times less (limit 2^{options['fall']:g}). {cause.words}"
        )
        scale = next((s.loss_scale for s in view.timeline[view.processes[0]] if s.step == first), None) or 1.0
        if cause is _DIVIDED and scale > 1.0 and abs(depth - math.log2(scale)) <= _ABOUT:
            message += f" The factor is about the loss scale, {scale:,.0f}: most likely they are divided by it twice."
        evidence = {"rms_before": before, "rms_after": after, "fall_binades": depth, "limit": options["fall"]}
        effect, predicted = "RMS of the gradients", (after, before)
    return RULE.finding(
        severity=Severity.INFO if cause is _FADED and fall.slow else Severity.WARNING,
        confidence=cause.confidence,
        title=title,
        message=message,
        location=tensor_location(module, "", "weight_grad_step", Phase.OPTIMIZER, view.processes[0], first),
        evidence={**evidence, "weights": labels[:16], "confidence_reason": cause.reason},
        prescription=Prescription(
            title=f"{cause.remedy}: {effect} {predicted[0]:.2g} -> {predicted[1]:.2g}",
            change={"gradient": {"from": cause.change[0], "to": cause.change[1]}},
            predicted={"gradient": {"from": predicted[0], "to": predicted[1]}},
            snippet=cause.snippet,
        ),
    )


def _zeroed_finding(view: RunView, fall: _Fall) -> Finding:
    weights, every, first = fall.weights, fall.course.weights, fall.first
    labels = [parameter_label(p) for p in weights]
    module = module_of_only(weights[0], weights, every)
    part = f"`{module[1] or module[0]}`"
    return RULE.finding(
        confidence=0.9,
        title=f"{part} is lost from step {first:,} on: all elements of {plural(len(weights), 'weight')} are zero",
        message=f"{len(weights):,} of {plural(len(every), 'weight')} ({named(labels)}) had non-zero elements, and from "
        f"step {first:,} to the end have none (limit 0). What pruned or masked them took the whole layer, and nothing "
        "passes it any more.",
        location=tensor_location(module, "", "weight", Phase.OPTIMIZER, view.processes[0], first),
        evidence={"weights": labels[:16], "limit": 0, "confidence_reason": "the weights were counted"},
        prescription=Prescription(
            title=f"prune each layer by a share of its own: layers without a weight {len(weights)} -> 0",
            change={"weight": {"from": "all zero", "to": "a share of each layer"}},
            predicted={"weights_all_zero": {"from": len(weights), "to": 0}},
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
