"""Features that others extracted into the cache, and features of the cache for others."""
