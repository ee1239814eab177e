"""When training diverged, and why.

An op overflows because its operands are huge; they are huge because weights are; weights are huge because of an update
on an earlier step. A *divergence* is that chain over the steps before an incident, a loss spike or a gradient
explosion. Its *root* is the first step that is out of line; its *links* are the root and its consequences.

Root kinds:

- ``learning-rate``: the rate of a parameter group rose (:mod:`.learning_rates`).
- ``rewritten``: something other than an update made a weight much larger (:mod:`.updates_by_step`).
- ``unzeroed``: gradients add up because ``zero_grad()`` is missing (:mod:`.missing_zero_grad`).
- ``unbounded``: the loss falls without bound, because the objective has none.
- ``multiplied``: every step multiplies all weight matrices by one factor, such as a decay with the wrong sign.
- ``initial``: the model's first output is out of all proportion, before any update.
- ``batch``: the batch of that step is far larger than any before.
- ``gradient``: the gradient norm exploded on that step.
- ``updates``: updates replace weights instead of training them.
- ``growth``: none of these, but loss or norm grew from that step on.

:mod:`.onset` finds the root and the links; a quantity is out of line compared with its calmest level before.
:mod:`.report` makes the words, the evidence and the prescription for the root.
"""
