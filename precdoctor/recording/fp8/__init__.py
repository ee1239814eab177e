"""Casts to float8: observed in eager code and measured just before they happen, with their scale.

Nothing is active until a tensor is first cast to a float8 dtype. From then on, in sampled steps, a dispatch mode is
open in the modules whose own code makes such casts, and in backward passes if casts happen there.
"""
