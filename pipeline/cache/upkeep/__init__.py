"""What is done with whole caches: saying what is in them, checking, merging and removing."""
