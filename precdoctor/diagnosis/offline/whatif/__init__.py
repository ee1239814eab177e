"""Predictions of what a recorded run's tensors would lose in another number format, and precision plans."""
