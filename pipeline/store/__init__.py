"""The feature store: samples and feature sets in one Zarr group, read through memory maps."""

from .sets import FAILED, NOT_DONE, OK, CaptionSet, FeatureSet, ImageSet
from .store import FeatureCache

__all__ = ["FAILED", "NOT_DONE", "OK", "CaptionSet", "FeatureCache", "FeatureSet", "ImageSet"]
