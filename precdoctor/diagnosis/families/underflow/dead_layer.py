"""PD203: layers whose weights get a gradient of exactly zero, or none, for the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.underflow.dead_layer_dying import died
from precdoctor.diagnosis.families.underflow.dead_layer_dying import finding as died_finding
from precdoctor.diagnosis.families.underflow.dead_layer_flushed import finding as flushed_finding
from precdoctor.diagnosis.families.underflow.dead_layer_flushed import flushed_zeros
from precdoctor.diagnosis.families.underflow.dead_layer_saturated import finding as saturated_finding
from precdoctor.diagnosis.families.underflow.dead_layer_saturated import saturated
from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import TensorRow, location, path_evidence, path_to, range_evidence, text
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.tail import magnitude

PAGE = RulePage(
    finds="""
Weight matrices that require gradients and take part in the forward pass, but whose gradient is exactly zero in every
element on all recorded steps, or from some step on and for most of them: a ReLU that never fires, a gate stuck at zero,
a path cut by rounding. Of a chain of dead layers the output that is zero throughout is named where there is one, else
the layer nearest the loss. If that layer's output is neither all negative nor saturated, and what arrives there is zero
already, then the loss itself gives it nothing (a term with weight zero, a mask): that is information. So are layers
that no gradient reaches at all (`grad` stays None: detached, or their output is not used in the loss). Biases, frozen
weights, modules that never ran, steps without a learning rate, and the first steps of zero-initialised layers are not
judged. Single dead units or unused embedding rows are not a dead layer.

In FP16 all of that may be underflow. If the last gradient before the zeros lies at or below FP16's smallest normal
number throughout, or if every FP16 gradient is zero from the loss on, the gradient was flushed: a warning, or an error
with half of the elements of all weight matrices. The finding names where the zeros begin, and the loss scale that
brings the last gradient with non-zero elements out of the subnormals.

A layer that was alive has died where, from some step on and for at least half of those recorded, `died_share` of the
activation behind it is zero and as much of its weights' gradient, and the loss, which still gives the layer nearest to
it a gradient, has not fallen by a tenth since. Runs with several optimizers are left out of that.

A layer is as good as dead where `saturated_share` of its output is so large that the tanh or sigmoid behind it is flat,
and as much of the gradient that comes back exactly zero, in three quarters of the steps from the beginning on.
""",
    matters="""
The layer never learns; weight decay shrinks it all the same. The rest of the network works around it, so the loss goes
down and nothing looks wrong, only slower and to a worse end.
""",
    example="""
A bias initialised to -10 before a ReLU: the unit's input never becomes positive, the gradient is zero for ever.

    nn.init.constant_(layer.bias, -10.0)
    y = layer(x).relu()   # all zeros
""",
    remedy="""
Look at what follows the named layer. If an activation there is all zeros, lower the learning rate that pushed it
there or use a leaky activation, and initialise the layer again. Where it died in the first steps, bring the inputs to
order one (pixels of 0..255 are not), or warm the learning rate up. A layer before a saturated tanh starts with a
smaller gain (a policy's last layer with 0.01), or its input is normalised. If no gradient reaches the layer, look for
`detach()`, `no_grad()`, `.item()`, an argmax, or an output that never enters the loss; if that is meant, freeze the
layer with `requires_grad_(False)`.
""",
    confidence="""
0.9; 0.75 when fewer than twice the required steps were recorded; 0.8 for layers no gradient reaches; 0.85 for one that
died, 0.7 where some of its units are left. That there is no gradient is not concluded when rows were dropped.
""",
    references=(
        "Lu et al., Dying ReLU and Initialization, arXiv:1903.06733",
        "PyTorch documentation: torch.Tensor.grad, autograd mechanics",
    ),
)
#: A layer that died within the run has been dead for this share of the recorded steps, or is not judged.
_MOST = 0.75
_COLUMNS = ("root", "module", "module_class", "kind", "name", "phase", "shape", "numel", "zero")

#: Root, module and name of a parameter.
_Place = tuple[str, str, str]
#: Kinds that the path to a tensor of a kind goes through.
_AROUND = {"output": ("batch", "input", "output"), "weight_grad": ("loss", "grad_output")}


@dataclass
class _Gradient:
    """What was seen of one weight's gradient."""

    module_class: str
    numel: int
    #: Those it was recorded on, on any rank.
    steps: set[int] = field(default_factory=set)
    #: The last step on which an element was not zero, on any rank.
    alive: int = -1
    last: tuple[Process, int] = (Process(0, 0), 0)

    @property
    def dead_steps(self) -> int:
        """Recorded steps since the last one that gave it anything."""
        return sum(s > self.alive for s in self.steps)


def check(view: RunView, options: Options) -> Checked:
    """At most two findings: the dead layer nearest the loss, or a saturated one; and the layers no gradient reaches."""
    steps = _judged_steps(view)
    gradients = _gradients(view, steps)
    if not gradients:
        return Checked.not_applicable("no weight matrix got a gradient on a step with a learning rate")
    most = max(len(g.steps) for g in gradients.values())
    seen = f"the gradients of {plural(len(gradients), 'weight matrix')} on {plural(most, 'step')}"
    if most < options["min_steps"]:
        return Checked((), f"{seen}, too few to tell")
    dead = {p: g for p, g in gradients.items() if g.dead_steps >= max(options["min_steps"], _MOST * len(g.steps))}
    flat = {} if dead else saturated(view, steps, options["saturated_share"], _MOST)
    never = any(g.alive < 0 for g in dead.values())
    death = None if never or flat else died(view, steps, options["died_share"], options["min_steps"])
    findings = []
    if death is not None:
        findings.append(died_finding(view, death, options["died_share"]))
    elif dead:
        findings.append(_dead_finding(view, dead, gradients, options))
    elif flat:
        findings.append(saturated_finding(view, flat, options["saturated_share"]))
    if view.missing is None and not view.partial_modules:
        unreached = _unreached(view, gradients, steps, options)
        if unreached:
            findings.append(_unreached_finding(unreached, most, options))
    words = f"{len(dead):,} of {seen} zero to the end" if dead else f"{seen}: every one of them non-zero on some step"
    words += "; before a saturated function: " + ", ".join(f"`{m or r}`" for r, m, _ in flat) if flat else ""
    words += f"; {len(death.layers)} died on the way" if death is not None else ""
    return Checked(findings, words, Status.FAILED if findings else None)


def _judged_steps(view: RunView) -> list[int]:
    """Recorded healthy steps that were taken at a learning rate above zero."""
    moving = {
        s.step for steps in view.timeline.values() for s in steps if not s.skipped and (s.lr is None or s.lr > 0.0)
    }
    return [s for s in watched_steps(view) if s in moving]


def _gradients(view: RunView, steps: Sequence[int]) -> Mapping[_Place, _Gradient]:
    found: dict[_Place, _Gradient] = {}
    for r in view.scan_records(_COLUMNS, ("weight_grad",), steps=steps):
        shape = r["shape"]
        if shape is None or len(shape) < 2:
            continue
        place = (str(r["root"]), str(r["module"]), str(r["name"]))
        gradient = found.setdefault(place, _Gradient(text(r["module_class"]), int(r["numel"])))
        gradient.steps.add(int(r["step"]))
        if int(r["zero"]) != int(r["numel"]):
            gradient.alive = max(gradient.alive, int(r["step"]))
        gradient.last = (Process(int(r["rank"]), int(r["attempt"])), int(r["step"]))
    return found


def _unreached(
    view: RunView, gradients: Mapping[_Place, _Gradient], steps: Sequence[int], options: Options
) -> dict[_Place, str]:
    """Trainable matrices of modules that ran in training, in a root that was trained, without any gradient; class."""
    trained = {root for root, _, _ in gradients}
    touched = {(root, module) for root, module, _ in gradients}
    ran: dict[tuple[str, str], set[int]] = {}
    for frame in view.scan(("root", "module", "kind", "phase"), ("output",), steps=steps):
        chosen = frame.loc[frame["phase"] == "train", ["root", "module", "step"]].drop_duplicates()
        for root, module, step in zip(chosen["root"], chosen["module"], chosen["step"], strict=True):
            ran.setdefault((str(root), str(module)), set()).add(int(step))
    found: dict[_Place, str] = {}
    for process in view.processes:
        for root in view.facts(process).get("roots") or ():
            name = text(root.get("name"))
            for p in root.get("parameters") or ():
                place = (name, text(p.get("module")), text(p.get("name")))
                if (
                    p.get("requires_grad")
                    and len(p.get("shape") or ()) >= 2
                    and name in trained
                    and place[:2] not in touched
                    and len(ran.get(place[:2], ())) >= options["min_steps"]
                ):
                    found[place] = view.module_classes.get(place[:2], "")
    return found


def _dead_finding(
    view: RunView, dead: Mapping[_Place, _Gradient], every: Mapping[_Place, _Gradient], options: Options
) -> Finding:
    process, step = next(iter(dead.values())).last
    rows = view.rows(process, step)
    row = next(r for r in rows if r.kind == "weight_grad" and (r.root, r.module, r.name) in dead)  # nearest the loss
    gradient = dead[row.root, row.module, row.name]
    steps, all_steps = gradient.dead_steps, len(gradient.steps)
    blocker = _blocker(rows, dead)
    zeros = flushed_zeros(view, process, step, frozenset(dead)) if blocker is None else None
    if zeros is not None:
        parts = tuple(sum(g.numel for g in some.values()) for some in (dead, every))
        names = [f"{m}.{n}".strip(".") for _, m, n in dead]
        lasting = steps, all_steps
        return flushed_finding(view, zeros, names, (parts[0], parts[1]), lasting, options["min_steps"])
    culprit = blocker or row
    why, unused = _why(row, blocker, rows)
    elements = sum(g.numel for g in dead.values())
    parameters = [f"{m}.{n}".strip(".") for _, m, n in dead]
    message = (
        f"The gradient of {_listed(parameters)} was exactly zero in every element on "
        f"{'all' if steps == all_steps else f'the last {steps:,} of'} {plural(all_steps, 'recorded step')} (limit "
        f"{options['min_steps']:g}), steps up to {step}: {elements:,} elements "
        f"in {len(dead)} of {len(every):,} weight matrices get nothing from the loss. {why}"
    )
    who = f"`{culprit.module or culprit.root}`"
    title = f"{who} lets no gradient pass" if blocker is not None else f"{who} is {'not trained' if unused else 'dead'}"
    return Finding(
        code="PD203",
        name="dead-layer",
        severity=Severity.INFO if unused else Severity.WARNING,
        confidence=0.9 if steps >= 2 * options["min_steps"] else 0.75,
        title=f"{title}: {plural(len(dead), 'weight')} got a gradient of exactly zero on "
        f"{'all' if steps == all_steps else 'the last'} {steps} steps",
        message=message,
        location=location(culprit, Phase.FORWARD if blocker is not None else Phase.BACKWARD, process.rank, step),
        evidence={
            "zero_gradient_steps": steps,
            "limit": options["min_steps"],
            "dead_weights": parameters[:16],
            "dead_elements": elements,
            "range": range_evidence(culprit),
            "path": path_evidence(path_to([r for r in rows if r.kind in _AROUND[culprit.kind]], culprit)),
            "confidence_reason": "every element of every recorded gradient was counted",
        },
        prescriptions=(_freeze(row.module or row.root, row.module, len(dead)),)
        if unused
        else (_revive(dead, blocker, row, elements),),
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{n}`" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _why(row: TensorRow, blocker: TensorRow | None, rows: Sequence[TensorRow]) -> tuple[str, bool]:
    """What stops the gradient, in a sentence; and whether it is the loss that gives none."""
    if blocker is not None:
        return (
            f"All {blocker.numel:,} elements of {blocker.label} ({blocker.module_class}) are zero: nothing passes.",
            False,
        )
    if not _output_gradient_is_zero(row, rows):
        return "A gradient does arrive at its output: its input, or the code between, is zero.", False
    cut = _how_cut(row, rows)
    if cut:
        return f"The gradient arriving at its output is zero as well, and that output {cut}.", False
    words = (
        "The gradient arriving at its output is zero as well: the loss does not use it, or gives it the weight zero."
    )
    return words, True


def _revive(dead: Mapping[_Place, _Gradient], blocker: TensorRow | None, row: TensorRow, elements: int) -> Prescription:
    """Start again with the layer that feeds what is zero, or with the dead layer itself."""
    behind = [m for _, m, _ in dead if blocker is None or m < blocker.module]
    module = behind[-1] if blocker is not None and behind else row.module
    return Prescription(
        title=f"initialise `{module or row.root}` again: dead elements {elements:,} -> 0",
        change={"module": module, "initialise": True},
        predicted={"dead_elements": {"from": elements, "to": 0}},
        snippet=(
            "import torch\n\n"
            f"layer = {module_expression(module)}\n"
            "layer.reset_parameters()  # weights and bias, so that the activation behind it fires\n"
        ),
    )


def _blocker(rows: Sequence[TensorRow], dead: Mapping[_Place, _Gradient]) -> TensorRow | None:
    """The first output that is zero throughout, from the first dead layer on in execution order."""
    outputs = [r for r in rows if r.kind == "output" and r.order is not None and r.phase == "train"]
    places = {(root, module) for root, module, _ in dead}
    start = min((r.order or 0 for r in outputs if (r.root, r.module) in places), default=None)
    if start is None:
        return None
    return next((r for r in outputs if (r.order or 0) >= start and r.zero == r.numel), None)


def _output_gradient_is_zero(row: TensorRow, rows: Sequence[TensorRow]) -> bool:
    mine = [r for r in rows if r.kind == "grad_output" and (r.root, r.module) == (row.root, row.module)]
    return bool(mine) and all(r.zero == r.numel for r in mine)


def _how_cut(row: TensorRow, rows: Sequence[TensorRow]) -> str:
    """What of the layer's output makes an activation behind it flat; empty when nothing does.

    An output that is almost all negative stops at a ReLU. From 9 on tanh, from 17 on a sigmoid is flat in FP32.
    """
    mine = [r for r in rows if r.kind == "output" and (r.root, r.module) == (row.root, row.module)]
    for output in mine:
        if output.sum is not None and -output.sum >= 0.75 * magnitude(output.histogram) > 0.0:
            return "is almost all negative: a ReLU behind it never fires"
        if output.amin_nonzero is not None and output.amin_nonzero >= 9.0 and not output.zero:
            return f"is nowhere below {output.amin_nonzero:.3g} in magnitude: what follows is saturated"
    return ""


def _unreached_finding(places: Mapping[_Place, str], steps: int, options: Options) -> Finding:
    (root, module, _), module_class = next(iter(places.items()))
    names = [f"{m}.{n}".strip(".") for _, m, n in places]
    return Finding(
        code="PD203",
        name="dead-layer",
        severity=Severity.INFO,
        confidence=0.8,
        title=f"no gradient ever reaches `{module or root}`, although it runs and requires one",
        message=f"Over {plural(steps, 'recorded step')} (limit {options['min_steps']:g}) {_listed(names)} took part in "
        "the forward pass and never got a gradient: detached, or not used by the loss. Freeze what is not to be "
        "trained.",
        location=Location(root, module, module_class or None, "weight_grad", Phase.BACKWARD),
        evidence={
            "weights": names[:16],
            "steps": steps,
            "limit": options["min_steps"],
            "confidence_reason": "no gradient of it is on record, others of the same model are",
        },
        prescriptions=(_freeze(module or root, module, len(names)),),
    )


def _freeze(place: str, module: str, weights: int) -> Prescription:
    return Prescription(
        title=f"freeze `{place}`, or use its output in the loss: weights without gradient {weights} -> 0",
        change={"module": module, "requires_grad": {"from": True, "to": False}},
        predicted={"weights_without_gradient": {"from": weights, "to": 0}},
        snippet=f"{module_expression(module)}.requires_grad_(False)\n",
    )


RULE = Rule(
    code="PD203",
    name="dead-layer",
    severity=Severity.WARNING,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=(
        RuleOption(
            "min_steps",
            6.0,
            "steps",
            "Recorded steps on all of which the gradient must be zero.",
            "Precdoctor's own: layers behind a zero-initialised one get theirs after the first updates.",
            2.0,
        ),
        RuleOption(
            "saturated_share",
            0.5,
            "fraction",
            "Part of a layer's output gradient that is zero because what follows the layer is flat.",
            "Half of it; tanh is 1 in FP32 from 9 on.",
            maximum=1.0,
        ),
        RuleOption(
            "died_share",
            0.9,
            "fraction",
            "Part of an activation, and of the gradient of the weight before it, that is zero after the layer died.",
            "Precdoctor's own: nearly all; of a healthy ReLU's output half is zero.",
            0.5,
            1.0,
        ),
    ),
    kinds=("weight_grad",),
    columns=("zero", "numel", "shape"),
    check=check,
    step_columns=("lr", "skipped"),
)
