"""Which finding explains which, how the recorded command ended, and the exit code of a diagnosis."""
