"""The gradient that a low loss scale harms most, and the changes that allow a higher scale.

PD301 and PD303 ask for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from precdoctor.diagnosis.advice.larger_loss_scale import multiplied, plan_scale
from precdoctor.diagnosis.analyses.gradient_underflow import (
    DYING_SHARE,
    ENOUGH_BITS,
    FAINT_SHARE,
    FINE_BITS,
    FLUSH_OPTIONS,
    MARGIN_BINADES,
    MAX_STEPS,
    SUBNORMAL_SHARE,
    GradientSeries,
    is_faint,
    is_harmed,
    survey,
)
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Phase, Prescription
from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import Overflow
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, Key, TensorRow
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP16

#: Options that PD303 and PD305 share.
SUBNORMAL_OPTIONS = (SUBNORMAL_SHARE, FAINT_SHARE, FINE_BITS, ENOUGH_BITS, DYING_SHARE, MARGIN_BINADES, MAX_STEPS)
#: PD201's limits of the flushed share of elements and of magnitude.
_FLUSHED, _MAGNITUDE = (o.default for o in FLUSH_OPTIONS[:2])


@dataclass(frozen=True)
class LostGradient:
    """The FP16 output gradient that the loss scale harms most, over the healthy steps."""

    key: Key
    series: GradientSeries

    @property
    def words(self) -> str:
        """``22 % of the gradient of `inp` is flushed``."""
        place = self.key[1] or self.key[0]
        if self.series.share >= _FLUSHED:
            return f"{percent(self.series.share)} of the gradient of `{place}` is flushed"
        return f"the gradient of `{place}` keeps {self.series.mean_bits:.1f} of 11 significant bits"


def lost_gradient(view: RunView) -> LostGradient | None:
    """The FP16 output gradient that is harmed most: by PD201's limits, else by PD303's; None if none exceeds them."""
    gradients = survey(view, max_steps=MAX_STEPS.default, dying_share=_FLUSHED)
    fp16 = {k: t for k, t in gradients.tensors.items() if t.fmt is FP16}
    harmed = {k: t for k, t in fp16.items() if is_harmed(view, k, t, (_FLUSHED, _MAGNITUDE))} or {
        k: t
        for k, t in fp16.items()
        if not t.dead
        and t.subnormal_share >= SUBNORMAL_SHARE.default
        and t.mean_bits < ENOUGH_BITS.default
        and is_faint(view, k, t, FAINT_SHARE.default, ENOUGH_BITS.default)
    }
    if not harmed:
        return None
    key, series = max(harmed.items(), key=lambda item: (item[1].share, -item[1].mean_bits))
    return LostGradient(key, series)


def higher_level(view: RunView, lost: LostGradient, layer: Overflow | None, level: float) -> tuple[Prescription, ...]:
    """Prescriptions that save a lost gradient: the overflowing layer in FP32 with a higher scale, and BF16.

    The scale is limited by the gradients of all other layers. BF16 alone if the layer is unknown or this gains nothing.

    Args:
        level: the current scale.
    """
    bfloat16 = Prescription(
        title=f"use BF16 autocast, which needs no loss scale: flushed {percent(lost.series.share)} -> 0 %",
        change={"autocast_dtype": {"from": FP16.dtype, "to": "bfloat16"}},
        predicted={"flushed_share": {"from": lost.series.share, "to": 0.0}},
        snippet=snippets.bfloat16_autocast(view.device),
    )
    if layer is None or not layer.module:
        return (bfloat16,)
    gradients = survey(view, max_steps=MAX_STEPS.default, dying_share=_FLUSHED)
    rows = view.rows(*lost.series.worst)
    apart = (r for r in rows if r.kind in BACKWARD_KINDS and not layer.holds(r) and not layer.lies_in(r))
    largest = max((r.amax or 0.0 for r in apart), default=0.0)
    if not largest:
        return (bfloat16,)
    others = replace(gradients, headroom=FP16.headroom(largest))
    guilty = {lost.key: lost.series}
    chosen = plan_scale(view, others, guilty, target=_FLUSHED / 10.0, margin=MARGIN_BINADES.default)
    if chosen.binades < 1:
        return (bfloat16,)
    scale = multiplied(level, chosen.binades)
    return (
        Prescription(
            title=f"run `{layer.module}` in FP32, so that the scale can stay at {scale:g}: flushed in "
            f"`{lost.key[1] or lost.key[0]}` {percent(chosen.before)} -> {percent(chosen.after)}",
            change={
                "module": layer.module,
                "dtype": {"from": layer.dtype, "to": "float32"},
                "loss_scale": {"from": level, "to": scale},
            },
            predicted={
                "flushed_share": {"from": chosen.before, "to": chosen.after},
                "headroom_binades": round(chosen.headroom, 1),
            },
            snippet=snippets.run_in_float32(layer.module, view.device),
        ),
        bfloat16,
    )


def subnormal_evidence(
    tensor: GradientSeries, guilty: Mapping[Key, GradientSeries], options: Options
) -> dict[str, object]:
    """The entries of a finding's evidence that PD303 and PD305 share; ``tensor``: the worst of the ``guilty`` ones."""
    worst = sorted(guilty.items(), key=lambda item: -item[1].subnormal_share)[:16]
    few = tensor.steps < 4
    return {
        "subnormal_share": tensor.subnormal_share,
        "limit": options["subnormal_share"],
        "mean_significant_bits": tensor.mean_bits,
        "tensors": [{"root": k[0], "module": k[1], "subnormal_share": t.subnormal_share} for k, t in worst],
        "confidence_reason": "fewer than four steps were sampled" if few else "subnormal elements are counted",
    }


def largest_gradient(rows: Sequence[TensorRow]) -> Overflow | None:
    """The largest FP16 output gradient of a step, as the overflow that limits the scale; None without any."""
    half = [r for r in rows if r.kind == "grad_output" and r.dtype == FP16.dtype and r.amax]
    row = max(half, key=lambda r: r.amax or 0.0, default=None)
    if row is None:
        return None
    return Overflow(row, row.root, row.module, row.module_class, Phase.BACKWARD, (row,), row.dtype)
