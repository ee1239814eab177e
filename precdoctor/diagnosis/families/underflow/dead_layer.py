"""PD203: layers whose weights get a gradient of exactly zero, or none.

One finding from four detectors: layers with a gradient of zero to the end of the run (here; :mod:`.dead_layer_stop`),
layers whose gradient FP16 flushed (:mod:`.dead_layer_flushed`), that died during the run (:mod:`.dead_layer_dying`), or
whose output saturates the function after it (:mod:`.dead_layer_saturated`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import named, plural
from precdoctor.diagnosis.families.underflow.dead_layer_dying import dying_finding, find_death
from precdoctor.diagnosis.families.underflow.dead_layer_flushed import (
    find_flushed_zeros,
    flushed_finding,
    loss_is_zero,
)
from precdoctor.diagnosis.families.underflow.dead_layer_saturated import find_saturated_layers, saturated_finding
from precdoctor.diagnosis.families.underflow.dead_layer_stop import (
    GradientCut,
    ZeroOrigin,
    find_cut,
    find_zero_origin,
    flatness_words,
    gradient_stop,
    is_negative,
    layer_of,
    negative_words,
    print_gradients,
    print_loss,
    revive,
    training_forward,
    trains_otherwise,
    whole_model,
)
from precdoctor.diagnosis.families.underflow.dead_layer_unreached import find_unreached, freeze, unreached_finding
from precdoctor.diagnosis.survey.frames import PARAMETER, at, firsts, groups, lasts, parameters
from precdoctor.diagnosis.survey.rows import Parameter, TensorRow, dotted, location, tensor_evidence
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Weight matrices that require gradients and take part in the forward pass, but whose gradient is exactly zero in every
element, in the last three quarters of the run or more: a ReLU that never fires, a gate stuck at zero, a path cut by
rounding. The last quarter is enough if an output at or behind the layer is zero or negative throughout, and other
layers get a gradient. In a chain of dead layers the rule names the output that is zero throughout; without one it names
the layer nearest the loss. If the input of that layer is zero throughout, or a ReLU made the output zero, the rule
names the module before that, the last one with non-zero outputs. If the layer's output is neither all negative nor
saturated, and the gradient that arrives there is already zero, the loss itself gives it no gradient (a term with weight
zero, a mask): that is information. So is an output that is all negative, if the layer was trained before and nothing
else indicates a dead ReLU. If no weight of the run gets a gradient on any step, it is an error. If a gradient arrives
and no activation is dead, the rule names the multiplication by zero that a deep scan lists. Layers that no gradient
reaches at all (`grad` stays None: detached, or their output is not used in the loss) are also information. So are
weights in training mode that run under `no_grad` only, if an optimizer holds them that trains others; a module in
evaluation mode is meant to be frozen. Not evaluated are biases, frozen weights, modules that never ran, steps without a
learning rate, and the first steps of zero-initialised layers. Dead units or unused embedding rows are no dead layer.

In FP16 all of that may be underflow. The gradient was flushed if the last gradient before the zeros lies at or below
FP16's smallest normal number throughout, or if every FP16 gradient is zero from the loss on. This is a warning, or an
error if it affects half of the elements of all weight matrices. A loss that is exactly zero was not flushed behind the
loss. The finding names where the zeros begin, and the loss scale that brings the last gradient with non-zero elements
out of the subnormals.

A live layer has died if, from some step on and for at least half of the run, `died_share` of the activation behind it
and of its weight's gradient is zero. The loss must still give the layer nearest to it a gradient, and must not have
fallen by a tenth since, nor in the second half of the run. Runs with several optimizers are not evaluated for this.

A layer is as good as dead if `saturated_share` of its output is so large that the tanh or sigmoid behind it is flat,
and as much of its gradient is exactly zero, on three quarters of the steps from the beginning on.
""",
    matters="""
The layer never learns, but weight decay still shrinks it. The rest of the network works around it: the loss falls and
nothing looks wrong, but it falls more slowly and ends higher.
""",
    example="""
A bias initialised to -10 before a ReLU: the unit's input never becomes positive, so the gradient stays zero.

    nn.init.constant_(layer.bias, -10.0)
    y = layer(x).relu()   # all zeros
""",
    remedy="""
Check what follows the named layer. If an activation there is all zeros, lower the learning rate that pushed it there or
use a leaky activation, and initialise the layer again. If it died in the first steps, bring the inputs to order one
(pixels of 0..255 are not), or warm the learning rate up. A layer before a saturated tanh needs a smaller initial gain
(0.01 for a policy's last layer) or a normalised input. If no gradient reaches the layer, search for `detach()`,
`no_grad()`, `.item()`, an argmax, or an output that never enters the loss. If one weight of a trained layer gets none,
it is fed zeros; of a bidirectional network use the final states `h_n`, not `outputs[-1]`. A scale of 0 in front of an
adapter may be an integer division (`alpha // r`). If this is intended, freeze the layer with `requires_grad_(False)`.
""",
    confidence="""
0.9; 0.75 if fewer than twice the required steps were recorded; 0.8 for layers that no gradient reaches; 0.85 for a
layer that died, 0.7 if some of its units still live. If rows were dropped, a missing gradient proves nothing.
""",
    references=(
        "Lu et al., Dying ReLU and Initialization, arXiv:1903.06733",
        "PyTorch documentation: torch.Tensor.grad, autograd mechanics",
    ),
)
#: Minimum share of the run, to its end, in which a layer is dead; the same if an output that is zero or negative
#: throughout shows why; and of the recorded steps on which one is saturated. Chosen empirically: a term of the loss may
#: be switched off for half of a run.
_MIN_DEAD, _MIN_BLOCKED, _MIN_SHARE = 0.75, 0.25, 0.75

#: The kinds that the evidence's path to an output, or to a weight gradient, consists of.
_AROUND = {"output": ("batch", "input", "output"), "weight_grad": ("loss", "grad_output")}


@dataclass(frozen=True)
class _GradientHistory:
    """The gradient of one weight over the run.

    Attributes:
        numel: its number of elements.
        steps: number of steps on which any rank recorded it.
        dead_steps: number of steps after the last one on which any rank had a non-zero element.
        dead_share: share of the run's steps, from the first recorded one on, that come after that one.
        last: process and step of the last row.
    """

    numel: int
    steps: int
    dead_steps: int
    dead_share: float
    last: tuple[Process, int]


_Gradients = Mapping[Parameter, _GradientHistory]


def check(view: RunView, options: Options) -> Checked:
    """At most two findings: layers that are dead, died or are saturated; and layers that no gradient reaches."""
    steps = _training_steps(view)
    gradients = _gradients(view, steps)
    if not gradients:
        return Checked.not_applicable("no weight matrix got a gradient on a step with a learning rate")
    most = max(g.steps for g in gradients.values())
    seen = f"the gradients of {plural(len(gradients), 'weight matrix')} on {plural(most, 'step')}"
    if most < (least := options["min_steps"]):
        return Checked.not_applicable(f"{seen}: too few steps")
    dead = _dead(gradients, least, _MIN_DEAD) or _blocked(view, gradients, least)
    saturated = {} if dead else find_saturated_layers(view, steps, options["saturated_share"], _MIN_SHARE)
    from_start = any(g.dead_steps == g.steps for g in dead.values())
    death = None if from_start or saturated else find_death(view, steps, options["died_share"], least)
    findings = []
    if death is not None:
        findings.append(dying_finding(RULE, view, death, options["died_share"]))
    elif dead:
        findings.append(_dead_finding(view, dead, gradients, options))
    elif saturated:
        findings.append(saturated_finding(RULE, view, saturated, options["saturated_share"]))
    whole = view.missing is None and not view.partial_modules
    if whole and (unreached := find_unreached(view, gradients, steps, least)):
        findings.append(unreached_finding(RULE, view, unreached, most, least))
    words = f"{len(dead):,} of {seen} zero to the end" if dead else f"{seen}: each is non-zero on some step"
    words += "; before a saturated function: " + ", ".join(f"`{m or r}`" for r, m, _ in saturated) if saturated else ""
    words += f"; {len(death.layers)} died during the run" if death is not None else ""
    return Checked(findings, words)


def _dead(gradients: _Gradients, steps: float, share: float) -> _Gradients:
    """The gradients that are zero on so many recorded steps and this share of the run, to its end."""
    return {p: g for p, g in gradients.items() if g.dead_steps >= steps and g.dead_share >= share}


def _blocked(view: RunView, gradients: _Gradients, least: float) -> _Gradients:
    """The gradients that are zero at the end if an output at or behind their layers lets none pass; else none.

    None if all of them are: then the loss itself is zero, as when all margins are met.
    """
    dead = _dead(gradients, least, _MIN_BLOCKED)
    rows = view.rows(*next(iter(dead.values())).last) if 0 < len(dead) < len(gradients) else []
    row = next((r for r in rows if r.kind == "weight_grad" and r.owner in dead), None)  # nearest the loss
    return dead if row is not None and (_blocker(rows, dead) is not None or flatness_words(row, rows)) else {}


def _training_steps(view: RunView) -> list[int]:
    """The sampled healthy steps that were not skipped and had a learning rate above zero, or an unknown one."""
    moving = {
        s.step for steps in view.timeline.values() for s in steps if not s.skipped and (s.lr is None or s.lr > 0.0)
    }
    return [s for s in watched_steps(view) if s in moving]


def _gradients(view: RunView, steps: Sequence[int]) -> _Gradients:
    """The gradients of all weight matrices over these steps."""
    rows = view.measured(("dimensions",), ("weight_grad",), columns=("numel", "zero"), steps=steps)
    rows = rows[rows["dimensions"] >= 2]
    ids, step = groups(rows, PARAMETER), rows["step"].to_numpy()
    first, last = rows.iloc[firsts(ids)], rows.iloc[lasts(ids)]
    last_alive = first["step"].to_numpy() - 1
    np.maximum.at(last_alive, ids, np.where(rows["zero"] != rows["numel"], step, -1))
    one = firsts(groups(rows, (*PARAMETER, "step")))
    recorded = np.bincount(ids[one]).tolist()
    dead = np.bincount(ids[one], step[one] > last_alive[ids[one]]).astype(np.int64).tolist()
    end = last["step"].to_numpy()
    shares = ((end - last_alive) / (end - first["step"].to_numpy() + 1)).tolist()
    columns = zip(first["numel"], recorded, dead, shares, at(last), strict=True)
    return {place: _GradientHistory(*values) for place, values in zip(parameters(first), columns, strict=True)}


def _dead_finding(view: RunView, dead: _Gradients, every: _Gradients, options: Options) -> Finding:
    """One finding for all dead weights, at the output that blocks the gradient, else at the one nearest the loss."""
    process, step = next(iter(dead.values())).last
    rows = view.rows(process, step)
    row = next(r for r in rows if r.kind == "weight_grad" and r.owner in dead)  # nearest the loss
    gradient = dead[row.root, row.module, row.name]
    steps, all_steps = gradient.dead_steps, gradient.steps
    blocker = _blocker(rows, dead)
    elements = sum(g.numel for g in dead.values())
    parameters = [dotted(m, n) for _, m, n in dead]
    zeros = find_flushed_zeros(view, row) if blocker is None else None
    if zeros is not None:
        parts = elements, sum(g.numel for g in every.values())
        return flushed_finding(RULE, view, zeros, parameters, parts, (steps, all_steps), options["min_steps"])
    stop = _find_stop(view, rows, row, blocker, dead, every)
    culprit, is_part = stop.culprit, stop.is_part
    message = (
        f"The gradient of {named(parameters)} was exactly zero in every element on "
        f"{'all' if steps == all_steps else f'the last {steps:,} of'} {plural(all_steps, 'recorded step')} (limit "
        f"{options['min_steps']:g}), up to step {step}. {elements:,} elements in {len(dead)} of {len(every):,} weight "
        f"matrices get no gradient. {stop.why}"
    )
    recurrent = is_part and layer_of(row)[1].startswith("weight_hh")
    short = recurrent and not layer_of(row)[1].endswith("_reverse")
    if is_part:
        message += _SHORT_WORDS if short else _REVERSE_WORDS if recurrent else _PART_WORDS
    whole = whole_model(row.root, dead, every) if stop.unused and not is_part else ""
    message += negative_words(rows, row.root) if whole else ""
    message += " No weight of the run got a gradient on any of these steps." if stop.nothing else ""
    who = f"`{dotted(row.module, row.name) if is_part else whole or culprit.module or culprit.root}`"
    own = [r for r in rows if r.kind == "output" and r.layer == row.layer]
    # Trained at first, and no output that is zero is in evidence, only one that a ReLU would make zero.
    left = stop.flat and stop.culprit is row and steps < all_steps and any(map(is_negative, own))
    message += " Or the loss has given it the weight zero since then." if left else ""
    untrained = stop.unused or is_part
    title = f"{who} is {'not trained' if untrained else 'dead'}" if culprit is row else f"{who} lets no gradient pass"
    title = stop.origin.headline if stop.origin is not None else title
    mild = Severity.INFO if left or (untrained and (not is_part or short)) else None
    return RULE.finding(
        severity=Severity.ERROR if stop.nothing else mild,
        confidence=0.9 if steps >= 2 * options["min_steps"] else 0.75,
        title=f"{title}: {plural(len(dead), 'weight')} got a gradient of exactly zero on "
        f"{'all' if steps == all_steps else 'the last'} {steps} steps",
        message=message,
        location=location(culprit, Phase.BACKWARD if culprit is row else Phase.FORWARD, process, step),
        evidence={
            "zero_gradient_steps": steps,
            "limit": options["min_steps"],
            "dead_weights": parameters[:16],
            "dead_elements": elements,
            **({"loss_is_zero": True} if loss_is_zero(rows) else {}),
            **tensor_evidence(culprit, [r for r in rows if r.kind in _AROUND[culprit.kind]]),
            "confidence_reason": "every element of every recorded gradient was counted",
        },
        prescription=_prescription(stop, dead, rows, whole),
    )


@dataclass(frozen=True)
class _Stop:
    """What makes the gradient of a dead weight zero.

    Attributes:
        row: the gradient, the nearest to the loss.
        blocker: the output that is zero throughout; None if there is none.
        origin: the module with outputs of which the function behind it passes none; None if there is none.
        cut: the multiplication by zero in the backward pass; None if none is known.
        why: a sentence.
        unused: whether the loss itself gives the layer no gradient.
        flat: whether the log shows a dead activation: a zero output, one that is all negative, or a saturated one.
        nothing: whether no weight of the run got a gradient on any step.
        is_part: whether another parameter of the layer is trained.
    """

    row: TensorRow
    blocker: TensorRow | None
    origin: ZeroOrigin | None
    cut: GradientCut | None
    why: str
    unused: bool
    flat: bool
    nothing: bool
    is_part: bool

    @property
    def culprit(self) -> TensorRow:
        """The tensor that the finding is about."""
        return self.origin.output if self.origin is not None else self.blocker or self.row


def _find_stop(
    view: RunView, rows: Sequence[TensorRow], row: TensorRow, blocker: TensorRow | None, dead: _Gradients,
    every: _Gradients,
) -> _Stop:  # fmt: skip
    (why, unused), name = gradient_stop(row, blocker, rows), layer_of(row)[1]
    origin = None if unused or name.startswith("weight_hh") else find_zero_origin(rows, blocker or row)
    nothing = _nothing_trains(dead, every, rows)
    known = origin is not None or blocker is not None
    cut = find_cut(view, rows, row) if not known and (nothing or not unused) else None
    why = origin.words(view) if origin is not None else cut.words if cut is not None else why
    flat = is_negative(origin.output) if origin is not None else blocker is not None or bool(flatness_words(row, rows))
    is_part = not known and not unused and trains_otherwise(row, rows)
    return _Stop(row, blocker, origin, cut, why, unused, flat, nothing, is_part)


def _nothing_trains(dead: _Gradients, every: _Gradients, rows: Sequence[TensorRow]) -> bool:
    """Whether no weight matrix got a gradient on any step, and no other weight did at the end."""
    always = len(dead) == len(every) and all(g.dead_steps == g.steps for g in dead.values())
    return always and all(r.is_zero for r in rows if r.kind == "weight_grad")


def _prescription(stop: _Stop, dead: _Gradients, rows: Sequence[TensorRow], whole: str) -> Prescription:
    """Undo what makes the gradient zero, as far as the log shows it; else find it, or freeze what the loss leaves."""
    row, elements = stop.row, sum(g.numel for g in dead.values())
    if stop.is_part:
        return freeze(row.root, row.module, len(dead), row.name)
    if stop.cut is not None:
        return stop.cut.prescription()
    if stop.unused and not stop.nothing:
        return freeze(whole or row.module or row.root, "" if whole else row.module, len(dead))
    if stop.origin is not None and not stop.flat:
        return stop.origin.let_through(elements)
    if stop.flat:
        return revive(_to_revive(dead, stop.origin, stop.blocker, row, rows), row.root, elements)
    if loss_is_zero(rows):
        return print_loss(len(dead), row.step)
    return print_gradients(row.root, "" if stop.unused else layer_of(row)[0], len(dead), row.step)


_PART_WORDS = " The layer's other parameters are trained."
_SHORT_WORDS = " Its hidden state is zero throughout, as in sequences of one step."
_REVERSE_WORDS = (
    " The forward direction is trained: `outputs[-1]` holds the reverse one where it begins, behind a single input."
)


def _to_revive(
    dead: _Gradients, origin: ZeroOrigin | None, blocker: TensorRow | None, row: TensorRow, rows: Sequence[TensorRow]
) -> list[str]:
    """FQNs of the modules that made the zeros, else of the last dead layer before the zero output or the dead layer."""
    weighted = {r.module for r in rows if r.kind == "weight_grad" and r.root == row.root}
    modules = [m for m in origin.modules if m in weighted] if origin is not None else []
    if modules or blocker is None:
        return modules or [layer_of(row)[0]]
    places = {(root, name) for root, name, _ in dead}
    outputs = [r for r in rows if r.kind == "output" and r.layer in places]
    before = [r for r in outputs if r.position < blocker.position]
    return [max(before, key=lambda r: r.position).module if before else layer_of(row)[0]]


def _blocker(rows: Sequence[TensorRow], dead: _Gradients) -> TensorRow | None:
    """The first output that is zero throughout, at or after the first dead layer in execution order; else None."""
    outputs = [r for r in training_forward(rows) if r.kind == "output"]
    places = {(root, module) for root, module, _ in dead}
    start = min((r.order or 0 for r in outputs if r.layer in places), default=None)
    if start is None:
        return None
    return next((r for r in outputs if (r.order or 0) >= start and r.is_zero), None)


RULE = Rule(
    code="PD203",
    name="dead-layer",
    severity=Severity.WARNING,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=(
        RuleOption("min_steps", 6.0, "steps", "Recorded steps that must all have a gradient of zero.",
                   "Chosen empirically: layers behind a zero-initialised one get theirs after the first updates.", 2.0),
        fraction("saturated_share", 0.5,
                 "Share of a layer's output gradient that is zero because the function behind the layer is flat.",
                 "Half of it; tanh is 1 in FP32 from 9 on."),
        fraction("died_share", 0.9,
                 "Share of an activation, and of the gradient of the weight before it, that is zero since the death.",
                 "Chosen empirically: nearly all; half of a healthy ReLU's output is zero.", 0.5),
    ),
    check=check,
)  # fmt: skip
