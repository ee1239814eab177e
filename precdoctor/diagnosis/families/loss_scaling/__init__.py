"""PD3xx: the loss scale, and how scripts apply it.

The scale is right if no FP16 gradient overflows and none is flushed. Words of the family:

- *scaler*: a ``GradScaler``, or a constant written by hand, which is inferred from the loss and the gradients.
- *skip*: a step attempt without an update, because a gradient overflowed at the current scale.
- *calibration*: the first skips of a fresh scaler, which comes down from 2^16 to its *level*, the first clean scale.
- *probe*: a skip at a scale that the scaler had just grown to; harmless at the stock interval of 2000 steps.
- *unscale*: to divide gradients by the scale, once, before anything clips or reads them.

PD301 finds scales that keep falling, PD302 scales that probe too often, PD307 scales that never change and PD303 scales
that are too low. PD304 finds a scaler without FP16, PD305 FP16 without a scaler. PD306, PD308 and PD309 find gradients
that are clipped before unscaling, unscaled in FP16, or unscaled twice. :mod:`.overflowing_layer` names the layer that
made a scaler skip, :mod:`.scale_level` the gradient that a low scale harms most, and the changes that allow a higher
scale.
"""
