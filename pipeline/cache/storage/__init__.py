"""Where a cache lies: files of a disk or objects of a store, that one process writes at a time."""
