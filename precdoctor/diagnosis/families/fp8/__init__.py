"""PD4xx: operands of FP8 matrix products, and their scales.

A *cast* is what the recorder saw of one operand: amax, scale, counts of flushed and saturated elements
(:mod:`.fp8_casts`). Saturation is judged before the cast, because casts differ between versions. A *recipe* is how a
scale follows from amax: current, delayed, per block (:mod:`.fp8_scale_history`). Prescriptions are predicted from the
exponent histogram (:mod:`.fp8_prescriptions`).
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.fp8 import (
    e4m3_gradients,
    fp8_accumulation,
    fp8_amax_explosion,
    fp8_block_scaling,
    fp8_outlier_channels,
    fp8_saturation,
    fp8_underflow,
    sensitive_layer_in_fp8,
    wrong_fp8_scale,
    wrong_fp8_scale_held_down,
    wrong_fp8_scale_invalid,
)

RULES: tuple[Rule, ...] = (
    fp8_saturation.RULE,
    fp8_underflow.RULE,
    e4m3_gradients.RULE,
    wrong_fp8_scale.RULE,
    wrong_fp8_scale_invalid.RULE,
    fp8_amax_explosion.RULE,
    sensitive_layer_in_fp8.RULE,
    fp8_outlier_channels.RULE,
    fp8_block_scaling.RULE,
    fp8_accumulation.RULE,
    wrong_fp8_scale_held_down.RULE,
)
