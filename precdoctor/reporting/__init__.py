"""Findings made visible. Reporters receive data (a diagnosis, a gate report, a summary), never a path."""
