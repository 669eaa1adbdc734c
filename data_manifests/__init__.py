"""Manifests: one YAML a data set. Data, no code."""
