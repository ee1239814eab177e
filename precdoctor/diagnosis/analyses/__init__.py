"""What rules of more than one family ask for: each module computes one thing from the rows that the survey kept.

The history of a tensor's amax, the flushed share of a gradient, the facts of an op, the settings of an optimizer. Most
are remembered by the view, so that rules share them. No module here reads a log or makes findings.
"""
