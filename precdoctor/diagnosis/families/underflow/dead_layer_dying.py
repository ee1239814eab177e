"""PD203, layers that die: from some step on the activation after a live layer is zero, and the loss stops falling.

Too large an update, or too large inputs, move the weights before a ReLU so far that its input is negative for every
example. The gradient of a ReLU is zero there, so the layer cannot recover (Lu et al., arXiv:1903.06733).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.histories import quarter_means
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.snippets import group_option
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.underflow.dead_layer_stop import training_forward
from precdoctor.diagnosis.survey.frames import Ints, firsts, groups, keys, rows_of, worst_rows
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Key, TensorRow, gradient_evidence, location
from precdoctor.diagnosis.survey.step_facts import losses_of
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView

#: Minimum share of the run that lies after the death, and of the recorded steps since on which the layer is dead.
#: Chosen empirically.
_MIN_DEAD_SHARE, _NEARLY_ALL = 0.5, 0.9
#: Share of zeros below which the gradient of the layer nearest the loss is alive. Half of a healthy ReLU's is zero.
_ALIVE = 0.5
#: Minimum number of losses after the death, and the share by which they fall if the run still learns; both empirical.
_LOSSES, _LEARNT = 8, 0.1
#: Amax of the inputs, which should be of order one, from which the prescription divides them.
_LARGE_INPUT = 16.0


@dataclass(frozen=True)
class _ZeroHistory:
    """The share of zeros of one tensor over the steps, in ascending order; on each step the least of all ranks."""

    steps: Ints
    shares: Floats

    def death(self, limit: float, least: float) -> int | None:
        """The step from which the tensor is dead on nearly all steps; None if it lives, died too late or never lived.

        Args:
            limit: minimum share of zeros in a dead tensor.
            least: minimum number of steps from the death on.
        """
        dead = self.shares >= limit
        lasting = dead[::-1].cumsum()[::-1] >= _NEARLY_ALL * np.arange(dead.size, 0, -1)
        at = int(np.argmax(dead & lasting))
        whole = int(self.steps[-1] - self.steps[0]) + 1
        if not at or dead.size - at < least or self.steps[-1] - self.steps[at] + 1 < _MIN_DEAD_SHARE * whole:
            return None
        return int(self.steps[at]) if np.median(self.shares[:at]) < limit else None

    def since(self, step: int) -> float:
        """The median share of zeros from ``step`` on."""
        return float(np.median(self.shares[self.steps >= step]))

    def until(self, step: int) -> float:
        """The median share of zeros before ``step``."""
        return float(np.median(self.shares[self.steps < step]))


@dataclass(frozen=True)
class DeadLayer:
    """A layer with weights that died: the activation after it is zero since ``step``.

    Attributes:
        row: the weight's gradient on the last examined step.
        before, since: median share of zeros in the activation before ``step``, and from then on.
        gradient: median share of zeros in the weight's gradient from ``step`` on.
    """

    row: TensorRow
    step: int
    before: float
    since: float
    gradient: float


@dataclass(frozen=True)
class Death:
    """All layers of a run that died.

    Attributes:
        layers: the dead layers; the one nearest the loss comes first.
        since: the step of the last death, or the middle of the run if that comes later.
        losses: mean loss right after that step, and at the end of the run.
        examined: number of examined steps.
    """

    layers: Sequence[DeadLayer]
    since: int
    losses: tuple[float, float]
    examined: int


def find_death(view: RunView, steps: Sequence[int], limit: float, least: float) -> Death | None:
    """The layers that died; None without any, or if the loss still falls or gives the last layer no gradient.

    None also with too few losses, and with several optimizers: the log does not show which one trains a layer.

    Args:
        limit: minimum share of zeros, in the activation and in the gradient of the weight before it.
        least: minimum number of steps since the death.
    """
    if len(view.optimizers) > 1 or not steps:
        return None
    weights = _zeros(view, steps, ("weight_grad",))
    dead = {key[:2]: (key, at) for key, z in weights.items() if (at := z.death(limit, least)) is not None}
    if not dead:
        return None
    activations = _zeros(view, steps, ("input", "output"))
    dead_activations = {key: at for key, z in activations.items() if (at := z.death(limit, least)) is not None}
    process = next((p for p in view.processes if dead_activations and view.rows(p, steps[-1])), None)
    if process is None:
        return None
    rows = view.rows(process, steps[-1])
    layers = []
    gradients = {r.key: r for r in rows if r.kind == "weight_grad"}
    for layer, row in _activations_behind(rows, dead, dead_activations).items():
        weight, at = dead[layer]
        if weight not in gradients:  # the weight got no gradient on the last step
            continue
        at = max(at, dead_activations[row.key])
        zeros, gradient = activations[row.key], weights[weight]
        layers.append(DeadLayer(gradients[weight], at, zeros.until(at), zeros.since(at), gradient.since(at)))
    if not layers or not _loss_gives_gradient(view, rows, min(d.step for d in layers), steps):
        return None
    # What is left alive, the last layer's bias among it, may still learn for a while.
    since = max(*(d.step for d in layers), (steps[0] + steps[-1]) // 2)
    losses = _losses_since(view, process, since)
    if losses is None or losses[0] - losses[1] >= _LEARNT * abs(losses[0]):
        return None
    return Death(layers, since, losses, len(steps))


def _zeros(view: RunView, steps: Sequence[int], kinds: Sequence[str]) -> dict[Key, _ZeroHistory]:
    """The zero shares of the tensors of these kinds with at least two dimensions, in training only."""
    rows = view.measured(("dimensions", "zero_share"), kinds, columns=("phase",), steps=steps)
    training = (rows["phase"] == "train") | (rows["phase"] == "") | rows["phase"].isna()
    rows = rows[(rows["dimensions"] >= 2) & (rows["numel"] > 0) & training]
    one = worst_rows(groups(rows, (*IDENTITY, "step")), -rows["zero_share"])  # by step, the least over ranks
    ids, step, shares = groups(rows, IDENTITY), rows["step"].to_numpy(), column(rows, "zero_share")
    histories = (_ZeroHistory(step[one[own]], shares[one[own]]) for own in rows_of(ids[one], step[one]))
    return dict(zip(keys(rows.iloc[firsts(ids)]), histories, strict=True))


def _activations_behind(
    rows: Sequence[TensorRow], dead: Mapping[tuple[str, str], object], dead_activations: Mapping[Key, int]
) -> dict[tuple[str, str], TensorRow]:
    """The dead activation right after the output of each dead layer; the layer nearest the loss is first.

    Args:
        dead: root and module of the layers whose weight gradient died.
        dead_activations: the activations that died, with the step of their death.
    """
    found: dict[tuple[str, str], TensorRow] = {}
    layer: tuple[str, str] | None = None
    weighted = {r.layer for r in rows if r.kind == "weight" and len(r.shape) > 1}
    for r in training_forward(rows):
        if r.kind == "output" and r.layer in weighted:
            layer = r.layer if r.layer in dead else None
        elif layer is not None and r.key in dead_activations:
            found.setdefault(layer, r)
    return dict(reversed(found.items()))


def _loss_gives_gradient(view: RunView, rows: Sequence[TensorRow], since: int, steps: Sequence[int]) -> bool:
    """Whether the output gradient of the layer nearest the loss is mostly non-zero, in the median since the death."""
    last = next((r for r in rows if r.kind == "weight_grad" and len(r.shape) > 1), None)
    if last is None:
        return False
    where = [("root", "==", last.root), ("module", "==", last.module)]
    gradients = view.measured(("zero_share",), ("grad_output",), steps=[s for s in steps if s >= since], where=where)
    return bool(gradients["zero_share"].median() < _ALIVE)


def _losses_since(view: RunView, process: Process, step: int) -> tuple[float, float] | None:
    """Mean loss of the oldest and of the newest quarter of the steps from ``step`` on; None with too few losses."""
    losses = losses_of(s for s in view.timeline[process] if s.step >= step and not s.loss_is_bad)
    return quarter_means(losses) if len(losses) >= _LOSSES else None


def dying_finding(rule: Rule, view: RunView, death: Death, limit: float) -> Finding:
    """The finding for all layers that died, at the one nearest the loss; ``limit`` is the minimum share of zeros."""
    worst, row = death.layers[0], death.layers[0].row
    rows, name = view.rows(row.process, row.step), row.module or row.root
    others = [f"`{d.row.module}` since step {d.step} ({percent(d.gradient)})" for d in death.layers[1:5]]
    batch = max((r.amax or 0.0 for r in rows if r.kind == "batch" and "float" in r.dtype), default=0.0)
    message = (
        f"Since step {worst.step}, {percent(worst.since)} of the activations after `{name}` are exactly zero "
        f"({percent(worst.before)} before). So is {percent(worst.gradient)} of the gradient of its `{row.name}` "
        f"(medians, limit {percent(limit)})."
        + (f" The same happened to {', '.join(others)}." if others else "")
        + f" The loss has not fallen since step {death.since} ({death.losses[0]:.3g} right after, "
        f"{death.losses[1]:.3g} at the end), and it still gives the last layer a gradient. A unit that never activates "
        "gets no gradient, so it cannot recover."
        + (f" The model's input reaches {batch:.4g}." if batch >= _LARGE_INPUT else "")
    )
    fully_dead = any(d.gradient == 1.0 for d in death.layers)
    return rule.finding(
        confidence=0.85 if fully_dead else 0.7,
        title=f"`{name}` died at step {worst.step}: {percent(worst.since)} of the activations after it are zero since, "
        "and the loss does not fall",
        message=message,
        location=location(row, Phase.BACKWARD, row.process, row.step),
        evidence={
            "zero_share": worst.since,
            "zero_share_before": worst.before,
            "limit": limit,
            "died_at": worst.step,
            "layers": [
                {"module": d.row.module, "step": d.step, "zero_gradient": d.gradient} for d in death.layers[:16]
            ],
            "loss": {"from": death.losses[0], "to": death.losses[1]},
            "input_amax": batch or None,
            "steps_examined": death.examined,
            **gradient_evidence(rows, row),
            "confidence_reason": "zeros were counted in activations and gradients"
            + ("" if fully_dead else "; some units still live"),
        },
        prescriptions=_prescriptions(view, worst, batch),
    )


def _prescriptions(view: RunView, worst: DeadLayer, batch: float) -> tuple[Prescription, ...]:
    """Divide the inputs if they are large, else lower the learning rate; and use an activation that is flat nowhere."""
    zeros = {"zero_share": {"from": worst.since, "to": worst.before}}
    earlier = [s for s in view.timeline[worst.row.process] if s.step < worst.step and s.lr]
    chosen = []
    if batch >= _LARGE_INPUT:
        chosen.append(
            Prescription(
                title=f"divide the inputs by {batch:.4g}: amax {batch:.4g} -> 1",
                change={"input_scale": {"from": 1.0, "to": 1.0 / batch}},
                predicted={**zeros, "input_amax": {"from": batch, "to": 1.0}},
                snippet=f"x = x / {batch!r}  # better: subtract the mean of the data and divide by its deviation\n",
            )
        )
    elif earlier:
        rate = max(s.lr or 0.0 for s in earlier)
        chosen.append(
            Prescription(
                title=f"learning rate {rate / 10:.3g} instead of {rate:.3g}, or a warm-up over the first "
                f"{plural(10 * worst.step, 'step')}: zeros {percent(worst.since)} -> {percent(worst.before)}",
                change={"lr": {"from": rate, "to": rate / 10}},
                predicted=zeros,
                snippet=group_option("lr", repr(rate / 10)),
            )
        )
    leaky = Prescription(
        title=f"LeakyReLU, whose slope is 0.01 where ReLU's is 0: zeros {percent(worst.since)} -> 0 %",
        change={"activation": {"from": "ReLU", "to": "LeakyReLU"}},
        predicted={"zero_share": {"from": worst.since, "to": 0.0}},
        snippet="import torch.nn.functional as F\n\nx = F.leaky_relu(x)  # was: F.relu(x)\n",
    )
    return (*chosen, leaky)
