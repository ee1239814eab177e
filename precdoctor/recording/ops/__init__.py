"""One operation as torch dispatches it: its name, its source line, its operands, and its result in FP64."""
