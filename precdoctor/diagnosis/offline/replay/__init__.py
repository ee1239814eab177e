"""Replays of a log: what another loss scaler, another FP8 recipe, another accumulator would have done to this run."""
