"""The generations of a cache: each is the samples of one manifest with their features, a Zarr hierarchy of its own.

The first lies in the cache's folder itself, number N in ``generations/N`` there. The group ``generations`` says which
is the current one. Without it there is only the first. A generation with a higher number than the current one is being
made. Numbers are not used again, since runs record them.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...errors import CacheError
from ...files import partials_in, remove
from .folder import GENERATIONS, home_of
from .lease import alone
from .store import Store

WORDS = "captions/words@"  # how the paths of sets begin whose vocabulary is that of a generation


@dataclass(frozen=True)
class Generation:
    """A generation of a cache."""

    number: int
    state: str  # ``current``, ``old``, or ``unfinished``: it is being made
    manifest_sha256: str  # of its samples
    images: int
    bytes: int  # of all its files, also of those that it shares with another


@dataclass(frozen=True)
class Freed:
    """What was freed: the numbers of generations, and the bytes that nothing else holds."""

    generations: tuple[int, ...]
    bytes: int
    lost: tuple[str, ...]  # ``images/NAME`` and ``captions/NAME`` of features that the current generation has not


def store_of(url: str, writer: str | None = None, generation: int | None = None) -> Store:
    """Return where a generation of the cache at `url` lies, or will lie.

    Args:
        url: of the cache; or ``CACHE/generations/N``, which names a generation.
        writer: that of the `Store`.
        generation: its number; None: that of the URL, else the current one.

    Raises:
        CacheError: what says which is the current one is damaged.
    """
    home, named = home_of(url)
    store = Store(home, writer)
    number = generation or named or current(store)
    return store if number == 1 else Store(f"{home}/{GENERATIONS}/{number}", writer)


def name_of(store: Store) -> str:
    """Return what a command names a generation by: the URL of its cache alone, if it is the current one."""
    home, number = home_of(store.url)
    return home if current(Store(home)) == (number or 1) else f"{home}/{GENERATIONS}/{number or 1}"


def is_outdated(store: Store) -> bool:
    """Return whether a generation is before the current one, and of other samples."""
    url, number = home_of(store.url)
    home, number = Store(url), number or 1
    return number < (now := current(home)) and manifest_of(home, number) != manifest_of(home, now)


def current(home: Store) -> int:
    """Return the number of the current generation; CacheError where what says so is damaged."""
    if not home.names(GENERATIONS):
        return 1
    number = home.read_group(GENERATIONS).get("current")
    if type(number) is not int or number < 1:
        raise CacheError(f"{home.url}/{GENERATIONS}/zarr.json is damaged: it names no generation; restore that file")
    return number


def numbers(home: Store) -> list[int]:
    """Return the numbers of the generations that are there, also of those that are being made."""
    return [number for number in [1, *_folders(home)] if _is_there(home, number)]


def require_generation(url: str, generation: int | None = None) -> None:
    """Raise CacheError if a cache does not have the generation that is named, or has it no longer.

    Args:
        url: of the cache, or ``CACHE/generations/N``.
        generation: its number; None: that of the URL.
    """
    url, named = home_of(url)
    number, home = generation or named, Store(url)
    if number is None:
        return
    there = numbers(home) or ([1] if home.exists("zarr.json") else [])  # a cache that was never finished has the first
    if there and number not in there:
        raise CacheError(
            f"{url} has no generation {number}, or it was freed; it has {', '.join(map(str, there))}: name one as"
            f" {url}/{GENERATIONS}/N"
        )


def _folders(home: Store) -> list[int]:
    return sorted(int(name) for name in home.names(GENERATIONS) if name.isdecimal())


def _is_there(home: Store, number: int) -> bool:
    group = _group(number)
    return home.exists(f"{group}/zarr.json".lstrip("/")) and not home.is_unfinished(group)


def _group(number: int) -> str:
    return "" if number == 1 else f"{GENERATIONS}/{number}"


def manifest_of(home: Store, number: int) -> str:
    """Return the digest of the samples of a generation; an empty text where it is damaged."""
    return str(home.inspect_group(_group(number))[0].get("manifest_sha256", ""))


def begin(store: Store) -> None:
    """Let the cache have generations, before one of them is written; the first is the current one."""
    home = Store(home_of(store.url)[0], store.writer)
    if not home.exists(f"{GENERATIONS}/zarr.json"):
        home.seal_group(GENERATIONS, {"current": 1}, [])


def require_later(store: Store) -> None:
    """Refuse a generation that is to become the current one, where another process made that one or a later one so."""
    url, number = home_of(store.url)
    if (number or 1) <= current(Store(url, store.writer)):
        raise CacheError(f"another process has updated {url} meanwhile; run it again")


def make_current(store: Store) -> None:
    """Make a generation the current one, in one step; then remove what else was begun and never became it.

    Raises:
        CacheError: it is no later one than the current one.
    """
    require_later(store)
    url, number = home_of(store.url)
    home = Store(url, store.writer)
    before = current(home)
    home.seal_group(GENERATIONS, {"current": number}, [])
    for other in _folders(home):
        if before < other != number:
            _free(home, other)


def generations(url: str) -> tuple[Generation, ...]:
    """Return the generations of the cache at `url`, by their numbers."""
    home = Store(home_of(url)[0])
    now = current(home)
    found = []
    for number in numbers(home):
        group = _group(number)
        attributes = home.inspect_group(group)[0]
        found.append(
            Generation(
                number,
                "current" if number == now else "old" if number < now else "unfinished",
                manifest_of(home, number),
                max((last for _, last in dict(attributes.get("splits", {})).values()), default=0),
                sum(home.size(part) for part in _parts(home, number)),
            )
        )
    return tuple(found)


def old(url: str) -> Freed:
    """Return what `free_old` would free; CacheError where no cache is."""
    home = Store(home_of(url)[0])
    if not home.exists("zarr.json"):
        raise CacheError(f"{home.url}: no feature cache is there; check the path")
    now = current(home)
    found = [number for number in [1, *_folders(home)] if number < now and (number > 1 or _parts(home, 1))]
    return Freed(tuple(found), _bytes_alone(home, found), _lost(home, found, now))


def _lost(home: Store, found: list[int], now: int) -> tuple[str, ...]:
    """Return the sets of some generations that the current one has not under the same fingerprint.

    Words are a matter of moments, and have another vocabulary in each.
    """
    there = _fingerprints(home, now)
    words = any(path.startswith(WORDS) for path in there)
    sets = {path: mark for number in found for path, mark in _fingerprints(home, number).items()}
    return tuple(
        path for path, mark in sets.items() if mark not in there.values() and not (words and path.startswith(WORDS))
    )


def _fingerprints(home: Store, number: int) -> dict[str, str]:
    """Return the fingerprints of the feature sets of a generation by their paths; one that is damaged has none."""
    group = _group(number)
    sets = [
        f"{modality}/{name}"
        for modality in ("images", "captions")
        for name in home.names(f"{group}/{modality}".lstrip("/"))
    ]
    found = {path: home.inspect_group(f"{group}/{path}".lstrip("/"))[0].get("fingerprint") for path in sets}
    return {path: mark for path, mark in found.items() if isinstance(mark, str)}


def free_old(url: str) -> Freed:
    """Delete all generations before the current one; one that is being made stays.

    Stopped at any moment, it leaves what can still be freed, and never half a generation that looks whole.

    Raises:
        CacheError: no cache is there, or another process is writing to it.
    """
    home = Store(home_of(url)[0])
    with alone(home):
        found = old(url)
        for number in found.generations:
            _free(home, number)
        if home.is_local:
            for partial in partials_in(Path(home.root)):  # what another such process left that was killed
                remove(partial)
    return found


def _free(home: Store, number: int) -> None:
    """Delete a generation; the first leaves a mark that it is gone, at which the cache is known."""
    if number != 1 and home.is_local:
        home.remove(_group(number))
        return
    home.start_group(_group(number))  # nothing below is valid from here on
    for part in _parts(home, number):
        home.remove(part)
    if number != 1:
        home.remove(_group(number))


def _parts(home: Store, number: int) -> list[str]:
    """Return what a generation consists of, but for the metadata that says that it is there."""
    group = _group(number)
    return [f"{group}/{name}".lstrip("/") for name in home.names(group) if name not in ("zarr.json", GENERATIONS)]


def _bytes_alone(home: Store, found: list[int]) -> int:
    """Return the bytes of the files of some generations, without those that have a name elsewhere as well."""
    parts = [part for number in found for part in _parts(home, number)]
    if not home.is_local:
        return sum(home.size(part) for part in parts)
    files = [path.stat() for part in parts for path in Path(home.path(part)).rglob("*") if path.is_file()]
    names = Counter(status.st_ino for status in files)
    return sum({one.st_ino: one.st_size for one in files if names[one.st_ino] == one.st_nlink}.values())
