"""The only readers of a log: rows, steps and events.

:class:`.view.RunView` scans the parts and keeps the rows of a :class:`.survey.Survey`; :mod:`.frames` and
:mod:`.measures` are what rules do with them. What more than one family computes is in ``analyses``.
"""
