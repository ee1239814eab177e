"""What a rule says: findings and their evidence, the form of a rule, and the words and code snippets of all rules.

Nothing here reads a log; :mod:`.finding` needs neither pandas nor a run.
"""
