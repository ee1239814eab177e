"""PD7xx: settings and single ops whose precision costs something.

Deep scans hold ops against FP64: sums in 16 bits, cancellation, casts that lose bits. The other rules read settings:
TF32 and reduced-precision reductions, partial determinism, FP16 where BF16 has the range, positions and angles that a
format cannot tell apart.
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.configuration import (
    catastrophic_cancellation,
    fp16_where_bf16_fits,
    half_precision_positions,
    incomplete_determinism,
    lossy_cast,
    narrow_gradient_reduction,
    precision_error_above_expectation,
    reduced_precision_flags,
    reduction_in_half,
)

RULES: tuple[Rule, ...] = (
    reduction_in_half.RULE,
    reduced_precision_flags.RULE,
    half_precision_positions.RULE,
    precision_error_above_expectation.RULE,
    catastrophic_cancellation.RULE,
    lossy_cast.RULE,
    incomplete_determinism.RULE,
    narrow_gradient_reduction.RULE,
    fp16_where_bf16_fits.RULE,
)
