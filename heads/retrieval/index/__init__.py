"""An index over a gallery: candidates by FAISS over all set elements, then the run's own similarity on just these."""
