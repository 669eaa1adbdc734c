"""Recipes: one YAML a published system, with its paper's hyperparameters. Data, no code."""
