"""Diagnostics: why a run's numbers are as they are. One file a question; the answers are plain data."""

from .diagnosis import diagnose, diagnose_embedded

__all__ = ["diagnose", "diagnose_embedded"]
