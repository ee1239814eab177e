"""From findings to a file of changes with computed effects, and back: what was predicted against what came."""
