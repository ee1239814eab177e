"""PD5xx: updates of weights, and the state that outlives a step.

A *lost update* is ``round(w + dw) == w`` for the *intended* ``dw``. The intended update is recomputed for SGD, Adam and
AdamW; for other optimizers a non-zero gradient stands in for it. The stored update of a 16-bit weight is already
rounded: zero (the weight is *unchanged*) or about an ulp, nothing between. A *narrow* weight is in a format with fewer
bits than FP32; its *master* is a wider copy that the optimizer trains.

PD501 counts lost updates, PD502 predicts them for the end of a learning-rate schedule. PD504 is the opposite: updates
or weight decay so large that a weight forgets what it learnt. PD503 finds gradients below Adam's eps. *Moments* are
Adam's averages of the gradient and of its square: in 16 bits the second moment may never decay (PD505) or be zero
(PD506). A tensor *stands still* if writes to it change no bit (PD509): any state that a deep scan saw, and averages and
statistics by their fingerprints. PD508 compares masters with their weights, PD510 finds gradients that never reach the
optimizer, PD511 a learning rate that decays to nothing long before the run ends, and PD512 a part of the model whose
gradients do.

A module whose name begins with that of a rule is part of that rule; PD502 also uses the counts of PD501.
"""
