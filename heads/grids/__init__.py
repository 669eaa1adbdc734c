"""Grids: one YAML a published ablation, with its paper's values beside each setting. Data, no code."""
