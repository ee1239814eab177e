"""Prescriptions that several families share, and the order of prescriptions by their predicted effect."""
