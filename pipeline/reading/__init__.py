"""From the cache to batches: where features lie in training, and new pictures and captions encoded alike."""
