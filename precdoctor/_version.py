"""The version, for the build and for what the program writes."""

__version__ = "0.1.0"
