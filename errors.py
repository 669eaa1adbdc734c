"""What xret raises. Every message is one sentence: what is wrong, where, and what to do."""

from .pipeline.errors import (
    CacheError,
    DeviceError,
    EncoderError,
    ManifestError,
    NotFinite,
    OutOfMemory,
    OutputError,
    QueryError,
    RecipeError,
    RunError,
    SampleError,
    StoreError,
    VectorsError,
    XretError,
)

__all__ = [
    "CacheError",
    "DeviceError",
    "EncoderError",
    "ManifestError",
    "NotFinite",
    "OutOfMemory",
    "OutputError",
    "QueryError",
    "RecipeError",
    "RunError",
    "SampleError",
    "StoreError",
    "VectorsError",
    "XretError",
]
