"""PD4xx: operands of FP8 matrix products, and their scales.

A *cast* is one operand at one step, as recorded just before it was rounded (:mod:`.fp8_casts`): its exponents after
scaling, the *scale*, and exact counts of *flushed* elements (non-zero, rounded to zero) and *clipped* elements (beyond
the format's maximum). Clipping is counted before the cast, because out-of-range elements are clipped by some torch
versions and become NaN in others. A *settled* cast is finite, not all zeros, and not the first of its operand, whose
amax history may be empty.

The *cost* of a cast is signal to noise in dB, or the share of the magnitudes that is lost, beyond what rounding to the
format's mantissa takes anyway. The *bulk* of a tensor is its elements without the outliers (:mod:`.fp8_outliers`): one
loud channel can hide that everything else is lost.

A *recipe* says how the scale follows from amax: current (of the step itself), delayed (from a history), per block.
PD404 finds scales that are wrong whatever the tensor is like, and replays recipes; the other rules find tensors that
no scale fits. Prescriptions begin with the smallest change, and the histogram predicts the effect of each
(:mod:`.fp8_prescriptions`). For other formats and scalings of a whole model there is ``precdoctor whatif``.
"""
