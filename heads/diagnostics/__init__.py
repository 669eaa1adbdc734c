"""Diagnostics: why a run's numbers are as they are. One file a question; the answers are plain data."""

from .diagnosis import diagnose

__all__ = ["diagnose"]
