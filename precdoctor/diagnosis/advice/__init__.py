"""Prescriptions that rules of more than one family give: FP32 weights, a stable learning rate."""
