"""The rules, grouped by family: one file per rule, with its helpers beside it, and ``RULES`` in each ``__init__``.

A family imports ``claims``, ``survey``, ``advice``, ``divergence`` and ``numerics``, never another family.
"""
