"""PD2xx: values that become zero, or nearly zero, although they carry information.

Words of the family:

- *flushed*: said of a non-zero value that its format rounds to zero; in FP16 up to 2^-25.
- *structural zero*: a zero that no rounding made: ReLU, dropout, padding, unused rows of an embedding.
- *intended non-zero elements*: the flushed elements and the survivors; flushed shares refer to their number.
- *tail*: the flushed elements, extrapolated from the survivors just above the flush limit (``numerics.tail``).
- *harm*: significant bits lost on the bulk of a tensor, not on its outliers (``analyses.harm``).
- *dead*: said of a layer whose weight gets a gradient of exactly zero, for whatever reason.
- *vanishing*: said of a gradient that shrinks by a factor per layer, call or step, in any format.
- *swamped*: said of a term below half an ulp of the sum that it is added to.

PD201 and PD202 estimate flushed gradients in the format of their computation (``analyses.gradient_underflow``). PD203
finds dead layers and why they are dead, PD204 gradients that vanish along layers, calls or steps. PD205 is about sums
of micro-steps, PD206 about intermediate results that underflow, PD207 about an epsilon above the numbers it guards,
PD208 about functions at their bound. A sufficient loss scale prevents flushed gradients; PD3xx checks the scale.
"""
