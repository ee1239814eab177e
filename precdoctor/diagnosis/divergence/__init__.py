"""When a run left its course, and what threw it off.

An origin does not end at the op that overflowed: huge operands come from a batch, a weight, an update, a learning
rate or a gradient of an earlier step. :mod:`.onset` finds that step and the chain from there; :mod:`.report` gives
its words, its evidence and its cure. Non-finite incidents, loss spikes and gradient explosions all end here.
"""
