"""Training a head from the cache, and fine-tuning it with its backbones."""
