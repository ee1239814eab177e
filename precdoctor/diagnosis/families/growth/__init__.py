"""PD6xx: numbers that grow towards the end of their format, or out of all proportion, while still finite.

Words of the family:

- *amax*: the largest magnitude of a tensor.
- *headroom*: distance between amax and the largest finite number of the format, in binades (factors of two).
- *history*: the amax of one tensor by step, over the healthy recorded steps (``analyses.histories``).
- *trend*: a straight line through log2 of a history, and when it reaches a limit (``analyses.trends``).
- *chain*: like layers, or the calls of one module, in order (``analyses.depth``).
- *logits*: the operand of a softmax; *one-hot*: a softmax that gives nearly all weight to one element.
- *jump*: a norm or loss that leaves the range of the steps before; it may stay up or come down again.
- *to diverge*: norm and loss rise over the whole run, without a jump out of a steady range.

PD601 finds tensors without headroom, PD602 tensors that use it up soon, PD604 growth from layer to layer. PD603 and
PD605 find jumps of the gradient norm and of the loss, with the layer or tensor that moved first; the root of such a
rise comes from ``diagnosis.divergence``. PD606 finds logits that make a softmax one-hot, far below any format's end.
"""
