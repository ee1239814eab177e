"""The version, for the build and for the files that precdoctor writes."""

__version__ = "0.1.0"
