"""Generated scenes: a small data set of drawn pictures with captions, the same for the same seed."""
