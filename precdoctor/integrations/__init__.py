"""Frameworks around training scripts, and the script the demo runs. With `recording`, the only room that knows torch."""
