"""The commands that repair damaged shards and failed samples."""

from collections.abc import Sequence
from shlex import quote

from ..cache.feature_cache import MODALITIES
from ..cache.storage.folder import home_of
from ..cache.storage.generations import is_outdated, name_of, store_of
from ..cache.storage.store import Store
from ..cache.upkeep.verify import Damage, Verification
from ..data.manifest import bundled_manifests
from .command import command_for


def remedies(url: str, found: Verification) -> list[str]:
    """Return what to do about what `verify` found in the cache at `url`, a line each; nothing for a sound store."""
    store = store_of(url)
    if is_outdated(store):  # a command would compute it from what the data set is now
        home = home_of(store.url)[0]
        way = (
            f"this generation is of what the data set was, and cannot be extracted again; `xret cache rm {quote(home)}"
        )
        return [f"{way} --old` frees it, with all others before the current one"] if found.damaged else []
    if any(damage.array == "/" for damage in found.damaged):
        return [f"restore {store.url}/zarr.json from a copy, or extract into another --store"]
    sets = [_set_of(damage) for damage in found.damaged]
    to_remove = dict.fromkeys(
        path
        for path, damage in zip(sets, found.damaged, strict=True)
        if path and (damage.shard is None or _imported(store, path))
    )
    lines = [
        f"run `xret cache rm {quote(url)} {quote(path)}`, then "
        + (f"`{command}`" if (command := command_for(store, path)) else "extract or import that set again")
        for path in to_remove
    ]
    damaged = [path for path in sets if path not in to_remove]
    if damaged:
        lines += [f"run {command}: it computes what is damaged again" for command in _commands(store, damaged)]
    elif found.failed_samples:
        again = commands_for_failed(url)
        lines += [f"repair the files of the failed samples and run {again}"] if again else []
    return lines


def commands_for_failed(url: str) -> str:
    """Return the commands that try failed samples of the cache at `url` again; empty where none was extracted."""
    store = store_of(url)
    if is_outdated(store):
        return ""
    failed = [path for path in _image_sets(store) if store.inspect_group(path)[0].get("failed")]
    return " and ".join(_commands(store, [path for path in failed if not _imported(store, path)]))


def _commands(store: Store, paths: Sequence[str | None]) -> list[str]:
    """Return the commands that made these sets, each once; of other parts than sets that of any set.

    Of sets of an earlier version only the user knows the options, and the path of a manifest that is not bundled.
    """
    known = [command_for(store, path) for path in paths if path is not None]
    if None in paths:
        of_any = (command_for(store, path) for path in _image_sets(store) + _caption_sets(store))
        known.append(next((command for command in of_any if command is not None), None))
    dataset = store.inspect_group("")[0]["dataset"]
    name = dataset if dataset in bundled_manifests() else f"{dataset}.yaml"
    words = f"{quote(name)} --store {quote(name_of(store))}"
    old = f"`xret extract {words} … --repair`, with the other options of that extraction"
    return list(dict.fromkeys(old if command is None else f"`{command}`" for command in known))


def _image_sets(store: Store) -> list[str]:
    return [f"images/{name}" for name in store.names("images") if "@" in name]


def _caption_sets(store: Store) -> list[str]:
    return [f"captions/{name}" for name in store.names("captions") if "@" in name]


def _set_of(damage: Damage) -> str | None:
    """Return the path of the feature set that is damaged; None if it is another part of the cache."""
    parts = damage.array.split("/")
    return "/".join(parts[:2]) if parts[0] in MODALITIES and len(parts) > 1 else None


def _imported(store: Store, path: str) -> bool:
    """Return whether a set was imported: its identity names files, where that of an encoder names weights."""
    return "files" in store.inspect_group(path)[0].get("identity", {})
