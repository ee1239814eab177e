"""Getting into a training process and out of it: launch, ranks, threads, signals, exits, memory limits."""
