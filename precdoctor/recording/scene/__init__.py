"""What a replay of the current step needs, kept while the step runs."""
