"""PD2xx: values that become zero, or nearly so, although they carry information.

Words of the family:

- *flushed*: a non-zero value that its format rounds to zero; in FP16 everything up to 2^-25.
- *structural zero*: a zero that no rounding made: ReLU, dropout, padding, unused rows of an embedding.
- *intended non-zero elements*: the flushed and the surviving ones; shares of flushed elements refer to these.
- *tail*: the flushed elements as extrapolated from the survivors just above the flush limit (``numerics.tail``).
- *harm*: significant bits lost on the bulk of a tensor, not on its outliers (``survey.harm``).
- *dead*: a layer whose weight gets a gradient of exactly zero, for whatever reason.
- *vanishing*: a gradient that shrinks by a factor per layer, call or step, in any format.
- *swamped*: a term below half an ulp of the sum that it is added to.

PD201 and PD202 count flushed gradients in the format they were computed in (``survey.gradient_underflow``). PD203 finds
dead layers and why they are dead, PD204 gradients that vanish on the way. PD205 and PD206 are about sums and about
intermediate results of an op, PD207 about constants that decide, PD208 about functions at their bound. A loss scale
lifts gradients out of this family; whether it does is PD3xx.
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.underflow import (
    activation_gradient_underflow,
    dead_layer,
    dominant_epsilon,
    saturated_function,
    swallowed_underflow,
    swamped_accumulation,
    vanishing_gradients,
    weight_gradient_underflow,
)

RULES: tuple[Rule, ...] = (
    activation_gradient_underflow.RULE,
    weight_gradient_underflow.RULE,
    dead_layer.RULE,
    vanishing_gradients.RULE,
    swamped_accumulation.RULE,
    swallowed_underflow.RULE,
    dominant_epsilon.RULE,
    saturated_function.RULE,
)
