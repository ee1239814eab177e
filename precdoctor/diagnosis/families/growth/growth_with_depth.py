"""PD604: activations that grow from layer to layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from precdoctor.diagnosis.analyses.depth import (
    LAST_CALL,
    Chain,
    Link,
    call_chains,
    chains,
    rising_share,
    slope,
)
from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.analyses.op_facts import real
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import known_format, location, tensor_evidence
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Chains of like layers (`blocks.0`, `blocks.1`, ...) with outputs that grow steadily from the first to the last, in RMS
and in the median over the recorded steps: by `growth` binades in all, and in at least three quarters of the steps
between layers. Half of that growth is enough if the last output is within `headroom` binades of the largest number of
its format. A residual stream adds up: the RMS of L layers grows by about sqrt(L), in trained transformers by a factor
of 100 and more. That is no finding, unlike a factor that repeats from layer to layer. The calls of one module that a
step calls at least `min_calls` times, as it does a recurrent cell, also form such a chain.

`repeated_growth` binades are enough if nothing in the layers limits the factor. There are `min_repeated_layers` layers
or more; the median layer repeats a factor that makes as much of outputs and, backwards, of gradients; and the outputs
of all modules inside the layers grow as well. Where a norm keeps them level, a large stream does not make the branches
larger.

Inside a module an op that it repeats forms one (`nn.RNN`, a loop over time steps or iterations): the amax of its
results grows by a factor, and not as a sum does, on half of the deep-scanned steps or more. Forward, the limits are the
same, and what has grown must reach the module's output, not only a sine of it. Backward the limit is
`gradient_growth`.
""",
    matters="""
Growth by a factor per layer is exponential in depth: with a few more layers or a slightly larger learning rate the last
ones overflow, in FP16 first. Any sum rounds the first layers away, and the gradient grows by the same factor backwards.
""",
    example="""
Weights drawn with three times the standard deviation that keeps the size of activations: 2^1 per ReLU layer, 2^16 over
16 layers.
""",
    remedy="""
Normalise between the layers, or draw the weights with a gain that fits the activation (`kaiming_normal_` for ReLU);
scale the branches of a residual stack by 1/sqrt(2L). The finding states the excess gain of each layer.
""",
    confidence="""
0.85; 0.7 if fewer than four steps were recorded or the chain has fewer than six layers, if one scan alone shows it, or
if only the limit for a repeated factor is exceeded.
""",
    references=(
        "He et al., Delving Deep into Rectifiers, arXiv:1502.01852 (initialisation that keeps the variance)",
        "Radford et al., Language Models are Unsupervised Multitask Learners, section 2.3 (1/sqrt(N) on branches)",
    ),
)

#: A layer that returns more than this many times its branch adds its input. Chosen empirically.
_MORE_THAN_BRANCH = 1.05
#: Binades by which a module's output may lie below the results that have grown inside it. Chosen empirically.
_AS_LARGE = 4.0


def check(view: RunView, options: Options) -> Checked:
    """One finding: the chain that grows most, else the op whose results grow most over its repetitions."""
    along = _check_layers(view, options)
    if along.findings:
        return along
    repeated = check_facts(
        view, ("repeated",), lambda f: _excess(view, f, options), lambda g: _repeated_finding(g, options),
        seen="no op whose results grow as a module repeats it", keep=lambda g: g.stands,
    )  # fmt: skip
    if repeated.findings:
        return Checked(repeated.findings[:1], repeated.reason)
    return repeated if along.status is Status.NOT_APPLICABLE else along


# -- repetitions of an op ---------------------------------------------------------------------------------------------


def _recorded_amax(fact: Fact) -> list[float]:
    """Return the recorded amax of an op's results, from the first repetition to the last."""
    values = fact.data.get("amax")
    return [v for x in values if (v := real(x) or 0.0) > 0.0] if isinstance(values, list) else []


def _limit(fact: Fact, last: float, options: Options) -> float:
    """Return the least growth, in binades, that is reported; ``last``: amax of the last repetition's results."""
    if fact.backward:
        return float(options["gradient_growth"])
    fmt = known_format(fact.dtype)
    return _least_growth(fmt.headroom(last) if fmt is not None else math.inf, options)


def _least_growth(headroom: float, options: Options) -> float:
    """Return the least growth, in binades, that is reported: half as much if the last layer's ``headroom`` is small."""
    return float((0.5 if headroom <= options["headroom"] else 1.0) * options["growth"])


def _excess(view: RunView, fact: Fact, options: Options) -> float:
    """Return growth over its limit; 0 if it is below, or if results do not rise steadily or do not reach the output."""
    amaxes = _recorded_amax(fact)
    if len(amaxes) < 2 or fact.count("calls") < options["min_calls"]:
        return 0.0
    if fact.number("rising") < options["consistent_share"]:
        return 0.0
    if not fact.backward and not _reaches_output(view, fact, amaxes[-1]):
        return 0.0
    grown, limit = math.log2(amaxes[-1] / amaxes[0]), _limit(fact, amaxes[-1], options)
    return grown / limit if grown >= limit else 0.0


def _reaches_output(view: RunView, fact: Fact, last: float) -> bool:
    """Return whether the module's output is about as large as the last results, or larger, on the scanned step.

    For an op directly in a top-level module any output counts. A module that returns its last child's result has no row
    of its own; then the last output inside it counts.
    """
    rows = [r for r in view.any_rows(fact.step) if r.kind == "output" and r.root == fact.root and r.amax]
    own = [r for r in rows if fact.module in ("", r.module)]
    inside = sorted((r for r in rows if r.module.startswith(f"{fact.module}.")), key=lambda r: r.position)
    amax = max((r.amax or 0.0 for r in own or inside[-1:]), default=0.0)
    return amax > 0.0 and amax * 2.0**_AS_LARGE >= last


def _repeated_finding(group: Group, options: Options) -> Finding:
    fact, amaxes = group.worst, _recorded_amax(group.worst)
    calls, ratio = fact.count("calls"), amaxes[-1] / amaxes[0]
    gain, what = ratio ** (1.0 / (calls - 1)), "gradients" if fact.backward else "activations"
    limit = _limit(fact, amaxes[-1], options)
    lost = " What the first of them add to a gradient of the weights, FP32 rounds away." if fact.backward else ""
    return group.finding(
        RULE,
        title=f"{what} grow {gain:.3g} times per repetition {fact.place_words}: {amaxes[0]:.2g} at the first, "
        f"{amaxes[-1]:.2g} at the last of {calls:,}{fact.line}",
        message=f"{fact.op_words} runs {calls:,} times, and the amax of its results goes from {amaxes[0]:.3g} to "
        f"{amaxes[-1]:.3g}. That is growth by 2^{math.log2(ratio):.1f} (limit 2^{limit:g}), a factor of {gain:.3g} per "
        f"repetition.{lost}{group.elsewhere_words}",
        certain=(
            0.85 if len(group.steps) > 1 else 0.7,
            f"it grows in {percent(fact.number('rising'))} of the repetitions",
        ),
        limits={"growth": limit},
        prescription=Prescription(
            title=f"divide the recurrence's initial weights by {gain:.3g}: last / first {ratio:.2g} -> about 1",
            change={"modules": fact.module, "initial_gain": {"from": gain, "to": 1.0}},
            predicted={"last_to_first_amax": {"from": ratio, "to": 1.0}},
            snippet=(
                "import torch\n\n"
                "with torch.no_grad():  # at initialisation; what the last state is multiplied by\n"
                f"    recurrent_weight.div_({gain:.3g})\n"
            ),
        ),
    )


# -- layers, and calls of a module ------------------------------------------------------------------------------------


def _check_layers(view: RunView, options: Options) -> Checked:
    """Check chains of like layers, and of calls of one module."""
    known = [
        *chains(view, "output", int(options["min_layers"])),
        *call_chains(view, "output", int(options["min_calls"])),
    ]
    alive = [c for c in known if len(c.alive) >= options["min_layers"]]
    if not alive:
        return Checked.not_applicable(f"no chain of {options['min_layers']:g} like layers")
    seen = f"the outputs along {plural(len(alive), 'chain')} of layers"
    guilty = [c for c in alive if _grows(c, options)]
    repeated = [] if guilty else [c for c in alive if _repeats_factor(view, c, alive, options)]
    if not guilty and not repeated:
        most = max(map(_growth, alive))
        return Checked((), f"{seen}: {max(0.0, most):.1f} binades of growth in the worst (limit {options['growth']:g})")
    worst = max(guilty or repeated, key=lambda c: (0 if guilty else -c.pattern.count("."), _growth(c)))
    scale = _branch_scale(worst, alive)
    return Checked([_finding(view, worst, scale, options)], f"{_growth(worst):.0f} binades of growth in {seen}")


def _link_name(chain: Chain, link: Link) -> str:
    if not chain.of_calls:
        return f"`{link.module}`"
    return f"call {link.index}{' and later' * (link.index == LAST_CALL)} of `{link.module}`"


def _gain(chain: Chain) -> float:
    """Return the growth factor per link; a last link that stands for many calls is left out."""
    whole = not chain.of_calls or chain.links[-1].index < LAST_CALL
    return float(2.0 ** slope(chain.sizes if whole else chain.sizes[:-1]))


def _growth(chain: Chain) -> float:
    """Binades between the first layer's output and the last's."""
    return math.log2(chain.sizes[-1] / chain.sizes[0])


def _headroom(chain: Chain) -> float:
    """Binades between the last layer's RMS and the largest number of its format."""
    last = chain.alive[-1]
    fmt = known_format(last.dtype)
    return fmt.headroom(last.rms) if fmt is not None else math.inf


def _grows(chain: Chain, options: Options) -> bool:
    """Return whether the outputs rise steadily along the chain, and by more than the limit."""
    if rising_share(chain.sizes) < options["consistent_share"]:
        return False
    return _growth(chain) >= _least_growth(_headroom(chain), options)


def _repeats_factor(view: RunView, chain: Chain, known: Sequence[Chain], options: Options) -> bool:
    """Return whether every layer multiplies outputs, and gradients backwards, by a factor that no norm limits."""
    if chain.of_calls or len(chain.alive) < options["min_repeated_layers"]:
        return False
    gradients = [c for c in chains(view, "grad_output", 2) if (c.root, c.pattern) == (chain.root, chain.pattern)]
    ways = [chain.sizes, *(c.sizes[::-1] for c in gradients)]
    if len(ways) < 2 or any(rising_share(sizes) < options["consistent_share"] for sizes in ways):
        return False
    limit = options["repeated_growth"]
    if any(min(_repeated_growth(sizes), math.log2(sizes[-1] / sizes[0])) < limit for sizes in ways):
        return False
    return all(_repeated_growth(c.sizes) >= limit / 2.0 for c in _inside(chain, known))


def _repeated_growth(sizes: Sequence[float]) -> float:
    """Return what the median factor from layer to layer makes over all layers, in binades.

    For a sum of equal terms that is at most 2.9, however many there are.
    """
    return (len(sizes) - 1) * median(math.log2(b / a) for a, b in itertools.pairwise(sizes))


def _inside(chain: Chain, known: Sequence[Chain]) -> list[Chain]:
    """Return the chains of the same layers: of the layers themselves, and of each module inside them."""
    layers = chain.pattern[: chain.pattern.index("*") + 1]
    same = [c for c in known if c.root == chain.root and not c.of_calls and len(c.alive) == len(chain.alive)]
    return [c for c in same if c.pattern == layers or c.pattern.startswith(f"{layers}.")]


def _branch_scale(chain: Chain, known: Sequence[Chain]) -> float | None:
    """Return the factor for the branches of a residual stack, 1 / sqrt(2 L); None if the layers have no residual.

    A layer has one if it returns more than any module inside it: its input as well.
    """
    if chain.of_calls:
        return None
    own = [c for c in _inside(chain, known) if c.pattern.endswith("*")]
    inner = [c for c in _inside(chain, known) if not c.pattern.endswith("*")]
    if not own or not inner:
        return None
    branch = max(inner, key=lambda c: c.alive[-1].order or 0)
    more = median(a.rms / b.rms for a, b in zip(own[0].alive, branch.alive, strict=True))
    return (2.0 * len(chain.alive)) ** -0.5 if more > _MORE_THAN_BRANCH else None


def _finding(view: RunView, chain: Chain, branch_scale: float | None, options: Options) -> Finding:
    alive = chain.alive
    first, last, grown, room = alive[0], alive[-1], _growth(chain), _headroom(chain)
    gain, whole = _gain(chain), _grows(chain, options)
    limit = _least_growth(room, options) if whole else options["repeated_growth"]
    back = "" if whole else ", and gradients grow as much backwards"
    step = watched_steps(view)[-1]
    mine = [r for r in view.any_rows(step) if r.kind == "output" and r.module in {k.module for k in alive}]
    row = next((r for r in mine if r.module == last.module and (r.call == last.index or not chain.of_calls)), None)
    each = "call" if chain.of_calls else "layer"
    along = f"{plural(len(alive), each)} of {chain.module_class} (`{chain.pattern}`)"
    return RULE.finding(
        confidence=0.85 if whole and chain.steps >= 4 and len(alive) >= 6 else 0.7,
        title=f"activations grow {gain:.3g} times per {each}: {first.rms:.2g} at {_link_name(chain, first)}, "
        f"{last.rms:.2g} at {_link_name(chain, last)}",
        message=f"Along {along} outputs grow from {first.rms:.3g} at {_link_name(chain, first)} to {last.rms:.3g} at "
        f"{_link_name(chain, last)} (RMS, median of {plural(chain.steps, 'step')}). That is growth by 2^{grown:.1f} "
        f"(limit 2^{limit:g}), a factor of {gain:.3g} per {each}{back}. The last RMS is {room:.1f} binades below "
        f"{last.dtype}'s largest number.",
        location=location(row, Phase.FORWARD, view.processes[0] if row is None else row.process, step),
        evidence={
            "growth_binades": grown,
            "limit": limit,
            "factor_per_layer": gain,
            "headroom_binades": room,
            "layers": chain.as_evidence()[:64],
            "steps_examined": chain.steps,
            "confidence_reason": f"it grows in {rising_share(chain.sizes):.0%} of the steps along them",
            **tensor_evidence(row, mine),
        },
        prescription=_prescribe(chain, first, last, gain, grown)
        if branch_scale is None
        else _prescribe_scale(chain, branch_scale, gain, grown),
    )


def _prescribe_scale(chain: Chain, scale: float, gain: float, grown: float) -> Prescription:
    """Scale the branches of a residual stack: the factor per layer is sqrt(1 + b) for branches b times the input."""
    per_layer = math.sqrt(1.0 + max(0.0, gain**2 - 1.0) * scale**2)
    left = per_layer ** (len(chain.alive) - 1)
    return Prescription(
        title=f"multiply each branch by 1 / sqrt(2 * {len(chain.alive)}) = {scale:.2g}: last / first {2.0**grown:.2g} "
        f"-> about {left:.2g}",
        change={"modules": chain.pattern, "branch_scale": {"from": 1.0, "to": scale}},
        predicted={"last_to_first_rms": {"from": 2.0**grown, "to": left}},
        snippet=(
            "def forward(self, x):  # of the layers; the output of the branch as it is now\n"
            f"    return x + {scale:.2g} * self.branch(x)\n"
        ),
    )


def _prescribe(chain: Chain, first: Link, last: Link, gain: float, grown: float) -> Prescription:
    ends = [module_expression(first.module)]
    ends += [] if chain.of_calls else ["...", module_expression(last.module)]
    return Prescription(
        title=f"divide the layers' initial weights by {gain:.3g}: last / first {2.0**grown:.2g} -> about 1",
        change={"modules": chain.pattern, "initial_gain": {"from": gain, "to": 1.0}},
        predicted={"last_to_first_rms": {"from": 2.0**grown, "to": 1.0}},
        snippet=(
            "import torch\n\n"
            f"layers = [{', '.join(ends)}]\n"
            "with torch.no_grad():\n"
            "    for layer in layers:\n"
            f"        layer.weight.div_({gain:.3g})  # at initialisation\n"
        ),
    )


RULE = Rule(
    code="PD604",
    name="growth-with-depth",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("growth", 13.0, "binades", "Minimum growth of the RMS from the first layer to the last.",
                   "From 1 to FP16's largest number are 16; amax is commonly 2 to 3 binades above the RMS."),
        RuleOption("headroom", 4.0, "binades", "Headroom of the last layer's RMS below which half of it is enough.",
                   "Chosen empirically: amax is commonly 4 to 8 times the RMS, and two binades vary between batches."),
        RuleOption("gradient_growth", 24.0, "binades", "Minimum growth of gradients over the repetitions of an op.",
                   "FP32 has 24 significant bits: added to the last share of a weight's gradient, the first is lost."),
        RuleOption("repeated_growth", 4.0, "binades", "Minimum growth, forward and backward, by a repeated factor.",
                   "A sum of L equal terms grows by 2.9 binades in L layers as large as its median one."),
        RuleOption("min_repeated_layers", 8.0, "layers", "Minimum length of a chain that repeats a factor.",
                   "Chosen empirically: 4 binades of fewer layers are a large factor in each.", 3.0),
        RuleOption("min_layers", 4.0, "layers", "Minimum length of a chain.", "A trend needs a few points.", 3.0),
        RuleOption("min_calls", 8.0, "calls", "Minimum number of calls of a module in a step, or of runs of an op.",
                   "A module that two or three inputs share is no recurrence.", 3.0),
        fraction("consistent_share", 0.75, "Minimum share of the steps from layer to layer that go up.",
                 "Chosen empirically: one large layer is not growth with depth."),
    ),
    explains=when(anywhere, "PD601", "PD602"),
    check=check,
    newer_half=True,
)  # fmt: skip
