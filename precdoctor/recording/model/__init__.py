"""Names, places and memory of a model's tensors, read without running a line of the user's code."""
