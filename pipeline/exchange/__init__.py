"""Features that others extracted come into the cache, and features of the cache go out to others."""

# That can be imported.
FORMATS = ("scan", "butd-tsv", "detectron-npz", "hdf5", "arrays", "embeddings", "clip-retrieval")
