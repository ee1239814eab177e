"""Getting into a training process and observing it: hooks, slots, kernels, the drain thread."""
