"""What a process leaves that is killed between two operations on files, and functions that fail on the way."""

import os
import pkgutil
import shutil
from contextlib import contextmanager
from itertools import count

import pytest

_OPERATIONS = ("replace", "rename", "unlink", "rmdir", "mkdir")


@contextmanager
def left_by_kills(folder, copies):
    """Copy `folder` before each operation on files in the block, as a kill would leave it there; yield the copies.

    Of copies that are alike one is kept.
    """
    found, seen, at_work = [], set(), []

    def before(operation):
        def run(*arguments, **named):
            if not at_work and (folder / "run.json").exists():
                at_work.append(True)
                files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".partial"]
                content = tuple((str(path.relative_to(folder)), path.read_bytes()) for path in files)
                if content not in seen:
                    seen.add(content)
                    found.append(shutil.copytree(folder, copies / str(len(found))))
                at_work.clear()
            return operation(*arguments, **named)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in _OPERATIONS:
            patch.setattr(os, name, before(getattr(os, name)))
        yield found


@contextmanager
def failing_at(name, call):
    """Let the function of a dotted name fail the so-manieth time that it is called in the block."""
    real, calls = pkgutil.resolve_name(name), count(1)

    def failing(*arguments, **options):
        if next(calls) == call:
            raise RuntimeError("stopped")
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, failing)
        yield
