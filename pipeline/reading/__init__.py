"""From the store to batches: where features lie in training."""
