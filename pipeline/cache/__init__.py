"""The feature cache: a Zarr store of samples and feature sets, written once and read again and again."""

from .blocks import Blocks
from .feature_cache import FeatureCache
from .feature_sets import FAILED, OK, CaptionSet, FeatureSet, ImageSet, fingerprint

__all__ = ["FAILED", "OK", "Blocks", "CaptionSet", "FeatureCache", "FeatureSet", "ImageSet", "fingerprint"]
