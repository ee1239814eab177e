"""Which finding explains which, in what order they are reported, and the verdict of a run."""
