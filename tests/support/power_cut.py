"""What a disk may hold after a power failure, at any moment of a program's work in a folder.

`recorded` watches the calls that a program makes of the system: new folders, renames, removals and syncs. `Log.cut`
makes the folder anew as a disk may legally have it after the first so many of them:

- what was synced is there: of a file its bytes, of a folder its names;
- of the names that changed since, each change is there or not, by chance;
- of the bytes that were never synced, all are there, or a beginning, or zeros, or none.
"""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch


@dataclass(eq=False)
class File:
    """A file: its bytes as they were last seen, and as they were last synced."""

    latest: bytes
    synced: bytes | None = None

    def after_cut(self, dice: random.Random) -> bytes:
        """Return the bytes that a disk may have."""
        if self.synced is not None:
            return self.synced
        cut = dice.randrange(len(self.latest) + 1)
        return dice.choice([b"", self.latest[:cut], self.latest[:cut].ljust(len(self.latest), b"\0"), self.latest])


@dataclass(eq=False)
class Folder:
    """A folder: its names as they were last synced, and every change since; None as what a name stands for: gone."""

    synced: "dict[str, File | Folder]" = field(default_factory=dict)
    changes: "list[dict[str, File | Folder | None]]" = field(default_factory=list)

    def names(self, dice: random.Random | None = None) -> "dict[str, File | Folder]":
        """Return what the names stand for: now, or with `dice` as a disk may have them."""
        found: dict[str, File | Folder | None] = dict(self.synced)
        for change in self.changes:
            if dice is None or dice.random() < 0.5:
                found |= change
        return {name: node for name, node in found.items() if node is not None}

    def write(self, place: Path, dice: random.Random) -> None:
        """Make the folder at `place` as a disk may have it."""
        place.mkdir()
        for name, node in self.names(dice).items():
            if isinstance(node, Folder):
                node.write(place / name, dice)
            else:
                (place / name).write_bytes(node.after_cut(dice))


class Log:
    """What was called, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.start = _tree(self.root, synced=True)
        self.events: list[tuple[str, tuple[str, ...], tuple[str, ...], File | Folder | None]] = []

    def __len__(self) -> int:
        return len(self.events)

    def cut(self, place: Path, dice: random.Random, after: int | None = None) -> int:
        """Make the folder at `place` as a disk may have it after so many events, by default any; return how many."""
        after = dice.randrange(len(self) + 1) if after is None else after
        self._replay(after).write(place, dice)
        return after

    def all_synced(self, place: Path) -> None:
        """Make the folder at `place` as it is if nothing is kept that was never synced."""
        never = random.Random()
        never.random = lambda: 1.0  # type: ignore[method-assign]
        self._replay(len(self)).write(place, never)

    def _replay(self, count: int) -> Folder:
        root = _copy(self.start)
        for kind, source, target, seen in self.events[:count]:
            node = _copy(seen)
            if kind == "sync file":
                self._sync_file(root, source, node)
            elif kind == "sync folder":
                folder = _at(root, source)
                folder.synced, folder.changes = folder.names(), []
            elif kind == "mkdir":
                _at(root, source[:-1]).changes.append({source[-1]: Folder()})
            elif kind == "remove":
                _at(root, source[:-1]).changes.append({source[-1]: None})
            else:
                self._rename(root, source, target, node)
        return root

    def _sync_file(self, root: Folder, path: tuple[str, ...], seen: File) -> None:
        folder = _at(root, path[:-1])
        known = folder.names().get(path[-1])
        if known is None:
            folder.changes.append({path[-1]: seen})
            known = seen
        known.latest = known.synced = seen.latest

    def _rename(self, root: Folder, source: tuple[str, ...], target: tuple[str, ...], seen: "File | Folder") -> None:
        before, after = _at(root, source[:-1]), _at(root, target[:-1])
        node = _joined(before.names().get(source[-1]), seen)
        if before is after:
            after.changes.append({source[-1]: None, target[-1]: node})
        else:
            before.changes.append({source[-1]: None})
            after.changes.append({target[-1]: node})


@contextmanager
def recorded(root: Path) -> Iterator[Log]:
    """Record what is done below the existing folder `root` meanwhile, by any thread of this process."""
    log, lock = Log(root), threading.RLock()

    def below(path: object, folder: int | None = None) -> tuple[str, ...] | None:
        at = (
            Path(Path(f"/proc/self/fd/{folder}").readlink(), os.fspath(path)) if folder is not None else Path(str(path))
        )
        at = at.parent.resolve() / at.name
        return at.relative_to(log.root).parts if at.is_relative_to(log.root) else None

    def watched(kind: str, call, after):
        def act(path, *more, **options):
            with lock:
                source = below(path, options.get("dir_fd"))
                target = below(more[0]) if kind == "rename" and more else ()
                seen = _tree(log.root.joinpath(*source)) if kind == "rename" and source is not None else None
                result = call(path, *more, **options)
                if source is not None and target is not None:
                    log.events.append((after, source, target, seen))
                return result

        return act

    sync = os.fsync

    def fsync(handle: int) -> None:
        with lock:
            sync(handle)
            path = Path(f"/proc/self/fd/{handle}").readlink()
            if path == log.root or path.is_relative_to(log.root):
                parts = path.relative_to(log.root).parts
                kind, seen = ("sync folder", None) if path.is_dir() else ("sync file", File(path.read_bytes()))
                log.events.append((kind, parts, (), seen))

    calls = {"replace": "rename", "rename": "rename", "mkdir": "mkdir"}
    calls |= {"unlink": "remove", "remove": "remove", "rmdir": "remove"}
    with ExitStack() as patches:
        for name, kind in calls.items():
            patches.enter_context(patch.object(os, name, watched(kind, getattr(os, name), kind)))
        patches.enter_context(patch.object(os, "fsync", fsync))
        yield log


def _tree(path: Path, synced: bool = False) -> File | Folder:
    if path.is_dir():
        return Folder({below.name: _tree(below, synced) for below in path.iterdir()})
    data = path.read_bytes()
    return File(data, data if synced else None)


def _copy(node: File | Folder | None) -> "File | Folder | None":
    """Return a copy, since a replay changes it."""
    if isinstance(node, Folder):
        return Folder({name: _copy(below) for name, below in node.synced.items()})
    return None if node is None else File(node.latest, node.synced)


def _joined(known: "File | Folder | None", seen: "File | Folder") -> "File | Folder":
    """Return what is known of a node, with what was seen of it when it was renamed and is not known yet."""
    if known is None or isinstance(known, File):
        if isinstance(known, File) and isinstance(seen, File) and seen.latest == known.latest:
            return known
        return seen
    names = known.names()
    for name, below in seen.synced.items():
        node = _joined(names.get(name), below)
        if node is not names.get(name):
            known.changes.append({name: node})
    return known


def _at(root: Folder, path: tuple[str, ...]) -> Folder:
    folder = root
    for name in path:
        folder = folder.names()[name]
    return folder
