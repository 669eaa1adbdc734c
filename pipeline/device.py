"""The device to compute on, from ``--device``, and what to say when its memory is too small."""

import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import DeviceError, OutOfMemory

CGROUP = Path("/sys/fs/cgroup")  # where Linux says what a container may use
OWN_GROUPS = Path("/proc/self/cgroup")  # and in which of its groups this process is
_GENERATORS = threading.RLock()
_STACK: ContextVar[tuple[Sequence[torch.Generator], Sequence[int] | None] | None] = ContextVar("stack", default=None)
_NO_HOST_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Storage size calculation overflowed")
_NO_DEVICE_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # where torch itself does not allocate


def pick_device(name: str) -> torch.device:
    """Return the device for ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:1``, or raise DeviceError.

    From then on torch has no more threads than this process may use cores, unless OMP_NUM_THREADS says how many.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores():
        torch.set_num_threads(cores())
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    gpu = re.fullmatch(r"cuda(?::(0|[1-9][0-9]*))?", name)
    if gpu is None:
        raise DeviceError(f"there is no device '{name}'; take auto, cpu, cuda or cuda:NUMBER")
    if int(gpu[1] or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device '{name}' is missing: torch sees {torch.cuda.device_count()} GPUs; take --device cpu")
    # cuBLAS repeats its sums in one order only if this is set when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(name)


def may_wait(tensor: Tensor) -> bool:
    """Return whether shapes may follow from a tensor's values: a GPU is not waited for, and a traced graph has none.

    Nor has `torch.vmap`, by which several heads are computed at once.
    """
    return tensor.is_cpu and not torch.compiler.is_compiling() and not stacked()


def stacked() -> bool:
    """Return whether several heads are computed at once, see `stacking`."""
    return _STACK.get() is not None


@contextmanager
def stacking(generators: Sequence[torch.Generator], of_cell: Sequence[int] | None) -> Iterator[None]:
    """Compute several heads at once by `torch.vmap`; each draws from the generator with its number, None: the first."""
    token = _STACK.set((generators, of_cell))
    try:
        yield
    finally:
        _STACK.reset(token)


class DrawnLots(torch.autograd.Function):
    """Lots of 64 bits for so many values of each of several heads, drawn by the generators of `stacking`."""

    generate_vmap_rule = False

    @staticmethod
    def forward(like: Tensor, number: int) -> Tensor:
        """Draw for values that all heads have in common."""
        ((generator, *_), _) = _STACK.get() or ((None,), None)
        return draw_lots(number, like.device, (generator,))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Lots have no gradient."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], like: Tensor, number: int) -> tuple[Tensor, int | None]:
        """Draw once for each generator: heads of one seed draw the same."""
        generators, of_cell = _STACK.get() or ((), None)
        lots = draw_lots(number, like.device, generators)
        return (lots[0], None) if of_cell is None else (torch.stack([lots[place] for place in of_cell]), 0)


def draw_lots(number: int, device: torch.device, generators: Sequence[torch.Generator | None] = (None,)) -> Tensor:
    """Draw so many numbers of 64 bits, all alike, by each generator: int64 ``[generators, number]``."""
    lots = torch.empty(len(generators), number, dtype=torch.int64, device=device)
    for row, generator in zip(lots, generators, strict=True):
        row.random_(-(1 << 63), None, generator=generator)
    return lots


def cores() -> int:
    """Return how many cores this process may use, also within a container's quota or a job of SLURM."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [math.ceil(share) for share in _quotas() if share > 0]
    if (of_job := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
        limits.append(int(of_job))
    return max(1, min(count, *limits)) if limits else count


def _quotas() -> Iterator[float]:
    """Yield the cores that each control group of this process allows, of version 2 or 1 of Linux's; below 0: all."""
    try:
        groups = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:  # not Linux
        groups = []
    paths = [("cpu" if kinds else "", path) for _, kinds, path in groups if not kinds or "cpu" in kinds.split(",")]
    for kind, path in [*paths, ("", "/"), ("cpu", "/")]:  # a container may not see its own path, but its root
        place = PurePosixPath(path)
        for group in (place, *place.parents):
            folder = CGROUP / kind / str(group).lstrip("/")
            with suppress(OSError, ValueError):
                if kind:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                yield int(quota) / int(period)  # `max`, without a quota, is no number


@contextmanager
def within_memory(
    device: torch.device,
    what: str = "what is computed",
    remedy: str = "take a smaller split or folder of pictures, or a device with more memory",
) -> Iterator[None]:
    """Raise OutOfMemory, with what to do, where the memory of `device` or of the host is too small for `what`."""
    try:
        yield
    except RuntimeError as error:
        on_host = any(words in str(error) for words in _NO_HOST_MEMORY)
        on_device = any(words in str(error) for words in _NO_DEVICE_MEMORY)
        if not (on_host or on_device or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise OutOfMemory(f"{what} does not fit in the memory of {'cpu' if on_host else device}; {remedy}") from error


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let a GPU repeat its sums in one order; a CPU with a fixed number of threads does so anyway, busy or not."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is a property that mypy does not see
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # nothing reads it, and a batch's buffers are large
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills


@contextmanager
def drawing(device: torch.device, *seed: int) -> Iterator[None]:
    """Let torch draw from generators that begin with `seed`; afterwards they are as they were.

    torch has one generator for each device of a process. So one thread at a time is in such a block.
    """
    number = seed[0] if len(seed) == 1 else int(np.random.SeedSequence(seed).generate_state(1)[0])
    with _GENERATORS, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
        yield


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device, without waiting for it; `on_host` gives them back.

    RuntimeError while a CUDA graph is recorded, which would repeat these values with every batch.
    """
    if device.type == "cpu":
        return values
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("values of the host are sent while a CUDA graph is recorded")
    return known(values.pin_memory().to(device, non_blocking=True), values)


def known(values: Tensor, host: Tensor) -> Tensor:
    """Return a tensor of which `on_host` gives these values."""
    values.host = host  # type: ignore[attr-defined]
    return values


def on_host(values: Tensor) -> Tensor:
    """Return the values that a tensor was sent from; of any other a copy, for which the host waits."""
    host: Tensor | None = getattr(values, "host", None)
    return values.cpu() if host is None else host


def start_reading(values: Tensor) -> Callable[[], Tensor]:
    """Begin to copy values to the host; what is returned waits for them, but for no later work of the GPU."""
    if not values.is_cuda:
        return lambda: values
    # Waiting for a blocking event leaves the core to others.
    host, there = values.to("cpu", non_blocking=True), torch.cuda.Event(blocking=True)
    there.record(torch.cuda.current_stream(values.device))

    def read() -> Tensor:
        there.synchronize()
        return host

    return read


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies in the host's memory; from a GPU they come together, into pinned memory, which torch uses again."""
    copied = [tensor.detach().to("cpu", non_blocking=True, copy=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copied


def to_host(local: Tensor, global_: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return features as arrays; from a GPU both come at once, into pinned memory, which torch uses again later."""
    rows, whole = start_reading(local), start_reading(global_)
    return rows().numpy(), whole().numpy()
