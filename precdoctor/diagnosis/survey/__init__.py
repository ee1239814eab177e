"""The only readers of a log: rows, steps, events, and the measures that rules of more than one family ask for.

:class:`.view.RunView` scans the parts. Every other module computes one measure from the scanned rows: the history of a
tensor's amax, the flushed share of a gradient, the facts of an op, the settings of an optimizer. No module here makes
findings.
"""
