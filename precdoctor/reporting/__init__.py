"""Renders results on a terminal, as HTML, and in the formats of CI systems. Reporters receive data (a diagnosis, a gate
report, a summary), never a path.
"""
