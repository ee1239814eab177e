"""Questions to a recorded run: other formats (:mod:`.whatif`), other scalers and recipes (:mod:`.replay`)."""
