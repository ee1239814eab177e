"""What a replay of the current step needs, kept while the step runs; the guard that decides whether one is due."""
