"""The report: one self-contained HTML page about one run, or about several side by side."""

from .page import write_report

__all__ = ["write_report"]
