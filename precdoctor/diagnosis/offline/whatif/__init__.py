"""What the tensors of a recorded run would become in another number format."""
