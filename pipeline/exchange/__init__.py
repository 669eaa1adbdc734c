"""Features that others extracted come into the store."""

# That can be imported.
FORMATS = ("scan", "butd-tsv", "hdf5", "embeddings", "clip-retrieval")
