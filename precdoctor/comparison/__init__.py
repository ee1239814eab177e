"""Two runs side by side: pairing, regressions, the gate for CI."""
