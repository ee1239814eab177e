"""The microscope: replays the step of an incident op by op, to find the op that made the first non-finite value.

It records facts only; ``diagnosis`` interprets them when the log is read.
"""
