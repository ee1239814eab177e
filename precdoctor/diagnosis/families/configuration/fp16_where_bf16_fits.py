"""PD709: FP16 at a price, on a device that has BF16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.snippets import bfloat16_autocast
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.histories import forward_histories
from precdoctor.diagnosis.survey.loss_scales import after_calibration, is_dynamic, scaled_steps
from precdoctor.diagnosis.survey.parameters import trainable
from precdoctor.diagnosis.survey.rows import Key, integer
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import BF16, FP16

PAGE = RulePage(
    finds="""
Training in FP16 (autocast, or weights in FP16) on a device that multiplies BF16, if the range of FP16 has a price in
this run. Either the loss scaler, after it has found its level and with a finite loss, skips `skipped_share` of the
steps or more, and at least `min_skipped` of them. Or an activation comes within `headroom` binades of 65504. The
finding is information; where FP16 is wide enough it is the more precise of the two, and the rule passes. CUDA devices
have BF16 from compute capability 8.0 on; torch has it on every CPU, where it is autocast's default.
""",
    matters="""
A skipped step is a batch thrown away, and an activation near 65504 is one batch away from an infinity. BF16 has the
exponents of FP32: nothing overflows that would not in FP32, gradients need no loss scale, and steps are not skipped.
It keeps 8 significant bits in place of 11.
""",
    example="""
Written for a V100, and run on an A100 since:

    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
""",
    remedy="""
Autocast to `torch.bfloat16`, and drop the scaler. Keep the weights in FP32: with 8 bits, updates of BF16 weights are
lost (PD501). If the loss is worse after the change, 8 bits were too few somewhere: `precdoctor shadow` finds the place.
""",
    confidence="""
0.8: steps, scale and range are recorded, and the range of BF16 holds them, but the effect of fewer bits on this model
is not known.
""",
    references=(
        "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322",
        "NVIDIA CUDA C++ Programming Guide, arithmetic of `__nv_bfloat16` (compute capability 8.0)",
        "PyTorch documentation: torch.autocast",
    ),
)
#: From this compute capability on, CUDA devices multiply BF16.
_BF16_FROM = (8, 0)


@dataclass(frozen=True)
class _Price:
    """The price of FP16 in this run.

    Attributes:
        steps, skipped: numbers of steps after the scaler has found its level.
        nearest: the FP16 activation nearest to the end of the range, and its headroom in binades; None without any.
    """

    steps: int
    skipped: int
    nearest: tuple[Key, float] | None

    @property
    def share(self) -> float:
        return self.skipped / self.steps if self.steps else 0.0

    @property
    def words(self) -> str:
        """``12 of 400 steps skipped after the scaler had found its level``."""
        if not self.steps:
            return "no dynamic loss scaler"
        return f"{self.skipped:,} of {plural(self.steps, 'step')} skipped after the scaler had found its level"

    @property
    def headroom(self) -> float:
        return self.nearest[1] if self.nearest is not None else math.inf


def check(view: RunView, options: Options) -> Checked:
    """One finding for the run."""
    how = _in_fp16(view)
    if how is None:
        return Checked.not_applicable("nothing is trained in FP16")
    if not _has_bf16(view.any_facts):
        return Checked.not_applicable("the device is not known to have BF16")
    price = _price(view)
    dear = price.share >= options["skipped_share"] and price.skipped >= options["min_skipped"]
    near = price.headroom < options["headroom"]
    room = f"2^{price.headroom:.1f}" if math.isfinite(price.headroom) else "not known"
    seen = f"{how}: {price.words}, least headroom {room}"
    if not (dear or near):
        return Checked((), f"{seen}: FP16 is wide enough")
    return Checked([_finding(view, how, price, options, near=near)], seen, Status.FAILED)


def _in_fp16(view: RunView) -> str | None:
    if any(s.autocast_dtype == FP16.dtype for steps in view.timeline.values() for s in steps):
        return "FP16 autocast"
    return "FP16 weights" if trainable(view, ("float16",)) else None


def _has_bf16(facts: Mapping[str, Any]) -> bool:
    device, versions = facts.get("device"), facts.get("versions")
    if not isinstance(device, Mapping):
        return False
    if device.get("type") != "cuda":
        return device.get("type") == "cpu"
    if isinstance(versions, Mapping) and versions.get("cuda") is None:
        return False  # ROCm counts capabilities differently
    capability = device.get("capability")
    if not isinstance(capability, Sequence) or len(capability) != 2:
        return False
    return (integer(capability[0]) or 0, integer(capability[1]) or 0) >= _BF16_FROM


def _price(view: RunView) -> _Price:
    courses = [after_calibration(steps) for _, steps in scaled_steps(view) if is_dynamic(steps)]
    counted = [(len(c), sum(s.skipped and not s.loss_is_bad for s in c)) for c in courses]
    steps, skipped = max(counted, key=lambda c: c[1], default=(0, 0))
    rooms = [
        (key, h.headroom(max(h.amax.values())))
        for key, h in forward_histories(view).items()
        if h.dtype == FP16.dtype and h.amax and not h.at_max
    ]
    return _Price(steps, skipped, min(rooms, key=lambda r: r[1], default=None))


def _finding(view: RunView, how: str, price: _Price, options: Options, *, near: bool) -> Finding:
    key, room = price.nearest if price.nearest is not None else (None, None)
    words = []
    if price.skipped:
        words.append(f"{percent(price.share)} of its steps skipped")
    if near and key is not None and room is not None:
        near_end = "at" if room < 0.05 else f"a factor of 2^{room:.1f} below"
        words.append(f"`{key[1] or key[0]}` {near_end} 65504")
    costs = ", ".join(words)
    wider = math.log2(BF16.max / FP16.max)
    predicted: dict[str, Any] = {"skipped_steps": {"from": price.skipped, "to": 0}}
    gains = [f"skipped steps {price.skipped:,} -> 0"] * bool(price.skipped)
    if room is not None:
        predicted["headroom_binades"] = {"from": room, "to": room + wider}
        gains += [f"headroom 2^{room:.1f} -> 2^{room + wider:.0f}"] * near
    predicted["significant_bits"] = {"from": FP16.mantissa_bits + 1, "to": BF16.mantissa_bits + 1}
    least = "not known" if room is None else f"2^{room:.1f} (limit 2^{options['headroom']:g})"
    return RULE.finding(
        confidence=0.8,
        title=f"{how} on a device that has BF16: {costs}",
        message=f"{how} has a price in this run: {price.words} ({percent(price.share)}, limit "
        f"{percent(options['skipped_share'])}), least headroom of an FP16 activation {least}. The device has BF16, "
        f"with a range that ends a factor of 2^{wider:.0f} further up and 8 significant bits in place of 11.",
        location=Location(
            key[0] if near and key else None, key[1] if near and key else None, None,
            key[2] if near and key else None, Phase.FORWARD,
        ),
        evidence={
            "skipped_steps": price.skipped,
            "scaled_steps": price.steps,
            "skipped_share": price.share,
            "limit": options["skipped_share"],
            "headroom_binades": room,
            "headroom_limit": options["headroom"],
            "confidence_reason": "steps and range are recorded; the effect of fewer bits on this model is not known",
        },
        prescriptions=(
            Prescription(
                title=f"autocast to BF16, no scaler: {', '.join(gains)}, significant bits 11 -> 8",
                change={"autocast_dtype": {"from": "float16", "to": "bfloat16"}},
                predicted=predicted,
                snippet=bfloat16_autocast(view.device),
            ),
        ),
    )  # fmt: skip


RULE = Rule(
    code="PD709",
    name="fp16-where-bf16-fits",
    severity=Severity.INFO,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("skipped_share", 0.01, "fraction", "Least share of steps skipped after calibration.",
                   "Chosen empirically: a stock scaler, which grows every 2000 steps, skips 0.05 %.", maximum=1.0),
        RuleOption("min_skipped", 3.0, "steps", "Least number of skipped steps.", "Two may be chance.", 1.0),
        RuleOption("headroom", 2.0, "binades", "Least acceptable distance of an FP16 activation from 65504.",
                   "Chosen empirically: amax varies by a factor of 2 to 4 between batches."),
    ),
    sampled_steps=False,
    check=check,
    preview="It is advice on a format, not a defect; `precdoctor whatif --plan` predicts what the change is worth.",
    step_columns=("autocast_dtype", "loss_scale", "growth_tracker"),
)  # fmt: skip
