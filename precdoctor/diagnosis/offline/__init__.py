"""Predictions from a recorded run: for other formats (:mod:`.whatif`), other scalers and recipes (:mod:`.replay`)."""
