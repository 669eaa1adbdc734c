"""Ablations: a grid of variants and seeds, trained from one cache, and its table."""
