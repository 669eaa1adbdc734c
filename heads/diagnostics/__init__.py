"""Diagnostics: why a run's numbers are as they are. One file a question."""

from .diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
