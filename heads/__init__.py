"""Stage two: train light heads from the feature cache and evaluate them."""
