"""PD6xx: numbers on their way out of their format.

*Headroom* is the distance between a tensor's amax and the largest finite number of its format, in binades. The rules
find headroom that is nearly used up, or used up soon at the present slope; gradients, losses and logits that grow;
growth from layer to layer.
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.growth import (
    activation_growth,
    gradient_explosion,
    growth_with_depth,
    logit_growth,
    loss_spike,
    near_format_limit,
)

RULES: tuple[Rule, ...] = (
    near_format_limit.RULE,
    activation_growth.RULE,
    gradient_explosion.RULE,
    growth_with_depth.RULE,
    loss_spike.RULE,
    logit_growth.RULE,
)
