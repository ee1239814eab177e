"""The types of rules and findings, relations between findings, and the shared words and code snippets.

Nothing here reads a log; :mod:`.finding` needs neither pandas nor a run.
"""
