"""Exports of a recorded run: plain tables, TensorBoard, Weights & Biases. No torch is needed."""
