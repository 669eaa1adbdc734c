"""Diagnostics: why a run's numbers are as they are. One file a question."""

from .diagnosis import Diagnosis, diagnose, diagnose_view

__all__ = ["Diagnosis", "diagnose", "diagnose_view"]
