"""PD204: gradients vanish, from layer to layer, from call to call of a recurrent cell, or from step to step.

:mod:`.vanishing_gradients_recurrent` has the detector along calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.analyses.depth import Chain, chains, joined_chains, rising_share, slope
from precdoctor.diagnosis.analyses.healthy_steps import is_well
from precdoctor.diagnosis.analyses.histories import by_optimizer, watched_steps
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import anywhere, modules_listed, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.underflow.vanishing_gradients_recurrent import (
    decay,
    find_forgetting,
    forgetting_finding,
    learnt_share,
    number_of_calls,
)
from precdoctor.diagnosis.survey.frames import AT, at, firsts, groups
from precdoctor.diagnosis.survey.rows import tensor_evidence, tensor_location
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Chains of like layers (`blocks.0`, `blocks.1`, ...; every second entry of a sequence) along which the gradient of the
output falls steadily from the last layer to the first: by more than `decay` binades in all, and in at least three
quarters of the steps from layer to layer. Half of `decay` is enough if the loss of 64 steps or more fell by less than
`learnt`. Chains that run one after the other (an encoder's and its decoder's) count as one. The rule compares L2 norms
without the loss scale, so that a change of resolution is no decay, as medians over the recorded steps. Layers whose
gradient is exactly zero belong to PD203 and are left out.

The calls of one module that a step calls at least `min_calls` times, as it does a recurrent cell, also form such a
chain. Cells forget, mostly without harm. A chain of calls is therefore a finding only if the first call gets less than
2^-`call_decay` of the last, three quarters of the calls get less than the next, and the loss fell by less than
`learnt`.

Models that learn through another one, which another optimizer trains (a generator through its discriminator), and no
longer get a gradient from it: the gradient norm has fallen `starved` times from the oldest quarter of the model's steps
to the newest, while its own loss rose. If gradients vanish because everything is learnt, the loss falls.
""",
    matters="""
Under SGD the first layers do not train. Adam divides the size of gradients out, but only down to its eps, and in FP16
the first layers' gradients are the first to be flushed. If Adam's eps exceeds the gradient of those layers (PD503),
this finding reports it.

A generator whose gradient has vanished stays where it is, or follows the noise that Adam scales up; the discriminator
has won, and both losses look calm.
""",
    example="""
Twelve layers of width 32 with sigmoids: each passes on about an eighth of the gradient, 2^-36 reaches the first.
""",
    remedy="""
Residual connections or normalisation between the layers keep the gradient's size; so does an initialisation with gain
one for the activation at hand (ReLU or GELU rather than sigmoid or tanh far from zero).

A recurrent cell needs gates that stay open while it has to remember: a forget gate's bias of 1, or log(T - 1) for T
calls.

Against a sure discriminator, give the generator a loss that does not saturate (-log D instead of log(1 - D)), computed
from logits; or let the discriminator learn more slowly.
""",
    confidence="""
0.85; 0.7 if fewer than four steps were recorded or the chain has fewer than six layers, and for a model that learns
through another one, because healthy games can also end like that. 0.75 along calls: that the loss stays up for this
reason is inferred.
""",
    references=(
        "Hochreiter et al., Gradient flow in recurrent nets: the difficulty of learning long-term dependencies (2001)",
        "Jozefowicz et al., An Empirical Exploration of Recurrent Network Architectures, ICML 2015 (forget bias 1)",
        "Tallec and Ollivier, Can recurrent neural networks warp time?, arXiv:1804.11188 (log(T - 1))",
        "Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS 2010",
        "He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385",
        "Goodfellow et al., Generative Adversarial Networks, arXiv:1406.2661, section 3 (log(1 - D) saturates)",
    ),
)

#: Bounded activations and their largest slope, which they have at 0.
_SLOPES = {"Sigmoid": 0.25, "Hardsigmoid": 1 / 6, "Tanh": 1.0, "Softsign": 1.0}
#: Chains whose decays differ by less than this many binades lose equally much. Chosen empirically.
_EQUAL_DECAY = 2.0
#: Minimum number of an optimizer's steps for a comparison of its oldest and newest quarter: six steps each.
_MIN_STEPS = 24
#: Minimum number of steps after which a loss that has not fallen shows that a model does not learn. Chosen empirically.
_TIME_TO_LEARN = 64


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the largest decay along layers, else along calls, else of a model starved by another one."""
    results = []
    for detector in (_check_layers, _check_calls, _check_players):
        results.append(detector(view, options))
        if results[-1].findings:
            return results[-1]
    evaluated = [c for c in results if c.status is not Status.NOT_APPLICABLE]
    return Checked((), "; ".join(c.reason for c in evaluated)) if evaluated else results[0]


# -- along layers -----------------------------------------------------------------------------------------------------


def _check_layers(view: RunView, options: Options) -> Checked:
    least = int(options["min_layers"])
    candidates = [*chains(view, "grad_output", least), *joined_chains(view, "grad_output", least)]
    alive = [c for c in candidates if len(c.alive) >= options["min_layers"]]
    if not alive:
        return Checked.not_applicable(f"no chain of {options['min_layers']:g} like layers with gradients")
    seen = f"the gradients along {plural(len(alive), 'chain')} of layers"
    worst, fallen = _worst(view, alive), _fall_if_stuck(view, options["learnt"])
    limit = options["decay"] / (1.0 if fallen is None else 2.0)
    if decay(worst) < limit or rising_share(worst.norms) < options["consistent_share"]:
        words = f"{decay(worst):.1f} binades lost in the worst" if decay(worst) > 0.05 else "none is lost"
        return Checked((), f"{seen}: {words} (limit {limit:g})")
    return Checked([_finding(view, worst, limit, fallen, options)], f"{decay(worst):.0f} binades lost in {seen}")


def _fall_if_stuck(view: RunView, learnt: float) -> float | None:
    """The share by which the loss fell if it is less than ``learnt`` and the run is long enough to tell; else None."""
    steps = max((len(steps) for steps in view.timeline.values()), default=0)
    fallen = learnt_share(view) if steps >= _TIME_TO_LEARN else None
    return fallen if fallen is not None and fallen < learnt else None


def _worst(view: RunView, alive: Sequence[Chain]) -> Chain:
    """The chain that loses most; if layers and activations between them lose equally, the layers: they have weights."""
    weighted = {place[:2] for place in view.places("weight")}
    most = max(map(decay, alive))
    close = [c for c in alive if decay(c) > most - _EQUAL_DECAY]
    layers = [c for c in close if (c.root, c.links[0].module) in weighted]
    return max(layers or close, key=decay)


def _finding(view: RunView, chain: Chain, limit: float, fallen: float | None, options: Options) -> Finding:
    alive = chain.alive
    first, last, lost = alive[0], alive[-1], decay(chain)
    per_layer = slope(chain.norms)
    step = watched_steps(view)[-1]
    own = {(chain.root, link.module) for link in alive}
    gradients = [r for r in view.any_rows(step) if r.kind == "grad_output" and r.layer in own]
    row = next((r for r in gradients if r.module == first.module), None)
    message = (
        f"Along {len(alive)} layers of {chain.module_class} (`{chain.pattern}`) the gradient falls from "
        f"{last.norm:.3g} at `{last.module}` to {first.norm:.3g} at `{first.module}` (L2, median of "
        f"{plural(chain.steps, 'step')}). That is a fall by 2^{lost:.1f} (limit 2^{limit:g}), a factor of "
        f"{2.0**per_layer:.3g} per layer. The RMS at the first layer is {first.rms:.2g}."
    )
    if fallen is not None:
        message += (
            f" From the oldest quarter of the run to the newest the loss has fallen by {percent(max(0.0, fallen))} "
            f"(limit {percent(options['learnt'])})."
        )
    return RULE.finding(
        confidence=0.85 if chain.steps >= 4 and len(alive) >= 6 else 0.7,
        title=f"gradients vanish along {len(alive)} layers: {first.norm / last.norm:.2g} reaches `{first.module}`",
        message=message,
        location=Location(chain.root, first.module, chain.module_class, "grad_output", Phase.BACKWARD, 0, step),
        evidence={
            "decay_binades": lost,
            "limit": limit,
            "binades_per_layer": per_layer,
            "loss_fell_by": fallen,
            "layers": chain.as_evidence()[:64],
            "steps_examined": chain.steps,
            "confidence_reason": f"it falls in {rising_share(chain.norms):.0%} of the steps from layer to layer",
            **tensor_evidence(row, gradients),
        },
        prescriptions=_prescriptions(view, chain, first.norm / last.norm),
    )


def _prescriptions(view: RunView, chain: Chain, ratio: float) -> tuple[Prescription, ...]:
    """Use an unbounded activation, if a bounded one lies between the layers; and residual connections."""
    within = {k.module.rpartition(".")[0] for k in chain.links}
    between = {c for (r, m), c in view.module_classes.items() if r == chain.root and m.rpartition(".")[0] in within}
    predicted = {"first_to_last_gradient": {"from": ratio, "to": 1.0}}
    residual = Prescription(
        title=f"a residual connection around each layer: first / last {ratio:.2g} -> about 1",
        change={"modules": chain.pattern, "residual": {"from": False, "to": True}},
        predicted=predicted,
        snippet=("import torch\n\nfor layer in layers:\n    x = x + layer(norm(x))  # was: x = layer(x)\n"),
    )
    squashing = sorted(between & _SLOPES.keys(), key=lambda c: _SLOPES[c])
    if not squashing:
        return (residual,)
    name = squashing[0]
    leaky = Prescription(
        title=f"LeakyReLU for {name}, whose slope is at most {_SLOPES[name]:g}: first / last {ratio:.2g} -> about 1",
        change={"modules": chain.pattern, "activation": {"from": name, "to": "LeakyReLU"}},
        predicted=predicted,
        snippet=(
            "import torch\n\n"
            f"act = torch.nn.LeakyReLU  # was: torch.nn.{name}\n"
            "for layer in layers:\n"
            "    torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='leaky_relu')\n"
        ),
    )
    return leaky, residual


# -- along the calls of a recurrent cell ------------------------------------------------------------------------------


def _check_calls(view: RunView, options: Options) -> Checked:
    chain, fallen = find_forgetting(view, int(options["min_calls"])), learnt_share(view)
    if chain is None or fallen is None:
        return Checked.not_applicable("no module is called often enough in a step")
    lost = max(0.0, decay(chain))
    words = f"the gradient along {number_of_calls(chain)} calls of `{chain.pattern}`: {lost:.1f} binades lost"
    limits = options["call_decay"], options["learnt"]
    if decay(chain) < limits[0] or rising_share(chain.norms) < options["consistent_share"] or fallen >= limits[1]:
        return Checked((), f"{words} (limit {limits[0]:g}), the loss fell by {percent(max(0.0, fallen))}")
    return Checked([forgetting_finding(RULE, view, chain, fallen, limits)], words)


# -- through another model --------------------------------------------------------------------------------------------
#
# The gradient of a generator comes through its discriminator, which another optimizer trains. With a loss that
# saturates, such as log(1 - D(G(z))), that gradient shrinks as the discriminator gets surer, while the loss rises.


@dataclass(frozen=True)
class _Player:
    """An optimizer whose gradients come through the model of another optimizer.

    Attributes:
        root, through: the model that it trains, and the model that its gradients come through.
        norms, losses: median gradient norm and loss of the oldest and of the newest quarter of its steps.
        rose: every loss of the newest quarter is above the median of the oldest.
        steps: all of its steps.
    """

    process: Process
    root: str
    through: str
    norms: tuple[float, float]
    losses: tuple[float, float]
    rose: bool
    steps: Sequence[StepFacts]

    @property
    def fallen(self) -> float:
        """The factor by which the median gradient norm fell."""
        return self.norms[0] / self.norms[1]


def _check_players(view: RunView, options: Options) -> Checked:
    players = _players(view)
    if not players:
        return Checked.not_applicable("no model learns through another one")
    starved = [p for p in players if p.rose and p.fallen >= options["starved"]]
    if starved:
        words = f"the gradient of {starved[0].root} fell {starved[0].fallen:.2g} times while its loss rose"
        return Checked([_starved_finding(starved[0], options)], words)
    most = players[0]
    return Checked(
        (), f"the gradient of {most.root}, which learns through {most.through}, fell {most.fallen:.2g} times"
    )


def _players(view: RunView) -> list[_Player]:
    """The players with enough steps and a non-zero gradient; the one whose gradient fell most comes first."""
    optimizers = by_optimizer(view)
    if len({o for _, o in optimizers}) < 2:
        return []
    trained = _roots_by_optimizer(view, "weight_grad_step")
    passed = _roots_by_optimizer(view, "grad_output")
    players = []
    for (process, optimizer), steps in optimizers.items():
        own_roots = trained.get(optimizer, set())
        rivals = {r for other, roots in trained.items() if other != optimizer for r in roots} - own_roots
        through = sorted(passed.get(optimizer, set()) & rivals)
        history = [
            (s.loss, s.grad_norm)
            for s in steps
            if s.loss is not None and s.grad_norm is not None and not s.skipped and is_well(view, process, s)
        ]
        if len(own_roots) != 1 or not through or len(history) < _MIN_STEPS:
            continue
        old, new = history[: len(history) // 4], history[-(len(history) // 4) :]
        losses, norms = ((median(s[i] for s in old), median(s[i] for s in new)) for i in (0, 1))
        if norms[1] > 0.0:
            rose = min(loss for loss, _ in new) > losses[0]
            players.append(_Player(process, next(iter(own_roots)), through[0], norms, losses, rose, steps))
    return sorted(players, key=lambda p: -p.fallen)


def _roots_by_optimizer(view: RunView, kind: str) -> Mapping[str, set[str]]:
    """The roots that have rows of this kind on the steps of each optimizer."""
    optimizers = {(p, s.step): s.optimizer for p, steps in view.timeline.items() for s in steps}
    found: dict[str, set[str]] = {}
    rows = view.measured((), (kind,), steps=watched_steps(view))
    one = rows.iloc[firsts(groups(rows, (*AT, "root")))]
    for key, root in zip(at(one), one["root"], strict=True):
        found.setdefault(optimizers.get(key, ""), set()).add(root)
    return found


def _starved_finding(player: _Player, options: Options) -> Finding:
    before, after = player.norms
    step = player.steps[-1].step
    return RULE.finding(
        confidence=0.7,
        title=f"the gradient of {player.root} vanishes, {player.fallen:.2g} times smaller, while its loss rises",
        message=f"{player.root} learns through {player.through}, which another optimizer trains. From the oldest "
        f"quarter of its {plural(len(player.steps), 'step')} to the newest the norm of its gradient fell from "
        f"{before:.3g} to {after:.3g}, {player.fallen:.3g} times (limit {options['starved']:g}). Meanwhile its own "
        f"loss rose from {player.losses[0]:.3g} to {player.losses[1]:.3g}, so the loss has saturated.",
        location=tensor_location((player.root, ""), "", "grad_output", Phase.BACKWARD, player.process, step),
        evidence={
            "gradient_norm": {"from": before, "to": after},
            "fallen": player.fallen,
            "limit": options["starved"],
            "loss": {"from": player.losses[0], "to": player.losses[1]},
            "through": player.through,
            "steps_examined": len(player.steps),
            "confidence_reason": "norms and losses of its own steps; that the loss saturates is inferred from both",
        },
        prescription=Prescription(
            title=f"a loss that does not saturate, from logits: gradient norm {after:.2g} -> about {before:.2g}, "
            f"as before {player.through} was sure",
            change={"loss": {"from": "log(1 - D)", "to": "-log D"}},
            predicted={"gradient_norm": {"from": after, "to": before}},
            snippet=(
                "import torch.nn.functional as F\n\n"
                "loss = F.softplus(-logits).mean()  # -log sigmoid(logits), in place of log(1 - sigmoid(logits))\n"
            ),
        ),
    )


def starved_weights(cause: Finding, effect: Finding) -> bool:
    """Whether every weight that Adam's eps dominates (``effect``, PD503) is in the chain of layers of ``cause``."""
    starved = modules_listed(effect, "weights", "parameter")
    return bool(starved) and starved <= modules_listed(cause, "layers", "module")


RULE = Rule(
    code="PD204",
    name="vanishing-gradients",
    severity=Severity.WARNING,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=(
        RuleOption("decay", 16.0, "binades", "Minimum fall of the gradient's norm from the last layer to the first.",
                   "Chosen empirically: 1 is 14 binades above FP16's smallest normal number; healthy chains of four to "
                   "eight layers lose less than 2."),
        RuleOption("starved", 16.0, "times", "Minimum fall of the norm of a gradient that comes through another model.",
                   "Chosen empirically: in healthy adversarial runs it falls up to fivefold.", 1.0),
        RuleOption("call_decay", 24.0, "binades", "Minimum fall of the gradient's norm from last to first call.",
                   "FP32 has 24 significant bits: added to the last call's share, the first one's is lost."),
        RuleOption("min_calls", 8.0, "calls", "Minimum number of calls of a module in a step.", "As in PD604.", 4.0),
        fraction("learnt", 0.1, "Fall of the loss that makes lost calls or half of `decay` harmless.",
                 "Chosen empirically: in healthy recurrent runs of 60 steps it falls by at least half."),
        RuleOption("min_layers", 4.0, "layers", "Minimum length of a chain.", "A trend needs a few points.", 3.0),
        fraction("consistent_share", 0.75, "Minimum share of the steps from layer to layer that go down.",
                 "Chosen empirically: one weak layer is not a decay with depth."),
    ),
    explains={**when(anywhere, "PD203"), **when(starved_weights, "PD503")},
    check=check,
    newer_half=True,
)  # fmt: skip
