"""The rules, one per file; each ends in a module-level ``RULE``."""
