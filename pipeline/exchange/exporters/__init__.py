"""Writing a feature set in the layouts that other code reads."""
