"""Looks through a pickle before it is read, without running it."""

import pickletools
import zipfile
from pathlib import Path
from typing import IO

_MOST = 100_000_000  # values in tuples, each as often as it is referred to
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_HASHED = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ"}  # what may be a key: tuples, and what they make


def require_modest(file: IO[bytes]) -> None:
    """Refuse the pickle at which `file` stands if its tuples hold one another too often; then it stands after it.

    Who looks a key up asks all that is in it for its hash, however often the same tuple is in it: thirty tuples, each
    twice in the next one, keep a reader busy for minutes, fifty for years.

    Raises:
        ValueError: so it is, or this is no pickle.
    """
    stack: list[int] = []  # how many values each object holds
    marks: list[int] = []
    memo: dict[int, int] = {}
    held = 0
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in _PUTS:
            memo[len(memo) if argument is None else int(argument)] = _last(stack)
        elif opcode.name == "MARK":
            marks.append(len(stack))
        else:
            taken = _take(stack, marks, opcode)
            size = memo.get(argument or 0, 1) if opcode.name in _GETS else 1
            if opcode.name in _HASHED:
                size += sum(taken)
            stack += [size] * len(opcode.stack_after)
            held += size
        if held > _MOST:
            raise ValueError("its tuples hold one another too often")


def require_stored(path: Path) -> None:
    """Raise ValueError if a zip archive is not as torch writes it: packed, larger than the file, or with a bomb."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("torch does not write this")
        if sum(part.file_size for part in parts) > path.stat().st_size:
            raise ValueError("the archive was cut off")
        for part in parts:
            if part.filename.endswith(".pkl"):
                with archive.open(part) as opened:
                    require_modest(opened)


def _take(stack: list[int], marks: list[int], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Take from the stack what an operation takes: so many objects, and perhaps all since the last mark."""
    before = opcode.stack_before
    first = len(stack) - len(before)
    if pickletools.markobject in before:
        first = (marks.pop() if marks else -1) - before.index(pickletools.markobject)
    if first < 0:
        raise ValueError("it takes what is not there")
    taken = stack[first:]
    del stack[first:]
    return taken


def _last(stack: list[int]) -> int:
    if not stack:
        raise ValueError("it keeps what is not there")
    return stack[-1]
