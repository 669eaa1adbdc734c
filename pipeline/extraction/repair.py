"""The commands that repair damaged shards and failed samples."""

from shlex import quote

from ..cache.feature_cache import MODALITIES
from ..cache.generations import store_of
from ..cache.storage.store import Store
from ..cache.verify import Damage, Verification
from ..data.manifest import bundled_manifests


def remedies(url: str, found: Verification) -> list[str]:
    """Return what to do about what `verify` found in the cache at `url`, a line each; nothing for a sound store."""
    store = store_of(url)
    if any(damage.array == "/" for damage in found.damaged):
        return [f"restore {url}/zarr.json from a copy, or extract into another --store"]
    again = f"`{repair_command(store.inspect_group('')[0]['dataset'], url)}`"
    sets = [_set_of(damage) for damage in found.damaged]
    to_remove = dict.fromkeys(
        path
        for path, damage in zip(sets, found.damaged, strict=True)
        if path and (damage.shard is None or _imported(store, path))
    )
    lines = [f"run `xret cache rm {quote(url)} {path}`, then extract or import that set again" for path in to_remove]
    if any(path not in to_remove for path in sets):
        lines.append(f"run {again}, with the other options of that extraction: it computes what is damaged again")
    elif found.failed_samples and any(
        "@" in name and not _imported(store, f"images/{name}") for name in store.names("images")
    ):
        lines.append(
            f"repair the files of the failed samples and run {again}, with the other options of that extraction"
        )
    return lines


def repair_command(dataset: str, url: str) -> str:
    """Return the command that computes damaged and failed parts of an extraction again.

    Only the user knows the path of a manifest of which `dataset` is the name, unless it is bundled.
    """
    is_known = dataset in bundled_manifests() or dataset.endswith((".yaml", ".yml"))
    return f"xret extract {quote(dataset if is_known else f'{dataset}.yaml')} --store {quote(url)} … --repair"


def _set_of(damage: Damage) -> str | None:
    """Return the path of the feature set that is damaged; None if it is another part of the cache."""
    parts = damage.array.split("/")
    return "/".join(parts[:2]) if parts[0] in MODALITIES and len(parts) > 1 else None


def _imported(store: Store, path: str) -> bool:
    """Return whether a set was imported: its identity names files, where that of an encoder names weights."""
    return "files" in store.inspect_group(path)[0].get("identity", {})
