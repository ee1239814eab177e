"""From a slot to the log, on the drain thread: rows of tensors and steps, events, facts of the process."""
