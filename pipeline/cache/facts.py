"""What is known of a feature set before it is made, and what decides its features."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CacheError
from .blocks import Blocks
from .feature_sets import FeatureSet


def require_on_error(on_error: str) -> None:
    """Raise CacheError where what is done about a sample that fails is neither ``fail`` nor ``skip``."""
    if on_error not in ("fail", "skip"):
        raise CacheError(f"on_error is '{on_error}', but must be one of fail, skip")


def require_dtype(dtype: str) -> None:
    """Refuse a dtype that features are not stored in.

    Raises:
        CacheError: it is neither ``float16`` nor ``float32``.
    """
    if dtype == "bfloat16":
        raise CacheError(
            "--dtype bfloat16: Zarr has no such dtype; take float16, which is finer and reaches up to 65,504, or"
            " float32, since on a GPU networks compute in bfloat16 anyway"
        )
    if dtype not in ("float16", "float32"):
        raise CacheError(f"--dtype {dtype}: features are stored as float16 or float32; give one of them")


def fingerprint(identity: dict[str, Any], dtype: str) -> str:
    """Return the SHA-256 of what decides a set's features: encoder, weights, preprocessing, layer, dtype."""
    text = json.dumps({**identity, "dtype": dtype}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


_ABSENT = ("space", "grid", "cells", "source", "command")  # where they are None


@dataclass(frozen=True)
class SetFacts:
    """What is known of a set before it is made; `FeatureSet` explains what stands in both."""

    encoder: str  # the set's name before ``@``
    kind: str
    identity: dict[str, Any]
    dtype: str
    channels: int | None
    global_channels: int | None
    recorded: dict[str, Any]  # versions, device, batch size: a difference gives a note, not another set
    asked: dict[str, Any] | None = None  # the options that decide the set without loading the encoder, if they do
    space: str | None = None
    grid: tuple[int, int] | None = None
    source: dict[str, str] | None = None  # where the weights came from, see `encoders.weights_source`
    command: list[str] | None = None  # that made it, see `extraction.command`
    cells: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        encoder: Any,
        dtype: str,
        recorded: dict[str, Any],
        asked: dict[str, Any] | None = None,
        source: dict[str, str] | None = None,
    ) -> "SetFacts":
        """Return the facts of an encoder, whose versions join `recorded`; a set of token ids alone is int32."""
        return cls(
            encoder.name,
            encoder.kind,
            encoder.identity,
            "int32" if encoder.channels is None else dtype,
            encoder.channels,
            encoder.global_channels,
            {**encoder.versions, **recorded},
            asked,
            encoder.space,
            getattr(encoder, "grid", None),  # captions have none
            source,
            cells=getattr(encoder, "cells", None) if "pool" in encoder.identity else None,
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of identity and dtype."""
        return fingerprint(self.identity, self.dtype)

    @property
    def name(self) -> str:
        """The set's name in a cache."""
        return f"{self.encoder}@{self.fingerprint[:8]}"

    def named_as(self, sets: Iterable[FeatureSet]) -> "SetFacts":
        """Return these facts with the name of the first set that is the same, if there is one."""
        same = (features.name for features in sets if features.fingerprint == self.fingerprint)
        name = next(same, self.name)
        return replace(self, encoder=name.rpartition("@")[0])

    def attributes(self, blocks: Blocks) -> dict[str, Any]:
        """Return the attributes of a new set."""
        facts = {key: value for key, value in vars(self).items() if value is not None or key not in _ABSENT}
        return {**facts, "fingerprint": self.fingerprint, "shard_images": blocks.length, "failed": {}}
