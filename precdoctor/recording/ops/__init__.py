"""One op as torch dispatches it: its name, source line, operands, and FP64 result."""
