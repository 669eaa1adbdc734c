"""Features that others extracted come into the cache, and features of the cache go out to others."""
