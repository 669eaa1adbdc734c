"""The pictures that a feature set lacks, what was read of them, and processes that read them for a GPU."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from ..errors import CacheError, SampleError, XretError
from ..store.folder import drop_locks
from ..wording import reason


class Picture(NamedTuple):
    """A picture to encode: its row in the store, its file name and its id."""

    row: int
    name: str
    key: str


class Read(NamedTuple):
    """A picture that was read: as the network takes it, its size, what tells its file from others; or what is wrong."""

    decoded: Any = None
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    stamp: tuple[int, int] = (0, 0)
    error: SampleError | None = None


Batch = tuple[list[Picture], Iterable[Read]]  # pictures to encode, and what waits until they are read


def read_in_processes(
    batches: Iterator[list[Picture]], read: Callable[[Picture], Read], processes: int
) -> Iterator[Batch]:
    """Yield batches that forked processes have read; threads would wait for each other's turn of the interpreter."""
    ahead: deque[list[Picture]] = deque()

    def wanted() -> Iterator[list[Picture]]:
        for pictures in batches:
            ahead.append(pictures)
            yield pictures

    loader: DataLoader[Any] = DataLoader(
        _Pictures(read),
        batch_size=None,
        sampler=wanted(),
        num_workers=processes,
        multiprocessing_context="fork",
        worker_init_fn=lambda _: drop_locks(),
        generator=torch.Generator(),  # a seed is drawn from it, and not from the process's own
    )
    reading: Any = iter(loader)
    # Where a loader was ever made in the main thread, torch would raise a death there, wherever that thread is.
    _remove_worker_pids(id(reading))
    reading._worker_pids_set = False
    try:
        for found, pixels in reading:
            if isinstance(found, XretError):
                raise found
            left = iter(pixels)
            yield ahead.popleft(), [one._replace(decoded=next(left)) if one.decoded else one for one in found]
    except RuntimeError as error:  # torch says which one
        if str(error).startswith("Caught"):  # it lives, and has raised that itself
            raise
        raise CacheError(f"a process that reads pictures has died ({error}); run the same command again") from error
    finally:
        # Else whichever thread collects it after an error waits for them. One that is stopped as it reads may say so.
        with suppress(RuntimeError):
            reading._shutdown_workers()


class _Pictures(Dataset[Any]):
    """Batches of pictures: what was read, and the pixels of what was decoded [n,…] in shared memory."""

    def __init__(self, read: Callable[[Picture], Read]) -> None:
        self.read = read

    def __getitem__(self, wanted: Any) -> tuple[list[Read] | XretError, Tensor]:
        try:
            read = [self.read(one) for one in wanted]
            pixels = _shared([one.decoded for one in read if one.decoded is not None])
        except XretError as error:  # torch would raise it with a traceback in its words
            return error, torch.empty(0)
        return [one if one.decoded is None else one._replace(decoded=True) for one in read], pixels


def _shared(pixels: list[Tensor]) -> Tensor:
    """Return pixels [n,…] in shared memory; CacheError if it is too small: torch's queue would say so to nobody."""
    try:
        return torch.stack(pixels).share_memory_() if pixels else torch.empty(0)
    except RuntimeError as error:
        raise CacheError(
            f"the shared memory is too small for the pictures that are read ahead ({reason(error)}); give the container"
            " more, as by `docker run --shm-size 8g`, or take fewer --workers or a smaller --batch-size"
        ) from error
