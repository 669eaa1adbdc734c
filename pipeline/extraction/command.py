"""The command that made a feature set, which the set keeps, so that it can be given again as it stands."""

from dataclasses import fields
from shlex import join
from typing import Any

from ..cache.feature_cache import FeatureCache
from ..cache.storage.generations import name_of
from ..cache.storage.store import Store
from ..data.manifest import Manifest, bundled_manifests
from ..errors import CacheError, StoreError
from .options import Options

# What depends on the machine and the moment, or follows from the store; and what a user has to allow, whoever made it.
_LEFT_OUT = ("device", "workers", "scheduler", "repair", "update", "trust", "splits", "upright")


def command_of(manifest: Manifest, options: Options) -> list[str]:
    """Return the words after ``xret extract`` of an extraction of all splits, without its ``--store``."""
    bundled = bundled_manifests().get(manifest.path.stem) == manifest.path
    words = [manifest.path.stem if bundled else str(manifest.path.resolve())]
    if manifest.data_root is not None:
        words += ["--data-root", str(manifest.data_root.resolve())]
    for field in fields(options):
        value = getattr(options, field.name)
        named = field.name in ("visual", "text")  # a default may change
        if field.name not in _LEFT_OUT and (named or value != field.default):
            words += _words(f"--{field.name.replace('_', '-')}", value)
    return words


def _words(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if value is None:
        return [option, "none"]
    if isinstance(value, tuple):
        return [option, ("x" if option == "--pool" else "-").join(map(str, value))]
    return [f"{option}={value}"] if str(value).startswith("-") else [option, str(value)]


def written(words: list[str], url: str) -> str:
    """Return the command that computes again what is damaged of the sets of an extraction, as a shell takes it."""
    return join(["xret", "extract", *words, "--store", url, "--repair"])


def command_for(store: Store, path: str) -> str | None:
    """Return the command that computes again what is damaged or failed of ``images/NAME`` or ``captions/NAME``.

    None where the set does not know it, since an earlier version made it, or an import.
    """
    words = store.inspect_group(path)[0].get("command")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        return None
    url = name_of(store)
    return written([*words, *_splits(url, path)], url)


def _splits(url: str, path: str) -> list[str]:
    """Return the option that names the splits of a set, where it has not all, or where that cannot be told."""
    try:
        cache = FeatureCache.open(url)
        features = cache.set_at(path)
        done = features.done()
    except (CacheError, StoreError):
        return []
    begun = [split for split in cache.splits if done[features.blocks.of_split(split)].any()]
    return [] if len(begun) in (0, len(cache.splits)) else ["--splits", ",".join(begun)]
