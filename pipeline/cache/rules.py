"""What the attributes of a cache have to be; a store may come from a stranger."""

from collections.abc import Mapping
from typing import Any

from ..documents import TEXT, Rule, fault
from ..errors import CacheError

MOST = 1 << 28  # rows of any kind: a store that tells of more is none of ours
KINDS = ("grid", "roi", "frames", "words", "tokens", "global")  # ``global``: the global feature alone


def require_root(url: str, attributes: Mapping[str, Any]) -> None:
    """Raise CacheError unless a store's root attributes are what a cache has."""
    if wrong := fault(attributes, _OF_ROOT, {}):
        raise CacheError(f"{url}/zarr.json is damaged: {wrong}; get that store anew")


def require_samples(url: str, attributes: Mapping[str, Any]) -> None:
    """Raise CacheError unless the attributes of a store's samples are what they are in a cache."""
    if wrong := fault(attributes, {}, _OF_SAMPLES):
        raise CacheError(f"{url}: samples/zarr.json is damaged: {wrong}; get that store anew")


def require_set(url: str, modality: str, path: str, attributes: Mapping[str, Any]) -> None:
    """Raise CacheError unless the attributes of the set at `path` are those of a feature set of that modality."""
    if wrong := fault(attributes, _OF_SETS | _OF_SETS_OF[modality], _OPTIONAL):
        raise CacheError(f"{url}: {path}/zarr.json is damaged: {wrong}; get that store anew")


def _are_splits(value: Any) -> bool:
    """Return whether a value is the rows [first, last) of splits, one after the other from 0."""
    if not isinstance(value, dict) or not value:
        return False
    end = 0
    for pair in value.values():
        if not isinstance(pair, list) or [type(row) for row in pair] != [int, int] or not end == pair[0] < pair[1]:
            return False
        end = pair[1]
    return end <= MOST


def _are_seals(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(of_array, list) and all(type(one) is int for one in of_array) for of_array in value.values()
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _holds(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, kind) for inner in value.values())


_OF_SAMPLES: dict[str, Rule] = {  # earlier versions wrote none of these
    "seals": ("lists of whole numbers", _are_seals),
    "source": ("a mapping", lambda value: isinstance(value, dict)),
    "left_out": ("texts", _are_texts),
}
_OF_ROOT: dict[str, Rule] = {
    "dataset": TEXT,
    "manifest_sha256": TEXT,
    "protocols": ("a list of texts", _are_texts),
    "splits": ("rows of images, split after split from 0", _are_splits),
}


_COUNT: Rule = ("a whole number of at least 1", _is_count)
_ROWS: Rule = ("a whole number of at least 0", lambda value: value == 0 or _is_count(value))
_WIDTH: Rule = ("a whole number of at least 1, or null", lambda value: value is None or _is_count(value))
_MAPPING: Rule = ("a mapping", lambda value: isinstance(value, dict))
_TEXTS: Rule = ("a mapping of texts", lambda value: _holds(value, str))
_OF_SETS: dict[str, Rule] = {
    **dict.fromkeys(("encoder", "fingerprint"), TEXT),
    "kind": ("a kind of features", lambda value: value in KINDS),
    "dtype": ("float16, float32 or int32", lambda value: value in ("float16", "float32", "int32")),
    **dict.fromkeys(("identity", "recorded"), _MAPPING),
    **dict.fromkeys(("failed", "arrays"), _TEXTS),
    **dict.fromkeys(("channels", "global_channels"), _WIDTH),
    "shard_images": _COUNT,
}
_SIDES: Rule = (
    "two whole numbers",
    lambda value: isinstance(value, list) and [*map(_is_count, value)] == [True] * 2,
)
_OF_SETS_OF: dict[str, dict[str, Rule]] = {
    "images": {"rows": _ROWS},
    "captions": {"shard_captions": _COUNT, "shard_tokens": _ROWS},
}
_OPTIONAL: dict[str, Rule] = {  # sets lack what they have no need of, or what earlier versions did not know
    "space": ("a text or null", lambda value: isinstance(value, str | None)),
    "command": ("texts", _are_texts),
    "source": ("a mapping of texts", lambda value: _holds(value, str)),
    "asked": ("a mapping or null", lambda value: isinstance(value, dict | None)),
    "views": _COUNT,
    **dict.fromkeys(("grid", "cells"), _SIDES),
    "vocabulary": ("texts", _are_texts),
    "counts": ("a mapping of whole numbers", lambda value: _holds(value, int)),
}
