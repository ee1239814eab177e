"""Torch's hooks on modules, gradients, losses and optimizers: they find the tensors and hand them to the recorder."""
