"""PD2xx: values that become zero although they mean something.

A *flush* is a non-zero value that its format rounds to zero. Harm is measured on the bulk of a tensor
(``survey.harm``), not on the energy of its outliers: ReLU zeros, dropout, padding and unused rows are no underflow.
Gradients of activations and weights are judged in the format they were computed in (``survey.gradient_underflow``); a
layer is *dead* when what follows it gets zeros only, whatever made them; sums are *swamped* when what is added is
below half an ulp.
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.underflow import (
    activation_gradient_underflow,
    dead_layer,
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
)
