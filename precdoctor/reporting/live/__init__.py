"""The live view of a running training on a terminal, for ``watch``."""
