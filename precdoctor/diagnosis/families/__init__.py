"""The rules, by family: one file a rule, its helpers beside it, ``RULES`` in the family's ``__init__``.

A family imports ``claims``, ``survey``, ``advice``, ``divergence`` and ``numerics``, never another family.
"""
