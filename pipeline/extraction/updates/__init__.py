"""Extraction of a data set that has changed: what changed, and what other generations have of it."""
