"""A run on a terminal while it trains."""
