"""The rules, grouped by family: one file per rule, with its helpers beside it.

The registry finds a rule by the ``RULE`` of its module.

A family imports ``claims``, ``survey``, ``advice``, ``divergence`` and ``numerics``, never another family.
"""
