"""The microscope: an incident's step run once more, op by op, to see which operation made the first bad value.

It records raw facts only; what they mean is decided where logs are read (``diagnosis``).
"""
