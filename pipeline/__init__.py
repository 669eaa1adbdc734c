"""Stage one: read images and captions, encode them once with frozen backbones, keep the features in Zarr."""
