"""When training diverged, and what the root was.

An op overflows because its operands are huge; they are huge because weights are; weights are because of an update of an
earlier step. A *divergence* is that chain over the steps before an incident, a loss spike or a gradient explosion. Its
*root* is the first step that is out of line; the *links* are the root and what followed from it.

Root kinds:

- ``learning-rate``: the rate of a parameter group rose (:mod:`.learning_rates`).
- ``rewritten``: something other than an update made a weight much larger (:mod:`.updates_by_step`).
- ``unzeroed``: gradients add up because ``zero_grad()`` is missing (:mod:`.missing_zero_grad`).
- ``unbounded``: the loss falls without bound, because the objective has none.
- ``multiplied``: every step multiplies all weight matrices by one factor, such as a decay with the wrong sign.
- ``batch``: the batch of that step is far larger than any before.
- ``gradient``: the gradient norm exploded on that step.
- ``updates``: updates replace weights instead of training them.
- ``growth``: none of these, but loss or norm grew from that step on.

:mod:`.onset` finds the root and the links, each against the calmest level before. :mod:`.report` has the words, the
evidence and the one prescription for the root.
"""
