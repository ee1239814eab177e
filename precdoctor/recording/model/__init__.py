"""What the tensors of a model are called and where they lie, read without running a line of the user's code."""
