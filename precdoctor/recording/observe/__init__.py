"""From a tensor to a slot: the hooks on modules, gradients and losses, and the batches they measure in."""
