"""PD506: squared gradients rounded to zero in the format of the optimizer's second moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.advice.wide_weights import wide_weights, widened_bytes, widened_elements
from precdoctor.diagnosis.analyses.optimizer_states import Moments, adds_eps_to_root, decay_of, second_moments
from precdoctor.diagnosis.analyses.parameters import HALF, parameter_groups, parameter_label, worst_parameters
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import same_module, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import memory, percent, plural
from precdoctor.diagnosis.families.updates.second_moment_underflow_rounded import leaps, orphaned, rounded_finding
from precdoctor.diagnosis.survey.frames import Ints, at, histograms, parameters
from precdoctor.diagnosis.survey.measures import Floats, column, share, unscaling
from precdoctor.diagnosis.survey.rows import Parameter, TensorRow, known_format, location, number, tensor_evidence, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32, Format

PAGE = RulePage(
    finds="""
Second moments that are exactly zero for elements whose gradient on the same step is larger than eps: its square was
rounded to zero in the format of the state. The rule covers Adam, AdamW, RMSprop and Adagrad, and state of other
optimizers under such a name (one element per element of the weight, none negative). The count is zeros of the moment
less the elements whose gradient is zero or at most eps, where a zero does no harm. Embedding rows that were never
looked up, frozen or unused weights and gradients far below eps therefore do not count. Nor do elements whose gradient
is so large that the format holds its square: optimizers that leave out their first steps have such zeros.

The rule also reports FP32 state that was rounded between two steps, as by a checkpoint saved in FP16. Either `share` of
a parameter's elements or more have a second moment of zero under a first moment above eps. Or an element moved by
`beyond` times as many learning rates as Adam can move it with moments of the same gradients:
(1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) by the Cauchy-Schwarz inequality, 7.27 with the usual betas.
""",
    matters="""
Adam divides by sqrt(v) + eps. Where v is zero, only eps is left, and the step is |m| / eps of the learning rate instead
of about one: hundreds of times too long with an eps of 1e-5. Where eps is also zero in the state's format (FP16
rounds everything below 3e-8 to zero, torch's default of 1e-8 included), the division gives an infinity or NaN.
""",
    example="""
    model = model.half()
    torch.optim.Adam(model.parameters(), eps=1e-4)  # moments in FP16: a gradient of 1e-3 adds 1e-9 to v, which is zero
""",
    remedy="""
Keep the state in FP32: FP32 weights under autocast, or FP32 master weights. A larger eps only hides the loss, because
it damps every element below it. Save optimizer checkpoints in their own format: only weights tolerate 16 bits.
""",
    confidence="""
0.95: zeros of the moment and of the gradient are exact counts on the same step. 0.8 with fewer than four such steps,
and where an optimizer that torch does not ship may do something else with the moment than divide by its root. 0.9 for
state that was rounded between steps: no gradients make such moments, but what changed them is not on record.
""",
    references=(
        "Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1 and section 2.1",
        "IEEE 754-2019, table 3.5 (binary16: smallest subnormal 2^-24)",
        "PyTorch source: torch/optim/adam.py (exp_avg_sq = zeros_like(parameter))",
    ),
)


#: Defaults of torch.optim.Adam and AdamW: eps (also RMSprop's), and the decay of the second moment.
_USUAL_EPS, _USUAL_DECAY = 1e-8, 0.999


@dataclass(frozen=True)
class _Lost:
    """Share of a parameter's elements with a gradient above eps whose second moment is zero, per recorded step.

    ``rows``: the steps' rows in :class:`Moments`.
    """

    rows: Ints
    shares: Floats

    @property
    def share(self) -> float:
        """Median of ``shares``."""
        return float(np.median(self.shares))


#: Length of a step, in learning rates, from which it may make a run diverge: Adam's own are at most 7 long.
_LONG_STEP = 10.0


def check(view: RunView, options: Options) -> Checked:
    """One finding: the second moment that has lost most; else FP32 state that was rounded between steps."""
    moments = second_moments(view)
    if not moments.of:
        return Checked.not_applicable("no second moment was recorded with its gradient")
    eps = _eps(view)
    lost = _lost_shares(view, moments, eps, options)
    steps = max(rows.size for rows in moments.of.values())
    seen = f"{plural(len(moments.of), 'second moment')} after {plural(steps, 'step')}"
    limit = _limit(view, options)
    guilty = {o: v for o, v in lost.items() if v.shares.size >= options["min_steps"] and v.share >= limit}
    if not guilty:
        orphans = orphaned(view, eps, options["share"], options["min_elements"])
        long = leaps(view, options["beyond"])
        if orphans or long:
            found = rounded_finding(RULE, view, orphans, long, eps)
            return Checked([found], f"{seen}: moments that no gradients can make")
        worst = max((v.share for v in lost.values() if v.shares.size), default=0.0)
        return Checked((), f"{seen}: at most {percent(worst)} of the elements with a gradient above eps are zero")
    return Checked([_finding(view, moments, guilty, eps, options)], f"{len(guilty):,} of {seen} have zeros")


def _limit(view: RunView, options: Options) -> float:
    """Return the share of zeros that counts: `share` for optimizers that add eps to the root, else `others_share`."""
    return options["share"] if adds_eps_to_root(view) else options["others_share"]


def _eps(view: RunView) -> float:
    """Return the largest eps, below which zeros do no harm; torch's default for an optimizer without one."""
    return max((e for g in parameter_groups(view) if (e := number(g.get("eps"))) is not None), default=_USUAL_EPS)


def _lost_shares(view: RunView, moments: Moments, eps: float, options: Options) -> dict[Parameter, _Lost]:
    """Return, per parameter and step, the share of elements whose squared gradient the second moment lost."""
    held, gradient = moments.held, histograms(moments.gradient)
    scale = unscaling(moments.gradient)
    intended = gradient.total - gradient.at_most(eps * scale)[1]
    harmless = column(moments.gradient, "zero") + (gradient.total - intended)
    roundable = intended - (gradient.total - gradient.at_most(_largest_lost_by_row(view, held) * scale)[1])
    zeros = np.minimum(column(held, "zero") - harmless, roundable)
    shares = share(np.maximum(zeros, 0.0), intended)
    counted = (column(held, "numel") == column(moments.gradient, "numel")) & (intended >= options["min_elements"])
    return {owner: _Lost(own := rows[counted[rows]], shares[own]) for owner, rows in moments.of.items()}


def _largest_lost_by_row(view: RunView, held: pd.DataFrame) -> Floats:
    """Return per row the largest gradient whose square is rounded to zero; no limit with a scale per block.

    A moment of zero under a larger gradient has another reason: optimizers that leave out their first steps make such
    zeros.
    """
    largest = np.full(len(held), np.finfo(np.float64).max / 2)
    plain = ~held["format"].map(text).astype(bool)
    for (state, dtype), rows in held[plain].reset_index().groupby(["state", "dtype"], observed=True).indices.items():
        if limit := _largest_lost_gradient(known_format(text(dtype)), _added_share(view, text(state))):
            largest[np.flatnonzero(plain)[rows]] = limit
    return largest


def _added_share(view: RunView, state: str) -> float:
    """Return the share of a squared gradient that a step adds to a moment, 1 - beta2; Adam's default if unknown."""
    decay = decay_of(view, state)
    return 1.0 - (_USUAL_DECAY if decay is None else decay)


def _largest_lost_gradient(fmt: Format | None, added: float) -> float:
    """Return the largest gradient whose square is rounded to zero in ``fmt``; 0 if unknown."""
    return (fmt.flush_limit / added) ** 0.5 if fmt is not None and added > 0.0 else 0.0


def _finding(
    view: RunView, moments: Moments, guilty: Mapping[Parameter, _Lost], eps: float, options: Options
) -> Finding:
    owner, lost = max(guilty.items(), key=lambda item: item[1].share)
    row, gradient = _rows(view, moments, lost.rows[-1])
    fmt, added = known_format(row.dtype), _added_share(view, row.name)
    share_limit, limit = _limit(view, options), _largest_lost_gradient(fmt, added)
    stored_eps = 0.0 if fmt is not None and eps <= fmt.flush_limit else eps
    stored = text(moments.held["format"].iloc[lost.rows[-1]])
    name = parameter_label(owner)
    message = (
        f"{percent(lost.share)} of the elements of `{name}` with a gradient above eps ({eps:g}) have a second "
        f"moment of exactly zero, in the median of {plural(lost.shares.size, 'step')} (limit "
        f"{percent(share_limit)})"
        + (
            _quantised_words(view, stored, added)
            if stored
            else _narrow_words(view, row, (eps, stored_eps), limit, added)
        )
        + f"{plural(len(guilty), 'parameter')} of {len(moments.of):,} affected."
    )
    return RULE.finding(
        confidence=0.95 if adds_eps_to_root(view) and lost.shares.size >= 4 else 0.8,
        title=f"the second moment of `{name}` is zero for {percent(lost.share)} of its gradient "
        f"({stored or row.dtype})",
        message=message,
        location=location(row, Phase.OPTIMIZER, row.process, row.step),
        evidence={
            "zero_share": lost.share,
            "limit": share_limit,
            "subnormal_share": _subnormal_share(row),
            "dtype": stored or row.dtype,
            "eps": eps,
            "eps_in_state_format": stored_eps,
            "smallest_gradient_kept": None if stored else limit,
            "parameters": worst_parameters("zero_share", {o: v.share for o, v in guilty.items()}),
            **tensor_evidence(row),
            "confidence_reason": "zeros of the moment and of the gradient were counted in the same steps",
        },
        prescription=_prescribe(view, lost, row, gradient, (stored or row.dtype, added)),
    )


def _subnormal_share(row: TensorRow) -> float:
    return row.subnormal / max(1, row.histogram.total)


def _narrow_words(view: RunView, row: TensorRow, both: tuple[float, float], limit: float, added: float) -> str:
    """State which gradients the format of a state loses, and how long a step with a second moment of zero is.

    Args:
        both: eps, and eps in that format.
        limit: the largest gradient that is lost.
    """
    eps, stored_eps = both
    step = (
        f"the step is up to {limit / stored_eps:.3g} times the learning rate"
        if stored_eps
        else f"and eps, {eps:g}, is also zero in {row.dtype}: a division by zero"
    )
    where = "There only eps divides" if adds_eps_to_root(view) else f"Where {_optimizer_name(view)} divides by its root"
    return (
        f"; of the others {percent(_subnormal_share(row))} are subnormal. It is kept in {row.dtype}: {added:.3g} g^2 "
        f"becomes zero below g = {limit:.2g}. {where}, {step}. "
    )


def _quantised_words(view: RunView, stored: str, added: float) -> str:
    """State why a state with a scale per block has zeros, and how long the steps are there."""
    longer = f"; else steps are up to {(1.0 / added) ** 0.5:.3g} times too long" if added > 0.0 else ""
    return (
        f". It is kept in {stored} with a scale per block: elements far below the largest of a block become zero. "
        f"Where {_optimizer_name(view)} divides before it adds the new g^2, only eps divides{longer}. "
    )


def _optimizer_name(view: RunView) -> str:
    return next((text(o.get("class")) for o in view.optimizers if text(o.get("class"))), "the optimizer")


def _rows(view: RunView, moments: Moments, at_row: int) -> tuple[TensorRow, TensorRow]:
    """Return the rows of one moment and of its gradient; ``at_row``: position in :class:`Moments`."""
    one = moments.held.iloc[[at_row]]
    (process, step), owner = at(one)[0], parameters(one)[0]
    names = {"opt_state": moments.held["state"].iloc[at_row], "weight_grad_step": owner[2]}
    rows = view.rows(process, step)
    held, gradient = (next(r for r in rows if r.key[:4] == (*owner[:2], kind, name)) for kind, name in names.items())
    return held, gradient


def _prescribe(
    view: RunView, lost: _Lost, row: TensorRow, gradient: TensorRow, held: tuple[str, float]
) -> Prescription:
    stored, added = held
    smaller = gradient.histogram.at_most(_largest_lost_gradient(FP32, added) * (gradient.scale or 1.0)).high
    left = smaller / max(1, gradient.histogram.total)
    title = f"FP32 optimizer state: zero where there is a gradient {percent(lost.share)} -> {percent(left)}"
    if gradient.dtype in HALF:
        change = {"weight_dtype": {"from": row.dtype, "to": "float32"}}
        title += f", +{memory(widened_bytes(view, widened_elements(view, HALF)))}"
        snippet = wide_weights(view, HALF)
    else:  # the weights are wide already: the optimizer itself chose the format
        key = row.name.rpartition(".")[2]
        fmt = known_format(stored)
        bits = {"codebook8": 8, "codebook4": 4}.get(stored) or (fmt.bits if fmt is not None else 16)
        title += f", +{memory(row.numel * (32 - bits) // 8)} for this weight"
        change = {"state_dtype": {"from": stored, "to": "float32"}}
        snippet = (
            f"import torch\n\nstate[{key!r}] = torch.zeros_like(p, dtype=torch.float32)  # in the optimizer's step\n"
        )
    return Prescription(
        title=title, change=change, predicted={"zero_share": {"from": lost.share, "to": left}}, snippet=snippet
    )


def lost_moments(cause: Finding, _effect: Finding) -> bool:
    """Return whether zero moments can have made the run diverge.

    An element whose gradient g is lost from the second moment moves by g / eps learning rates in one step.
    """
    kept, eps = cause.evidence.get("smallest_gradient_kept"), cause.evidence.get("eps_in_state_format")
    if kept is None or eps is None:
        return False
    return 0.0 < float(kept) >= _LONG_STEP * float(eps)


def stalls_in_its_format(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` is about optimizer state that stands still in the format of the moments."""
    same = cause.evidence.get("dtype") == effect.evidence.get("dtype") is not None
    return same and effect.evidence.get("target") == "state" and effect.location.phase is Phase.OPTIMIZER


def is_optimizer_cast(_cause: Finding, effect: Finding) -> bool:
    """Return whether a lossy cast lies in the optimizer step, outside of modules: there the moments are stored."""
    return effect.location.phase is Phase.OPTIMIZER and effect.location.root is None


RULE = Rule(
    code="PD506",
    name="second-moment-underflow",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        fraction("share", 0.01,
                 "Elements with a second moment of zero among those with a gradient above eps, median over steps.",
                 "Chosen empirically: the steps of each are too long by orders of magnitude."),
        fraction("others_share", 0.05, "The same where the optimizer is not one of torch's.",
                 "Chosen empirically: it may bound its steps, and a few long ones do less harm then."),
        RuleOption("beyond", 10.0, "times Adam's longest step",
                   "A longer step was not made from moments of the same gradients.",
                   "Chosen empirically: the bound holds for any gradients; a schedule of betas moves it a few times.",
                   1.0),
        RuleOption("min_steps", 2.0, "steps", "Least number of steps with recorded state.", minimum=1.0),
        RuleOption("min_elements", 16.0, "elements", "Least number of elements with a gradient above eps.",
                   "Shares of a few elements are chance.", 1.0),
    ),
    explains={
        "PD504": lambda cause, effect: same_module(cause, effect) or lost_moments(cause, effect),
        **when(lost_moments, "PD603", "PD605"),
        **when(stalls_in_its_format, "PD509"),
        **when(is_optimizer_cast, "PD706"),
    },
    check=check,
    newer_half=True,
)  # fmt: skip
