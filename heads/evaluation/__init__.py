"""Evaluation: scores of images and captions, protocols, metrics, and the rows that papers report."""
