"""Upkeep of a cache: a feature set is found by the beginning of its name, and removed."""

from ..errors import CacheError, nearest
from .feature_cache import FeatureCache
from .lease import alone


def choose_set(url: str, prefix: str, paths: list[str]) -> str:
    """Return the one feature set that `prefix` means.

    Args:
        url: where the sets are, for the message.
        prefix: what a set's name begins with, after ``images/`` or ``captions/`` if need be; an encoder's whole name
            goes before those that begin with it.
        paths: the sets there are, as ``images/NAME`` and ``captions/NAME``.

    Raises:
        CacheError: none or several fit; the message lists what is there.
    """
    modality, slash, begin = prefix.rpartition("/")
    names = {path: path.partition("/")[2] for path in paths if not slash or path.startswith(f"{modality}/")}
    fitting = [path for path, name in names.items() if begin and name.startswith(begin)]
    exact = [path for path in fitting if names[path].split("@")[0] == begin]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if fitting:
        raise CacheError(f"{url}: several feature sets fit '{prefix}': {', '.join(fitting)}; name one of them")
    there = f"; there: {', '.join(paths)}" if paths else "; there is none at all"
    raise CacheError(f"{url}: no feature set fits '{prefix}'{nearest(prefix, [*paths, *names.values()])}{there}")


def set_to_remove(url: str, prefix: str) -> tuple[str, int]:
    """Return the path of the feature set that `prefix` means, even of a damaged or half removed one, and its bytes.

    Raises:
        CacheError: no cache is there, or none or several of its sets fit.
    """
    cache = FeatureCache.open(url)
    paths = [f"{modality}/{name}" for modality in ("images", "captions") for name in cache.store.names(modality)]
    path = choose_set(url, prefix, [path for path in paths if not path.endswith("/zarr.json")])
    return path, cache.store.size(path)


def remove_set(url: str, prefix: str) -> tuple[str, int]:
    """Delete the feature set that `prefix` means; return its path and how many bytes it had.

    Stopped in between, what is left counts as unfinished: nobody reads it, and an extraction or another removal
    clears it away.

    Raises:
        CacheError: no cache is there, none or several of its sets fit, or another process is writing to it.
    """
    store = FeatureCache.open(url).store
    with alone(store):
        path, size = set_to_remove(url, prefix)
        store.start_group(path)
        for name in store.names(path):
            if name != "zarr.json":  # it says that the set is unfinished, and goes last
                store.remove(f"{path}/{name}")
        store.remove(path)
    return path, size
