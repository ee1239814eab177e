"""PD3xx: the loss scale, and who applies it.

The scale is right when no FP16 gradient overflows and none is flushed. A fresh scaler may fall until it has found
that level; one that keeps falling has a layer that overflows at every scale (:mod:`.overflowing_layer`). The other
rules find a scale that is missing, unneeded, frozen, too low, applied twice, or in force while gradients are clipped.
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.loss_scaling import (
    clip_before_unscale,
    double_unscale,
    frozen_loss_scale,
    loss_scale_collapse,
    loss_scale_thrash,
    low_loss_scale,
    needless_loss_scaler,
    unscaled_fp16_gradients,
    unscaled_into_half,
)

RULES: tuple[Rule, ...] = (
    loss_scale_collapse.RULE,
    loss_scale_thrash.RULE,
    low_loss_scale.RULE,
    needless_loss_scaler.RULE,
    unscaled_fp16_gradients.RULE,
    clip_before_unscale.RULE,
    frozen_loss_scale.RULE,
    unscaled_into_half.RULE,
    double_unscale.RULE,
)
