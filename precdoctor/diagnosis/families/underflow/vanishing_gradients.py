"""PD204: gradients shrink, from layer to layer or from step to step, until nothing is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.underflow.saturated_generator import Player, players
from precdoctor.diagnosis.families.underflow.vanishing_gradients_recurrent import finding as forgetting_finding
from precdoctor.diagnosis.families.underflow.vanishing_gradients_recurrent import forgetting, learnt
from precdoctor.diagnosis.survey.depth import Chain, chains, consistent_share, joined_chains, slope
from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import path_evidence, range_evidence
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Chains of like layers (`blocks.0`, `blocks.1`, ...; every second entry of a sequence) along which the gradient of the
output falls steadily from the last layer to the first: by more than `decay` binades in all, in at least three quarters
of the steps from layer to layer. Chains that run one after the other (an encoder's and its decoder's) are taken as one.
Compared are L2 norms, so that a change of resolution is no decay; medians over the recorded steps; the loss scale is
taken out. Layers whose gradient is exactly zero are PD203's and left out here.

The calls of one module that a step calls `min_calls` times and more, a recurrent cell's, are such a chain, too. Cells
forget, and most of what they forget nobody misses; so there it is a finding only where the first call gets less than
2^-`call_decay` of the last, in three quarters of the calls less than the next, and the loss has not fallen by `learnt`.

Or a model that learns through another one, which another optimizer trains (a generator through its discriminator), and
gets nothing back from it any more: its gradient norm has fallen `starved` times from the oldest quarter of its steps to
the newest, while its own loss went up. Where gradients vanish because everything is learnt, the loss goes down.
""",
    matters="""
Under SGD the first layers do not train. Adam divides the size of gradients out, but only down to its eps, and in FP16
the first layers' gradients are the first to be flushed. Where Adam's eps swallows the gradient of those layers (PD503),
that is told here.

A generator whose gradient has vanished stays where it is, or follows the noise that Adam scales up; the discriminator
has won, and both losses look calm.
""",
    example="""
Twelve layers of width 32 with sigmoids: each passes on about an eighth of the gradient, 2^-36 reaches the first.
""",
    remedy="""
Residual connections or normalisation between the layers keep the gradient's size; so does an initialisation with gain
one for the activation at hand (ReLU or GELU rather than sigmoid or tanh far from zero).

A recurrent cell needs gates that stay open as long as something is to be remembered: a forget gate's bias of 1, or
log(T - 1) for T calls.

Against a sure discriminator a loss that does not saturate (-log D in place of log(1 - D)), computed from logits, gives
the generator a gradient; or let the discriminator learn more slowly.
""",
    confidence="""
0.85; 0.7 when fewer than four steps were recorded or the chain has fewer than six layers, and for a model that learns
through another one: games end like that, too. 0.75 along calls: that the loss stays for that reason is inferred.
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

#: Bounded activations and their largest slope, at 0.
_SLOPES = {"Sigmoid": 0.25, "Hardsigmoid": 1 / 6, "Tanh": 1.0, "Softsign": 1.0}


def check(view: RunView, options: Options) -> Checked:
    """One finding: the largest decay along layers, or along calls, or the model that its adversary gives nothing."""
    looks = [_along_depth(view, options)]
    for look in (_along_calls, _through_another):
        if looks[-1].findings:
            return looks[-1]
        looks.append(look(view, options))
    if looks[-1].findings:
        return looks[-1]
    judged = [c for c in looks if c.status is not Status.NOT_APPLICABLE]
    return Checked((), "; ".join(c.reason for c in judged)) if judged else looks[0]


def _along_calls(view: RunView, options: Options) -> Checked:
    found, fallen = forgetting(view, int(options["min_calls"])), learnt(view)
    if found is None or fallen is None:
        return Checked.not_applicable("no module is called often enough in a step")
    words = (
        f"the gradient along {found.calls} calls of `{found.chain.pattern}`: {max(0.0, found.lost):.1f} binades lost"
    )
    limits = options["call_decay"], options["learnt"]
    if found.lost < limits[0] or found.steadiness < options["consistent_share"] or fallen >= limits[1]:
        return Checked((), f"{words} (limit {limits[0]:g}), the loss fell by {percent(max(0.0, fallen))}")
    return Checked([forgetting_finding(view, found, fallen, limits)], words, Status.FAILED)


def _through_another(view: RunView, options: Options) -> Checked:
    game = players(view)
    if not game:
        return Checked.not_applicable("no model learns through another one")
    starved = [p for p in game if p.rose and p.fallen >= options["starved"]]
    if starved:
        words = f"the gradient of {starved[0].root} fell {starved[0].fallen:.2g} times while its loss rose"
        return Checked([_starved_finding(starved[0], options)], words, Status.FAILED)
    return Checked(
        (), f"the gradient of {game[0].root}, which learns through {game[0].through}, fell {game[0].fallen:.2g} times"
    )


def _along_depth(view: RunView, options: Options) -> Checked:
    least = int(options["min_layers"])
    known = [*chains(view, "grad_output", least), *joined_chains(view, "grad_output", least)]
    alive = [c for c in known if sum(k.norm > 0.0 for k in c.links) >= options["min_layers"]]
    if not alive:
        return Checked.not_applicable(f"no chain of {options['min_layers']:g} like layers with gradients")
    seen = f"the gradients along {plural(len(alive), 'chain')} of layers"
    worst = _worst(view, alive)
    if _decay(worst) < options["decay"] or consistent_share(_norms(worst), 1.0) < options["consistent_share"]:
        words = f"{_decay(worst):.1f} binades lost in the worst" if _decay(worst) > 0.05 else "none is lost"
        return Checked((), f"{seen}: {words} (limit {options['decay']:g})")
    return Checked([_finding(view, worst, options)], f"{_decay(worst):.0f} binades lost in {seen}", Status.FAILED)


def _worst(view: RunView, alive: Sequence[Chain]) -> Chain:
    """Of layers and the activations between them, which lose as much, the layers: those can be changed."""
    weighted = {place[:2] for place in view.places("weight")}
    most = max(map(_decay, alive))
    close = [c for c in alive if _decay(c) > most - 2.0]
    layers = [c for c in close if (c.root, c.links[0].module) in weighted]
    return max(layers or close, key=_decay)


def _norms(chain: Chain) -> list[float]:
    """From the first layer to the last."""
    return [k.norm for k in chain.links if k.norm > 0.0]


def _decay(chain: Chain) -> float:
    """Binades between the last layer's gradient and the first's."""
    norms = _norms(chain)
    return math.log2(norms[-1] / norms[0])


def _finding(view: RunView, chain: Chain, options: Options) -> Finding:
    alive = [k for k in chain.links if k.norm > 0.0]
    first, last, lost = alive[0], alive[-1], _decay(chain)
    each = slope(_norms(chain))
    step = watched_steps(view)[-1]
    rows = next((r for p in view.processes if (r := view.rows(p, step))), ())
    mine = [r for r in rows if r.kind == "grad_output" and r.module in {k.module for k in alive}]
    row = next((r for r in mine if r.module == first.module), None)
    message = (
        f"Along {len(alive)} layers of {chain.module_class} (`{chain.pattern}`) the gradient falls from "
        f"{last.norm:.3g} at `{last.module}` to {first.norm:.3g} at `{first.module}` (L2, median of "
        f"{plural(chain.steps, 'step')}): by 2^{lost:.1f} (limit 2^{options['decay']:g}), a factor of "
        f"{2.0**each:.3g} per layer. An element of the first one is {first.rms:.2g} on average."
    )
    evidence = {
        "decay_binades": lost,
        "limit": options["decay"],
        "binades_per_layer": each,
        "layers": chain.as_evidence()[:64],
        "steps_examined": chain.steps,
        "confidence_reason": f"it falls in {consistent_share(_norms(chain), 1.0):.0%} of the steps from layer to layer",
    }
    if row is not None:
        evidence |= {"range": range_evidence(row), "path": path_evidence(mine)}
    return Finding(
        code="PD204",
        name="vanishing-gradients",
        severity=Severity.WARNING,
        confidence=0.85 if chain.steps >= 4 and len(alive) >= 6 else 0.7,
        title=f"gradients vanish along {len(alive)} layers: {first.norm / last.norm:.2g} reaches `{first.module}`",
        message=message,
        location=Location(chain.root, first.module, chain.module_class, "grad_output", Phase.BACKWARD, 0, step),
        evidence=evidence,
        prescriptions=_prescriptions(view, chain, first.norm / last.norm),
    )


def _prescriptions(view: RunView, chain: Chain, ratio: float) -> tuple[Prescription, ...]:
    """An activation that does not squash, where a module that does is between the layers; residual connections."""
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
        title=f"LeakyReLU for {name}, whose slope is {_SLOPES[name]:g} at most: first / last {ratio:.2g} -> about 1",
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


def _starved_finding(player: Player, options: Options) -> Finding:
    before, after = player.norms
    step = player.steps[-1].step
    message = (
        f"{player.root} learns through {player.through}, which another optimizer trains. From the oldest quarter of "
        f"its {plural(len(player.steps), 'step')} to the newest the norm of its gradient fell from {before:.3g} to "
        f"{after:.3g}, {player.fallen:.3g} times (limit {options['starved']:g}), while its own loss rose from "
        f"{player.losses[0]:.3g} to {player.losses[1]:.3g}: the loss has saturated, it is not learnt."
    )
    return Finding(
        code="PD204",
        name="vanishing-gradients",
        severity=Severity.WARNING,
        confidence=0.7,
        title=f"the gradient of {player.root} vanishes, {player.fallen:.2g} times smaller, while its loss rises",
        message=message,
        location=Location(player.root, "", None, "grad_output", Phase.BACKWARD, player.process.rank, step),
        evidence={
            "gradient_norm": {"from": before, "to": after},
            "fallen": player.fallen,
            "limit": options["starved"],
            "loss": {"from": player.losses[0], "to": player.losses[1]},
            "through": player.through,
            "steps_examined": len(player.steps),
            "confidence_reason": "norms and losses of its own steps; that the loss saturates is inferred from both",
        },
        prescriptions=(
            Prescription(
                title=f"a loss that does not saturate, from logits: gradient norm {after:.2g} -> about {before:.2g}, "
                f"as before {player.through} was sure",
                change={"loss": {"from": "log(1 - D)", "to": "-log D"}},
                predicted={"gradient_norm": {"from": after, "to": before}},
                snippet=(
                    "import torch.nn.functional as F\n\n"
                    "loss = F.softplus(-logits).mean()  # -log sigmoid(logits), in place of log(1 - sigmoid(logits))\n"
                ),
            ),
        ),
    )


RULE = Rule(
    code="PD204",
    name="vanishing-gradients",
    severity=Severity.WARNING,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=(
        RuleOption(
            "decay",
            16.0,
            "binades",
            "Fall of the gradient's norm from the last layer to the first that is too much.",
            "Precdoctor's own: the distance from 1 to FP16's smallest normal number is 14; healthy chains of "
            "four to eight layers lose less than 2.",
        ),
        RuleOption(
            "starved",
            16.0,
            "times",
            "Fall of the gradient norm of a model that learns through another one, while its loss rises.",
            "Precdoctor's own: in healthy adversarial runs it falls up to fivefold.",
            1.0,
        ),
        RuleOption(
            "call_decay",
            24.0,
            "binades",
            "Fall of the gradient's norm from the last call of a module to its first that is too much.",
            "FP32 has 24 significant bits: in a sum with the last call's share the first one's is rounded away.",
        ),
        RuleOption("min_calls", 8.0, "calls", "Modules called less often in a step are not judged.", "As PD604.", 4.0),
        RuleOption(
            "learnt",
            0.1,
            "fraction",
            "Where the loss has fallen by so much, forgotten calls are not missed.",
            "Precdoctor's own: in healthy recurrent runs of 60 steps it falls by half and more.",
            maximum=1.0,
        ),
        RuleOption("min_layers", 4.0, "layers", "Shorter chains are not judged.", "A trend needs a few points.", 3.0),
        RuleOption(
            "consistent_share",
            0.75,
            "fraction",
            "Steps from layer to layer that must go down.",
            "Precdoctor's own: one weak layer is not a decay with depth.",
            maximum=1.0,
        ),
    ),
    kinds=("grad_output",),
    columns=("sum_sq", "numel", "scale"),
    check=check,
)
