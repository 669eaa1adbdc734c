"""The feature cache: Zarr arrays of samples and feature sets, their layout, and the care of them."""
