"""PD5xx: what the optimizer does to weights, and what it keeps.

A *lost update* is ``round(w + dw) == w`` for the intended ``dw``. The rules find updates that are lost, too large or
dominated by eps; moments, averages and buffers that no longer change or never decay in their format; masters that do
not match their weights; gradients that never reach the optimizer.
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.updates import (
    adam_eps_dominates,
    cleared_gradients,
    lost_weight_updates,
    master_weights_apart,
    no_master_weights,
    oversized_weight_updates,
    second_moment_underflow,
    stalled_average,
    stalled_second_moment,
    stalled_state,
)

RULES: tuple[Rule, ...] = (
    lost_weight_updates.RULE,
    no_master_weights.RULE,
    adam_eps_dominates.RULE,
    oversized_weight_updates.RULE,
    stalled_second_moment.RULE,
    second_moment_underflow.RULE,
    stalled_average.RULE,
    master_weights_apart.RULE,
    stalled_state.RULE,
    cleared_gradients.RULE,
)
