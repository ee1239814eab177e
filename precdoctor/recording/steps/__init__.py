"""Step attempts: optimizers, loss scalers, clipping, accumulation, skipped and abandoned attempts."""
