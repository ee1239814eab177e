"""PD404: a wrong FP8 scale: stale, held down by an old spike, made of an invalid amax, or left in the product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import (
    Relation,
    same_module,
    same_tensors,
    when,
    while_it_lasts,
    worst_tensor,
)
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import FLUSHED_SHARE, LOST_DB, MIN_ELEMENTS, seen_words
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_history import held_down, stale
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_invalid import invalid_amax
from precdoctor.diagnosis.survey.frames import AT, Mask
from precdoctor.diagnosis.survey.rows import Key, tensor_location
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Casts to a float8 dtype with a wrong scale, for one of four causes. Each cause is a finding of its own; `stale` and
`held-down` are folded into `invalid-amax` where it has the same operands.

`stale`: the scale follows from the amax of earlier steps and is too large on the step that uses it. Amax has jumped
past what the scale allows, and clipping costs `stale_db` of signal to noise beyond rounding. That must happen on
`stale_share` of the recorded steps, because amax of data that do not change exceeds a history of 16 steps on one step
in 17 under any recipe. It must also happen on that share of the newer half: weights that begin at zero outrun every
history in their first steps. A scale that never moves has no history (see PD401). The first recorded step, whose
history is empty, does not count.

`held-down`: the scale still belongs to an earlier spike. The log holds a step whose amax was at least `spike` binades
larger than now, and the scale in force brings that amax to the format's maximum. Meanwhile the cast flushes more than
the limit, elements of weight among them (as PD402 measures it), on `held_share` of the recorded steps, and the scale of
the tensor's own amax would not. A spike that the format has room for is not reported: Gaussian data lose nothing until
amax is about ten binades below the maximum.

`invalid-amax`: the scale is infinite (448 / 0), zero (448 / inf), NaN or negative; or it comes from an epsilon
(448 / 1e-12), is finite, and puts the next tensor that is not all zero `absurd` binades above the format's maximum. A
tensor of zeros under a huge finite scale stays zero and is not reported: frozen layers and unused branches have zero
gradients. Steps on which the tensor itself was already non-finite do not count.

`left-in`: a module casts one input and one weight, and its output is `left_in` binades above the largest number that a
sum of their products can reach, and above every output before it, on most steps; the product of their scales is as
large. The scales were not divided out of the result, or were given to `torch._scaled_mm` in place of their reciprocals.
""",
    matters="""
E4M3 saturates silently: on a stale step the largest activations, or the gradients of the hardest batch, all become
equal, and that is the step with most to learn from. A scale that one bad batch holds down for the next 1024 steps keeps
the tensor in the subnormals of the format all that time. Zero times an infinite scale is NaN, and NaN in a float8
operand is NaN in everything behind it. A scale from an epsilon turns the whole next tensor into +-448. A scale of zero
turns it into zeros while the infinite amax stays in the history. An output layer that starts at zero is enough: the
gradients above it are zero at step 0. Scales that stay in a product make the output of the layer 10^5 times too large;
under Adam the loss falls all the same.
""",
    example="""
Every fourth batch is sixteen times as large, and the scale knows only the last step:

    scale = 448.0 / self.amax                 # of the step before
    self.amax = x.abs().amax()
    y = (x * scale).to(torch.float8_e4m3fn)   # one batch in four is clipped by four binades

A loss spike makes one gradient 2^12 times as large; with `amax_history_len=1024` its scale is 2^12 times too small for
the next 1024 steps, and E5M2 or E4M3 flush what was normal before.

    scale = 448.0 / history.amax()                       # history: [0.0], the gradient was zero
    scale = 448.0 / history.amax().clamp_min(1e-12)      # 4.5e14: finite, and as wrong
    amax = history[history.isfinite() & (history > 0)]
    scale = 448.0 / amax.max() if amax.numel() else scale    # the scale before, 1 at the start

    y = (x * scale_x).to(torch.float8_e4m3fn).float() @ w8.float().t()    # and not divided by scale_x * scale_w
""",
    remedy="""
Stale: a longer history (the largest amax of the last 16 or 1024 steps) costs nothing, a margin of a binade or two helps
where amax grows steadily, and the scale of the tensor's own amax is always right but costs a pass over it. Held down: a
shorter history. The log is replayed with each, and the smallest change that is enough without making the other fault is
prescribed; `precdoctor whatif RUN --recipe best` compares recipes over all operands. Invalid: leave zero and non-finite
amax out of the history; with nothing left keep the previous scale, 1 at the start.
Left in: divide the product by both scales.
""",
    confidence="""
Stale: 0.9 when the recorded scales are those of a delayed recipe, step by step; 0.8 when they only lag; 0.6 when steps
lie between the recorded ones, so that the history is unknown. Held down: 0.9, because spike, scale and flushed elements
are all in the log; 0.7 when steps lie between the recorded ones. Invalid: 0.95 when the log shows the zero or
non-finite amax at or before the step; 0.8 when it shows only the scale. Left in: 0.9.
""",
    references=(
        "Transformer Engine documentation: DelayedScaling, amax_history_len, amax_compute_algo, margin",
        "Transformer Engine: the scale is kept where amax is 0 or not finite",
        "pytorch/ao issue 3356: zero amax gives an infinite scale, fixed by an epsilon",
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433",
    ),
)
_AT = list(AT)
_DIVIDED = (
    "product = (x8.to(x.dtype) @ w8.to(x.dtype).t()) / (scale_x * scale_w)\n"
    "# torch._scaled_mm multiplies: scale_a=1 / scale_x, scale_b=1 / scale_w\n"
)


def check(view: RunView, options: Options) -> Checked:
    """Up to one finding per cause, about the operand that it hurts most."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    checked = (invalid_amax(RULE, view, found, options), stale(RULE, view, found, options),
               held_down(RULE, view, found, options), _left_in(view, found, options))  # fmt: skip
    findings = [f for c in checked for f in c.findings]
    if not findings:
        return Checked((), f"{seen_words(found)}: {'; '.join(c.reason for c in checked)}")
    reason = "; ".join(c.reason for c in checked if c.findings)
    return Checked(_folded(findings), f"{reason} of {seen_words(found)}")


def _folded(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Move findings about operands with an invalid amax into the finding about that amax, as its consequences."""
    first, *others = findings
    effects = [f for f in others if first.cause == "invalid-amax" and same_tensors(first, f)]
    shown = [{"code": f.code, "name": f.name, "message": f.title} for f in effects]
    first = replace(first, evidence={**first.evidence, "consequences": shown}) if shown else first
    return [first, *(f for f in others if f not in effects)]


# -- scales left in the product ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Product:
    """A module that casts one input and one weight.

    Attributes:
        rows: one row per step: ``amax`` of the output, ``bound`` (the largest magnitude that its operands can make),
            ``earlier`` (the largest output before it, which a residual connection may add) and ``scales`` (the product
            of both).
        over: the rows whose output is larger than both by more than the limit, while the scales explain it.
    """

    operand: Operand
    rows: pd.DataFrame
    over: Mask

    @property
    def excess(self) -> float:
        """Median of output amax over ``bound``, on the steps in ``over``."""
        rows = self.rows[self.over]
        return float((rows["amax"] / rows["bound"]).median())


def _left_in(view: RunView, found: Mapping[Key, Operand], options: Options) -> Checked:
    """Report the module whose output is furthest above what its operands can make."""
    products = list(_products(view, found, options["left_in"]))
    guilty = sorted((p for p in products if 2 * p.over.sum() > len(p.over)), key=lambda p: (-p.excess, p.operand.key))
    if not guilty:
        return Checked((), f"{plural(len(products), 'product')} within what the operands can make")
    return Checked([_left_in_finding(guilty, options)], f"{plural(len(guilty), 'product')} with its scales left in")


def _products(view: RunView, found: Mapping[Key, Operand], limit: float) -> Iterator[_Product]:
    """Yield each module with one FP8 input and one FP8 weight, on the steps that recorded both and the output."""
    inputs = {key: o for key, o in found.items() if key[3] == "input"}
    several = {key[:2] for key in found if key[3].partition(".")[2] or key[4]}
    pairs = [(o, w) for key, o in inputs.items() if key[:2] not in several
             and (w := found.get((*key[:3], "weight", key[4]))) is not None]  # fmt: skip
    if not pairs:
        return
    rows = view.measured(("fan_in",), ("output", "weight"), columns=("amax", "numel", "order"))
    rows = rows.sort_values([*_AT, "order"], kind="stable")
    seen = rows["amax"].where(rows["kind"] == "output").groupby([rows[n] for n in _AT])
    rows["earlier"] = seen.cummax().groupby([rows[n] for n in _AT]).shift().fillna(0.0)
    own = dict(iter(rows.groupby(["root", "module"], observed=True, sort=False)))
    for operand, weight in pairs:
        here = own.get(operand.key[:2])
        together = _by_step(operand, weight, here) if here is not None else None
        if together is not None and len(together):
            largest = together[["bound", "earlier"]].max(axis=1)
            over = (together["amax"] >= 2.0**limit * largest) & (together["scales"] >= 2.0**limit)
            yield _Product(operand, together, over.to_numpy())


def _by_step(operand: Operand, weight: Operand, rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the rows of a :class:`_Product`; None unless the module has one weight matrix and an output."""
    outputs, weights = rows[rows["kind"] == "output"], rows[rows["kind"] == "weight"]
    matrices = weights[weights["fan_in"] > 1]
    if outputs.empty or len(set(matrices["name"])) != 1:
        return None
    # The product may sum over either side of the weight: take the longer one.
    terms = float(np.maximum(matrices["fan_in"], matrices["numel"] / matrices["fan_in"]).max())
    bias = float(weights[weights["fan_in"] <= 1]["amax"].max())
    x, w = (pd.DataFrame({**{n: getattr(o.casts, n) for n in _AT}, "of": o.casts.amax, "scale": o.casts.scale})
            for o in (operand, weight))  # fmt: skip
    both = x.merge(w, on=_AT, suffixes=("_x", "_w"))
    both = both.merge(outputs.groupby(_AT)[["amax", "earlier"]].max().reset_index(), on=_AT).dropna()
    bound = terms * both["of_x"] * both["of_w"] + (0.0 if np.isnan(bias) else bias)
    return both.assign(bound=bound, scales=both["scale_x"] * both["scale_w"])


def _left_in_finding(guilty: Sequence[_Product], options: Options) -> Finding:
    worst = guilty[0]
    row = worst.rows[worst.over].iloc[0]
    return RULE.finding(
        severity=Severity.ERROR,
        confidence=0.9,
        cause="left-in",
        title=f"the output of `{worst.operand.place}` is {worst.excess:,.0f} times what its FP8 operands can make: "
        "their scales are not divided out",
        message=f"At step {int(row['step'])} the output of `{worst.operand.place}` reaches {row['amax']:.3g}. An input "
        f"of up to {row['of_x']:.3g} and a weight of up to {row['of_w']:.3g} make {row['bound']:.3g} at most; limit "
        f"{2.0 ** options['left_in']:g} times that. Their scales are {row['scale_x']:.3g} and {row['scale_w']:.3g}, "
        f"{row['scales']:.3g} together. That holds on {worst.over.sum():,} of {plural(len(worst.rows), 'step')}. "
        f"Affected: {plural(len(guilty), 'module')}.",
        location=tensor_location(
            worst.operand.key, worst.operand.module_class, "output", Phase.FORWARD, Process.of(row), int(row["step"])
        ),
        evidence={
            "excess": worst.excess,
            "limit": 2.0 ** options["left_in"],
            "output_amax": float(row["amax"]),
            "bound": float(row["bound"]),
            "scales": float(row["scales"]),
            "bad_steps": worst.rows["step"][worst.over].astype(int).tolist()[:64],
            "last_bad_step": int(worst.rows["step"][worst.over].iloc[-1]),
            "modules": [p.operand.place for p in guilty],
            "confidence_reason": "no sum of so many products of the recorded size is that large",
        },
        prescription=Prescription(
                title=f"divide the product by both scales: output of `{worst.operand.place}` {row['amax']:.3g} -> "
                f"{row['amax'] / row['scales']:.3g}",
                change={"operand": worst.operand.label, "divide_by": float(row["scales"])},
                predicted={"output_amax": {"from": float(row["amax"]), "to": float(row["amax"] / row["scales"])}},
                snippet=_DIVIDED,
            ),
    )  # fmt: skip


# -- what wrong scales explain ----------------------------------------------------------------------------------------


def _due_to(relation: Relation, *causes: str) -> Relation:
    """Restrict ``relation`` to findings of this rule with one of these causes."""
    return lambda cause, effect: cause.cause in causes and relation(cause, effect)


def _clips(cause: Finding, effect: Finding) -> bool:
    """Return whether the scale was too large for the operands that ``effect`` finds clipped."""
    if cause.cause == "stale":
        return worst_tensor(cause, effect)
    return cause.cause == "invalid-amax" and same_tensors(cause, effect)


RULE = Rule(
    code="PD404",
    name="wrong-fp8-scale",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        fraction("stale_share", 0.1,
                 "Least share of stale steps among the recorded ones, and among the newer half of them.",
                 "Data that do not change exceed a history of K on 1 step in K + 1: 6 % at K = 16."),
        RuleOption("min_stale", 2.0, "steps", "Least number of stale steps.", "One large batch is no condition.", 1.0),
        RuleOption("stale_db", 10.0, "dB",
                   "Signal to noise that clipping must cost on a stale step, beyond rounding to the format's mantissa.",
                   "Nine times the energy of all rounding errors; Gaussian data at a history of 1 stay below it."),
        fraction("error_share", 0.5, "Share of stale steps from which the finding is an error.",
                 "Chosen empirically: most steps."),
        fraction("held_share", 0.25, "Least share of steps on which a spike holds the scale down.",
                 "Chosen empirically: a quarter of the training."),
        RuleOption("spike", 3.0, "binades", "How far the amax of the spike must lie above the present one.",
                   "Amax of training data commonly varies by a factor of 2 to 4 between steps."),
        FLUSHED_SHARE,
        LOST_DB,
        RuleOption("absurd", 16.0, "binades",
                   "A finite scale that takes amax this far above the format's maximum is invalid.",
                   "Chosen empirically: no amax of data jumps by 65,536 from one step to the next.", 1.0),
        RuleOption("recovers_in", 2.0, "steps",
                   "With no more invalid scales than this, and no NaN, the finding is a warning, else an error.",
                   "Chosen empirically: at the first step of a training there is nothing yet to lose."),
        RuleOption("left_in", 6.0, "binades",
                   "How far an output may lie above what its operands can make; their scales are to explain it.",
                   "A gain of 64 is plausible, as of a cosine classifier; two scales of E4M3 make 2^19.", 1.0),
        MIN_ELEMENTS,
    ),
    explains={
        **when(_due_to(while_it_lasts, "invalid-amax"), "PD101", "PD102", "PD103", "PD105", "PD106", "PD301"),
        **when(_clips, "PD401"),
        **when(_due_to(same_tensors, "invalid-amax", "held-down"), "PD402"),
        **when(_due_to(same_tensors, "stale", "held-down", "invalid-amax"), "PD407"),
        **when(_due_to(same_module, "stale", "held-down", "invalid-amax"), "PD706"),
    },
    check=check,
)  # fmt: skip
