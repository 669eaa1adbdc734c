"""What is written down about a feature set after it was created."""

from contextlib import suppress
from typing import Any

from ..errors import CacheError, OutputError
from .feature_sets import FeatureSet
from .storage.folder import home_of
from .storage.generations import store_of
from .storage.lease import alone
from .storage.store import Store


def record_failures(features: FeatureSet, ids: list[str], failed: dict[str, str]) -> None:
    """Let the set's attribute ``failed`` hold these {id: reason}, and of `ids` no others."""
    store, path = features.cache.store, features.path
    attributes = store.read_group(path)
    before, gone = attributes["failed"], set(ids)
    after = {key: reason for key, reason in before.items() if key not in gone} | failed
    if after != before:
        store.seal_group(path, {**attributes, "failed": dict(sorted(after.items()))}, list(attributes["arrays"]))


def record_place(features: FeatureSet, told: dict[str, Any]) -> None:
    """Let a set have these attributes, which say where its weights are; where nothing can be written it has none."""
    home, path = Store(home_of(features.cache.url)[0]), features.path
    with suppress(CacheError, OutputError, OSError), alone(home):
        store = store_of(features.cache.address, home.writer)
        attributes = store.read_group(path)
        store.seal_group(path, {**attributes, **told}, list(attributes["arrays"]))
