"""PD407: layers in FP8 that recipes keep wide, with their cost in this run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Cast, Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_damage import damage
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import FLUSHED_SHARE, LOST_DB, kept_wide, listed, seen_words
from precdoctor.diagnosis.survey.rows import Key, TensorRow
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Casts to a float8 dtype in an embedding, a norm, a router or the layer of the final logits. The class of the module (or
of one around it) or its name gives the role. The role alone is information. The finding is a warning if this run shows
damage: more than the limit clipped, or flushed at a cost, or signal to noise below that of rounding (as in PD401 and
PD402). For logits it is also a warning if the noise of both operands times the spread of the recorded logits is
predicted to raise the loss by `logit_nats`: noise of standard deviation s on the logits raises a cross-entropy by at
most s^2 / 2. Results of a whole model that are rounded to float8 are judged whatever the name of the layer, by the
noise over their variance (`noise_share`): a mean that all samples share is no information, but the signal to noise
counts it.
""",
    matters="""
These layers are a small part of the work and carry more than others: embedding rows are read one by one and average
nothing out, a norm divides by what was rounded, a router picks another expert when two scores change places, and the
logits go straight into the loss.
""",
    example="""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            replace(model, name, FP8Linear)               # lm_head as well: 0.04 nats of noise
        if isinstance(module, nn.Linear) and name not in ("lm_head", "router"):
            replace(model, name, FP8Linear)
""",
    remedy="""
Leave the named module in its own dtype: recipes do (filters such as torchao's `module_filter_fn`, Transformer Engine's
`fp8_autocast` around the blocks only), and it costs little, the layer being a small part of the whole.
""",
    confidence="""
0.9 for damage that was counted or predicted from exponents on four steps and more, 0.7 with fewer; 0.6 without damage,
because a role is recognised by a name. The loss of the logits is an upper bound and assumes a softmax.
""",
    references=(
        "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.1 (embedding, head, gating and norms stay wide)",
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433",
    ),
)

#: Role of a layer by the class of its module.
_CLASSES = (
    ("embedding", re.compile(r"^(?!.*(Patch|Position)).*Embedding(Bag)?$")),
    ("norm", re.compile(r"Norm(\d[dD])?$")),
    ("router", re.compile(r"(Router|Gating)$")),
)
#: Role of a layer by the last part of its module's name.
_NAMES = (
    ("router", re.compile(r"^router$")),
    ("logits", re.compile(r"^(lm_?head|head|logits|classifier|unembed(ding)?|output_projection)$")),
)
#: Roles in the words of messages.
_ROLE_WORDS = {
    "embedding": "an embedding",
    "norm": "a norm",
    "router": "a router",
    "logits": "the final logits",
    "result": "the model's results",
}
#: A module of this name is a router if experts are its siblings, else half of a gated product.
_GATE = re.compile(r"^(gate|gating)$")


@dataclass(frozen=True, eq=False)
class _Sensitive:
    """An operand of a layer that recipes keep wide."""

    operand: Operand
    role: str
    #: The module with the role: the operand's own or one around it.
    module: str
    #: Upper bound of the noise's effect on the loss; None except for logits.
    nats: float | None
    #: Variance of the noise over that of the model's results; None for other tensors.
    noise: float | None
    #: Whether the cast costs more than a limit.
    damaged: bool


def check(view: RunView, options: Options) -> Checked:
    """One finding: the worst of the sensitive layers, the others as evidence."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    settled = [o for o in found.values() if o.settled]
    roles = {o.key: where for o in settled if (where := _role(view, o)) is not None}
    judged = [s for o in settled if (s := _judge(view, o, settled, roles, options)) is not None]
    if not judged:
        return Checked((), f"{seen_words(found)}: none in an embedding, norm, router or the final logits")
    judged.sort(
        key=lambda s: (not s.damaged, -(s.nats or 0.0), -(s.noise or 0.0), -s.operand.cost.lost_db, s.operand.key)
    )
    damaged = sum(s.damaged for s in judged)
    reason = f"{plural(len(judged), 'operand')} of layers kept wide elsewhere, {damaged:,} with damage"
    return Checked([_finding(view, judged, options)], reason)


def _role(view: RunView, operand: Operand) -> tuple[str, str] | None:
    """Return role and module, from the operand's module outwards, by class first, then by name; None without one."""
    root, module = operand.key[:2]
    while module:
        around, _, name = module.rpartition(".")
        kind = view.module_classes.get((root, module), "")
        roles = [r for r, pattern in _CLASSES if pattern.search(kind)]
        roles += [r for r, pattern in _NAMES if pattern.search(name)]
        if roles:
            return roles[0], module
        if _GATE.search(name) and _beside_experts(view, root, module):
            return "router", module
        module = around
    return None


def _beside_experts(view: RunView, root: str, module: str) -> bool:
    """Return whether a module next to this one has ``expert`` in its name."""
    parent = module.rpartition(".")[0]
    siblings = (m for r, m in view.module_classes if r == root and m.rpartition(".")[0] == parent)
    return any("expert" in m.rpartition(".")[2].lower() for m in siblings)


def _judge(
    view: RunView, operand: Operand, settled: Sequence[Operand], roles: Mapping[Key, tuple[str, str]], options: Options
) -> _Sensitive | None:
    """Measure what FP8 costs an operand of a sensitive layer, or one that the model returns.

    None for other layers, and unless rounding damages the results. ``roles``: role and module of each operand that has
    them.
    """
    noise = _noise(view, operand)
    noisy = noise is not None and noise >= options["noise_share"]
    if operand.key not in roles:
        return _Sensitive(operand, "result", operand.key[1], None, noise, damaged=True) if noisy else None
    (role, module), cost = roles[operand.key], operand.cost
    flushes = operand.flushed_share >= options["flushed_share"] and cost.is_harmful(operand.fmt, options["lost_db"])
    damaged = (
        noisy or flushes or operand.saturated_share >= options["saturated_share"] or cost.lost_db >= options["lost_db"]
    )
    nats = None
    if role == "logits" and not operand.gradient:
        same = [o for o in settled if roles.get(o.key) == (role, module) and o.key[0] == operand.key[0]]
        nats = _nats(view, operand, module, [o for o in same if not o.gradient])
        damaged = damaged or (nats is not None and nats >= options["logit_nats"])
    return _Sensitive(operand, role, module, nats, noise, damaged)


def _noise(view: RunView, operand: Operand) -> float | None:
    """Variance of the cast's noise over that of the model's results; None if the operand is not these results.

    It is if the root's output has as many elements and, up to rounding, the same largest magnitude. The mean is over
    all channels, which overestimates the variance of results with several.
    """
    if operand.key[3].startswith("weight") or operand.gradient:
        return None
    shares = []
    for cast in operand.spots:
        found = _output(view, cast, operand.key[0], "")
        if found is None:
            return None
        out, square, variance = found
        if out.numel != cast.numel or not out.amax or cast.amax is None:
            return None
        if abs(cast.amax - out.amax) > 2.0 ** -(operand.fmt.mantissa_bits + 1) * out.amax:
            return None
        noise = square * 10.0 ** (-damage(cast.statistics, operand.fmt).sqnr_db / 10.0)
        shares.append(noise / variance if variance > 0.0 else 0.0)
    return median(shares) if shares else None


def _nats(view: RunView, operand: Operand, module: str, same: Sequence[Operand]) -> float | None:
    """Half the variance of the noise on the logits, in nats, from all of the module's operands; None if unknown."""
    found = _output(view, operand.typical, operand.key[0], module)
    if found is None:
        return None
    out, _, variance = found
    if not out.shape or out.shape[-1] < 2:
        return None
    noise: float = sum(10.0 ** (-o.cost.sqnr_db / 10.0) for o in {o.key[3]: o for o in same}.values())
    return 0.5 * noise * variance


def _output(view: RunView, cast: Cast, root: str, module: str) -> tuple[TensorRow, float, float] | None:
    """Return a module's output on the step of a cast, its mean square and its variance; None if not recorded."""
    rows = view.rows(cast.process, cast.step)
    out = next((r for r in rows if r.kind == "output" and r.key[:2] == (root, module)), None)
    if out is None or out.sum_sq is None or out.sum is None or out.bad or not out.numel:
        return None
    square = out.sum_sq / out.numel
    return out, square, max(0.0, square - (out.sum / out.numel) ** 2)


def _finding(view: RunView, judged: Sequence[_Sensitive], options: Options) -> Finding:
    worst = judged[0]
    operand, cost = worst.operand, worst.operand.cost
    cast = operand.typical
    sure, why = operand.confidence if worst.damaged else (0.6, "recognised by class and name; no damage in this run")
    what = _ROLE_WORDS[worst.role]
    shown = [s for s in judged if s.damaged] or judged
    harm = (
        f"{percent(operand.flushed_share)} flushed, {percent(operand.saturated_share)} clipped, signal to noise "
        f"{cost.sqnr_db:.1f} dB, {cost.lost_db:.1f} dB below rounding (limit {options['lost_db']:g})"
    )
    if worst.nats is not None:
        harm += f"; noise on the logits may cost {worst.nats:.2g} nats (limit {options['logit_nats']:g})"
    if worst.noise is not None:
        harm += f"; noise on the results is {percent(worst.noise)} of their variance "
        harm += f"(limit {percent(options['noise_share'])})"
    verdict = "" if worst.damaged else ", harmless so far"
    names = sorted({f"`{s.module}` ({s.role})" for s in judged})
    return RULE.finding(
        severity=Severity.WARNING if worst.damaged else Severity.INFO,
        confidence=sure,
        title=f"FP8 in {what}: the {operand.label} is cast to {operand.fmt.name}{verdict}",
        message=f"The {operand.label} is cast to {operand.fmt.dtype} in {what}, which recipes keep wide. In this run: "
        f"{harm}. {plural(len(names), 'layer')} of this kind: {', '.join(names[:8])}.",
        location=operand.location(cast),
        evidence={
            "role": worst.role,
            "flushed_share": operand.flushed_share,
            "saturated_share": operand.saturated_share,
            "sqnr_db": cost.sqnr_db,
            "lost_db": cost.lost_db,
            "limit": options["lost_db"],
            "logit_nats": worst.nats if worst.nats is None or math.isfinite(worst.nats) else None,
            "noise_share": worst.noise,
            "damaged": sum(s.damaged for s in judged),
            "steps_examined": len(operand.settled),
            "tensors": listed((s.operand for s in shown), "flushed_share"),
            **operand.evidence(view, cast),
            "confidence_reason": why,
        },
        prescription=_prescribe(worst),
    )


def _prescribe(worst: _Sensitive) -> Prescription:
    cure = kept_wide(worst.operand, worst.module)
    if worst.nats is not None:
        effect = f"noise on the logits {worst.nats:.2g} -> 0 nats"
        return cure.prescription(effect, {"logit_nats": {"from": worst.nats, "to": 0.0}})
    if worst.noise is not None:
        effect = f"noise on the results {percent(worst.noise)} -> 0 % of their variance"
        return cure.prescription(effect, {"noise_share": {"from": worst.noise, "to": 0.0}})
    return cure.prescription_after(worst.operand.cost)


RULE = Rule(
    code="PD407",
    name="sensitive-layer-in-fp8",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        FLUSHED_SHARE,
        LOST_DB,
        fraction("saturated_share", 0.005, "Largest share clipped by the cast, median over steps.",
                 "The limit of PD401."),
        RuleOption("logit_nats", 0.01, "nats", "Largest effect of the noise on the final logits on the loss.",
                   "The difference in loss that PD804 and PD821 take as the least that matters."),
        fraction("noise_share", 0.02,
                 "Largest variance of the noise over that of the model's results, median over steps.",
                 "Chosen empirically: no fit explains more than 98 % then; rounding to E4M3 alone leaves 0.06 %."),
    ),
    check=check,
    newer_half=True,
)  # fmt: skip
