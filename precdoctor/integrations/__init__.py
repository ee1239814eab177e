"""Adapters for training frameworks and pytest, exports, and the demo's script. Like `recording`, may import torch."""
