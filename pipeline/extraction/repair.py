"""What to do about damaged shards and failed samples, as commands to run."""

from shlex import quote
from typing import Any

from ..cache.store import Store
from ..data.manifest import bundled_manifests


def remedies(url: str, report: dict[str, Any]) -> list[str]:
    """Return what mends the damage, and tries what failed again, a line each; none for a sound store.

    Args:
        url: the cache.
        report: what `verify.verify` tells of it.
    """
    store = Store(url)
    damaged = report["damaged"]
    if any(damage["array"] == "/" for damage in damaged):
        return [f"restore {url}/zarr.json from a copy, or extract into another --store"]
    again = f"`{repair_command(store.inspect_group('')[0]['dataset'], url)}`"
    to_remove = {_set(damage): None for damage in damaged if _is_set(damage) and not _can_be_repaired(store, damage)}
    lines = [f"run `xret cache rm {quote(url)} {path}`, then extract or import that set again" for path in to_remove]
    if any(_set(damage) not in to_remove for damage in damaged):
        lines.append(f"run {again}, with the other options of that extraction: it computes what is damaged again")
    elif report["failed_samples"] and any(
        "@" in name and not _imported(store, f"images/{name}") for name in store.names("images")
    ):
        lines.append(f"mend the files of the failed samples and run {again}, with the other options of that extraction")
    return lines


def repair_command(dataset: str, url: str) -> str:
    """Return the command that computes damaged and failed parts of an extraction again.

    Args:
        dataset: a manifest's name or path; of a name that is not bundled, only the user knows the path.
        url: the cache.
    """
    is_known = dataset in bundled_manifests() or dataset.endswith((".yaml", ".yml"))
    return f"xret extract {quote(dataset if is_known else f'{dataset}.yaml')} --store {quote(url)} … --repair"


def _is_set(damage: dict[str, Any]) -> bool:
    return damage["array"].startswith(("images/", "captions/"))


def _set(damage: dict[str, Any]) -> str:
    return "/".join(damage["array"].split("/")[:2])


def _can_be_repaired(store: Store, damage: dict[str, Any]) -> bool:
    return damage["shard"] is not None and not _imported(store, _set(damage))


def _imported(store: Store, path: str) -> bool:
    """Return whether a set was imported: its identity names files, where that of an encoder names weights."""
    return "files" in store.inspect_group(path)[0].get("identity", {})
