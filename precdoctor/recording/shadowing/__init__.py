"""The shadow of chosen steps: replayed in reduced precision and in a wide format, and compared layer by layer."""
