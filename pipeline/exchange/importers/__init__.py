"""Formats of features that others extracted, one a file. Nothing here unpickles anything."""
