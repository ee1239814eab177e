"""FP32 beside the reduced precision: chosen steps run again in both, and compared layer by layer."""
