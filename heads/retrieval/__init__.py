"""A run put to work: search, index, server, export, and the layouts of the hub and of MTEB."""
