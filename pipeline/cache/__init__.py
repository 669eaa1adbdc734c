"""The feature cache: a Zarr store of samples and feature sets, written once and read again and again."""

from .blocks import Blocks
from .facts import fingerprint
from .feature_cache import FeatureCache
from .feature_sets import FAILED, OK, CaptionSet, FeatureSet, ImageSet

__all__ = ["FAILED", "OK", "Blocks", "CaptionSet", "FeatureCache", "FeatureSet", "ImageSet", "fingerprint"]
