"""PD503: Adam's eps is larger than the gradients it is meant to guard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.analyses.optimizer_states import SCALE_FREE, decay_of, second_moments
from precdoctor.diagnosis.analyses.parameters import (
    HALF,
    groups_of_parameters,
    is_adam,
    parameter_groups,
    parameter_label,
    worst_parameters,
)
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.snippets import group_option
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.frames import at, groups, histograms, keys, lasts, parameters, rows_of
from precdoctor.diagnosis.survey.measures import Floats, column, share, unscaling
from precdoctor.diagnosis.survey.rows import Key, Parameter, location, number, parameter_in, tensor_evidence, text
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView
from precdoctor.numerics.histogram import ExponentHistogram

PAGE = RulePage(
    finds="""
Weight matrices trained with Adam or AdamW (of torch, or a fused or low-bit one of another library) where most gradient
elements are below `eps / damping`, both in the first recorded steps and in the median over the run. The gradient is the
one given to the optimizer. Adam divides by sqrt(v) + eps, and sqrt(v) is about the size of the gradient g, so the step
is g / (g + eps) of the learning rate: a ninth of it or less where g is eps / 8 or less. Where the optimizer's state was
recorded, sqrt(v) itself must also be that small, because one large gradient in a thousand steps keeps it up.

Three kinds of gradient do not count. Gradients that fall that low only as the loss approaches zero are convergence.
Gradients that grow `opening` times over the run may lie behind a gate that starts at zero (ReZero, adaLN-zero, a
zero-initialised gain) and opens; they count only under an eps above `large_eps` that damps them to the end. Zeros are
no small gradients. Biases and gains are not judged: a bias before a normalisation, or of attention keys, has a gradient
of zero by mathematics, and its recorded gradient is rounding.
""",
    matters="""
Adam's promise is a step of about the learning rate for every element, whatever the size of its gradient. Where eps
takes over, elements with small gradients hardly move: the layer trains a hundred times more slowly than its
neighbours, and a larger learning rate harms the others first.
""",
    example="""
Outputs in metres where micrometres matter: the loss is 1e-12, its gradients 1e-11, eps is 1e-8, and the network takes
steps of a thousandth of the learning rate.

    torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8)    # damped to 0.1 %
    torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-15)   # full steps
""",
    remedy="""
Bring loss and targets to order 1 (a constant factor on the loss is enough: Adam divides it out again, eps does not), or
lower eps to the value in the finding. In FP16 optimizer state eps must stay above 6e-8, or it is zero: there only
scaling helps.
""",
    confidence="""
0.95 where the state was recorded. Without it 0.85: the share is counted, but that sqrt(v) is about the gradient's size
is an approximation. 0.7 below eight steps.
""",
    references=(
        "Kingma and Ba, Adam: A Method for Stochastic Optimization, arXiv:1412.6980, algorithm 1",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, arXiv:2309.14322",
    ),
)
_COLUMNS = ("numel", "exp_lo", "exp_hist", "nan")


@dataclass(frozen=True)
class _Gradient:
    """The gradient of one weight over the recorded steps.

    Attributes:
        shares, sizes: share of the non-zero elements at or below eps / damping, and L2 norm without the loss scale; one
            value per recorded step, ascending.
        last: process and step of the last row.
        histogram: exponents of all rows together, as recorded: times the loss scale, if there is one.
    """

    shares: Floats
    sizes: Floats
    last: tuple[Process, int]
    histogram: ExponentHistogram

    @property
    def share(self) -> float:
        """Median of ``shares``."""
        return float(np.median(self.shares))

    @property
    def growth(self) -> float:
        """Median L2 norm in the last quarter of the steps over that in the first; infinite if the first is zero."""
        quarter = max(1, self.sizes.size // 4)
        before = float(np.median(self.sizes[:quarter]))
        return float(np.median(self.sizes[-quarter:])) / before if before > 0.0 else math.inf


@dataclass(frozen=True)
class _Eps:
    """Adam's eps by parameter; ``least`` for one whose group is unknown."""

    of: Mapping[Parameter, float]
    least: float
    most: float

    def limits(self, parameters: Sequence[Parameter], options: Options) -> Floats:
        """Return eps / damping for each parameter, shape ``(parameters,)``."""
        return np.array([self.of.get(p, self.least) for p in parameters]) / options["damping"]

    def __str__(self) -> str:
        return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"


def check(view: RunView, options: Options) -> Checked:
    """One finding: the weight whose gradient is damped most."""
    eps_values = [e for g in parameter_groups(view, is_adam) if (e := number(g.get("eps")) or 0.0) > 0.0]
    others = {kind for o in view.optimizers if not is_adam(kind := text(o.get("class")))}
    if not eps_values or others & set(SCALE_FREE):
        return Checked.not_applicable("Adam and AdamW train no weight, or an optimizer like them trains others")
    known = groups_of_parameters(view)
    of = {p: e for p, (kind, g) in known.items() if is_adam(kind) and (e := number(g.get("eps")) or 0.0) > 0.0}
    eps = _Eps(of, min(eps_values), max(eps_values))
    gradients, roots = _weight_gradients(view, eps, options), _recorded_roots(view, eps, options)
    if others:  # as Muon for the matrices, AdamW for the rest: only AdamW's parameters have a second moment
        gradients = {k: g for k, g in gradients.items() if parameter_in(k) in roots}
    if not gradients:
        return Checked.not_applicable("no gradient of a weight was recorded as Adam was given it")
    seen = f"{plural(len(gradients), 'gradient')} against eps {eps} / {options['damping']:g}"
    guilty = {
        k: g
        for k, g in gradients.items()
        if _is_damped(g, eps.of.get(parameter_in(k), eps.least), options)
        and ((root := roots.get(parameter_in(k))) is None or root.share >= options["below_share"])
    }
    if not guilty:
        worst = max(g.share for g in gradients.values())
        return Checked((), f"{seen}: at most {percent(worst)} of the elements of any below it")
    finding = _finding(view, guilty, roots, eps, options, len(gradients))
    return Checked([finding], f"{len(guilty):,} of {seen} are mostly below it")


def _weight_gradients(view: RunView, eps: _Eps, options: Options) -> dict[Key, _Gradient]:
    """Return the gradients that the optimizer gets for weight matrices, on recorded steps that were not skipped."""
    stepped = {s.step for steps in view.timeline.values() for s in steps if not s.skipped}
    steps = [s for s in watched_steps(view) if s in stepped]
    rows = view.measured(("dimensions", "norm"), ("weight_grad_step",), columns=_COLUMNS, steps=steps)
    rows = rows[(rows["dimensions"] >= 2) & (rows["numel"] >= options["min_elements"]) & (rows["nan"] == 0)]
    rows = rows[histograms(rows).total > 0]
    held, ids = histograms(rows), groups(rows, IDENTITY)
    small = held.at_most(eps.limits(parameters(rows), options) * unscaling(rows))[0]
    shares, sizes, step = small / held.total, np.nan_to_num(column(rows, "norm")), column(rows, "step")
    last_rows = lasts(groups(rows, (*IDENTITY, "step")))
    last = rows.iloc[lasts(ids)]
    merged = held.merged(ids, len(last))
    described = zip(keys(last), rows_of(ids[last_rows], step[last_rows]), at(last), strict=True)
    return {
        key: _Gradient(shares[own := last_rows[steps_of]], sizes[own], newest, merged.row(i))
        for i, (key, steps_of, newest) in enumerate(described)
    }


@dataclass(frozen=True)
class _Root:
    """The recorded sqrt(v) of a weight after bias correction: share below eps / damping and RMS, medians over steps."""

    share: float
    rms: float


def _recorded_roots(view: RunView, eps: _Eps, options: Options) -> dict[Parameter, _Root]:
    """Return the recorded sqrt(v) of each weight; weights without recorded state, or of unknown beta2, are left out."""
    moments = second_moments(view)
    held, names = histograms(moments.held), moments.held["state"].to_numpy()
    decay = np.full(len(moments.held), np.nan)
    for rows in moments.of.values():
        known = decay_of(view, names[rows[-1]])
        decay[rows] = np.nan if known is None else known
    corrected = 1.0 - decay ** (column(moments.held, "step") + 1.0)  # bias correction: Adam takes sqrt(v / corrected)
    limits = eps.limits(parameters(moments.held), options)
    below = held.at_most(limits**2 * corrected * unscaling(moments.held))[0]
    shares, used = share(below, held.total), (held.total > 0) & ~np.isnan(decay)
    roots = np.sqrt(share(np.nan_to_num(column(moments.held, "sum")), column(moments.held, "numel")) / corrected)
    return {
        owner: _Root(float(np.median(shares[own])), float(np.median(roots[own])))
        for owner, rows in moments.of.items()
        if (own := rows[used[rows]]).size
    }


def _is_damped(gradient: _Gradient, eps: float, options: Options) -> bool:
    """Return whether most elements are far below eps in the first quarter of the steps and in the median.

    A gradient that falls below eps only later has converged. A gradient that grows (behind a gate that opens) is left
    out, unless a large eps damps it to the end.
    """
    shares = gradient.shares
    if shares.size < options["min_steps"]:
        return False
    quarter = max(2, shares.size // 4)
    early, late = float(np.median(shares[:quarter])), float(np.median(shares[-quarter:]))
    if gradient.growth >= options["opening"] and (eps <= options["large_eps"] or late < options["below_share"]):
        return False
    return min(early, gradient.share) >= options["below_share"]


def _smaller_eps(histogram: ExponentHistogram, scale: float, eps: float) -> float:
    """Return the eps to propose: a power of ten, at least ten times below both ``eps`` and 95 % of the elements.

    It is never below 1e-30. ``scale`` is the loss scale that the histogram's elements carry; Adam divides it out.
    """
    counts = histogram.counts.cumsum()
    index = int((counts <= 0.05 * histogram.total).sum())
    edge = histogram.lo + index - math.log2(scale)
    return float(10.0 ** max(-30, min(math.floor(edge * math.log10(2.0)) - 1, math.floor(math.log10(eps)) - 1)))


def _finding(
    view: RunView,
    guilty: Mapping[Key, _Gradient],
    roots: Mapping[Parameter, _Root],
    eps_values: _Eps,
    options: Options,
    total: int,
) -> Finding:
    key, gradient = max(guilty.items(), key=lambda item: item[1].share)
    eps = eps_values.of.get(parameter_in(key), eps_values.least)
    process, step = gradient.last
    row = next(r for r in view.rows(process, step) if r.key == key)
    parameter = parameter_label(parameter_in(key))
    scale = row.scale if row.scale and row.scale > 0.0 else 1.0
    better = _smaller_eps(gradient.histogram, scale, eps)
    after = gradient.histogram.at_most(better * scale).low / gradient.histogram.total
    rms = (row.rms or 0.0) / scale
    factor = rms / (rms + eps)
    root = roots.get(parameter_in(key))
    measured = f", the RMS of sqrt(v), as recorded, {root.rms:.2g}" if root is not None else ""
    return RULE.finding(
        confidence=0.95 if root is not None else 0.85 if gradient.shares.size >= 8 else 0.7,
        title=f"Adam's eps {eps:g} swallows the gradient of `{parameter}` (RMS {rms:.1g})",
        message=f"{percent(gradient.share)} of the non-zero elements of the gradient of `{parameter}` are at most "
        f"1/{options['damping']:g} of Adam's eps, {eps:g}, in the median of {plural(gradient.shares.size, 'step')} "
        f"(limit {percent(options['below_share'])}); at step {step} its RMS is {rms:.2g}{measured}. Where sqrt(v) is "
        f"that size, a step is {percent(factor)} of the intended one. {plural(len(guilty), 'weight')} of {total:,} "
        "affected.",
        location=location(row, Phase.OPTIMIZER, process, step),
        evidence={
            "below_eps_share": gradient.share,
            "limit": options["below_share"],
            "eps": eps,
            "gradient_rms": rms,
            "sqrt_v_rms": root.rms if root is not None else None,
            "step_size_factor": factor,
            "weights": worst_parameters("below_eps_share", {parameter_in(k): g.share for k, g in guilty.items()}),
            **tensor_evidence(row),
            "confidence_reason": "gradients and the recorded sqrt(v) were counted against eps"
            if root is not None
            else "gradients were counted against eps; sqrt(v) is assumed to be of their size",
        },
        prescription=_prescribe(row.dtype, eps, better, gradient.share, after, factor, rms),
    )


def _prescribe(
    dtype: str, eps: float, better: float, share: float, after: float, factor: float, rms: float
) -> Prescription:
    steps = {"from": factor, "to": rms / (rms + better)}
    predicted = {"below_eps_share": {"from": share, "to": after}, "step_size_factor": steps}
    if dtype in HALF:
        scale = 10.0 ** math.ceil(math.log10(eps / better))
        title = f"multiply the loss by {scale:g}: below eps {percent(share)} -> {percent(after)}"
        snippet = f"loss = {scale!r} * loss  # Adam divides it out, eps does not\nloss.backward()\n"
        return Prescription(title, {"loss_factor": scale}, predicted, snippet)
    title = f"eps={better:g}: elements below it {percent(share)} -> {percent(after)}"
    return Prescription(title, {"eps": {"from": eps, "to": better}}, predicted, group_option("eps", repr(better)))


def _holds_still(cause: Finding, effect: Finding) -> bool:
    swallowed = {w["parameter"] for w in cause.evidence.get("weights", ())}
    still = {t["parameter"] for t in effect.evidence.get("tensors", ())}
    return bool(effect.evidence.get("is_negligible")) and bool(swallowed & still)


RULE = Rule(
    code="PD503",
    name="adam-eps-dominates",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        fraction("below_share", 0.5,
                 "Least share of non-zero gradient elements below eps / damping, in the median and at the start.",
                 "Half: the typical element."),
        RuleOption("damping", 8.0, "times",
                   "How far below eps an element counts: its step is 1 / (damping + 1) of the learning rate.",
                   "Chosen empirically: a ninth of a step is worth a change, a half is not; PPO runs well at eps 1e-5.",
                   1.0),
        RuleOption("opening", 2.0, "times",
                   "A gradient this much larger in the last quarter of the steps than in the first is not judged.",
                   "Chosen empirically: from batch to batch a gradient's size varies by less.", 1.0),
        RuleOption("large_eps", 1e-5, "gradient",
                   "Above it, a gradient that grows but stays below eps to the end counts as well.",
                   "PPO's usual eps is 1e-5; defaults are 1e-8."),
        RuleOption("min_steps", 4.0, "steps", "Least number of recorded steps.", "A median needs a few.", 2.0),
        RuleOption("min_elements", 64.0, "elements", "Smaller weights are not judged.",
                   "Shares of a few elements are chance.", 1.0),
    ),
    settles=True,
    explains=when(_holds_still, "PD501"),
    check=check,
)  # fmt: skip
