"""Compares runs: pairing of tensors, regressions, trials of a changed recipe, and the gate for CI."""
