"""A recorded run for other tools: plain tables, TensorBoard, Weights & Biases. No torch is needed."""
