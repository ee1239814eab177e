"""Frameworks around training scripts, and the script the demo runs. Like `recording`, it may import torch."""
