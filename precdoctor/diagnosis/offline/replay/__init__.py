"""Replays of a log with another loss scaler, another FP8 recipe or another accumulator."""
