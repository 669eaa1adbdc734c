"""A frozen network's pass over a batch as a CUDA graph, which the host launches at once.

Operation by operation it would launch some hundreds a batch, each time with the interpreter's lock, for which threads
that read pictures wait as well. Source: PyTorch's documentation, "CUDA Graphs" in "CUDA semantics".
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Pass: TypeAlias = Callable[[Tensor, Sequence[Hashable]], list[tuple[Tensor, Tensor]]]


class Captured:
    """Repeats a pass over batches on a GPU: the largest batch that comes again is captured, and replayed from then on.

    Batches of another shape or dtype, or for other layers, run operation by operation; so do all of a network that asks
    its device for values, and where the memory does not suffice for both. The network's weights stay in their place.
    Calls are made in inference mode.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()  # of the graph's memory
        self._seen: set[tuple[torch.Size, torch.dtype, tuple[Hashable, ...]]] = set()  # until one comes again
        self._captured: Hashable = None  # what it was
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pixels: Tensor  # what the graph reads
        self._found: list[tuple[Tensor, Tensor]]  # and where it writes

    def __call__(
        self, run: Pass, pixels: Tensor, layers: Sequence[Hashable], device: str
    ) -> list[tuple[Tensor, Tensor]]:
        """Return what `run` makes of pixels [B,3,H,W] and layers; a call may keep it, also after the next one."""
        with self._turn:
            what = pixels.shape, pixels.dtype, tuple(layers)
            if self._captured is None:
                if what in self._seen and all(len(pixels) >= shape[0] for shape, *_ in self._seen):
                    self._captured = what
                    self._capture(run, pixels, layers, torch.device(device))
                self._seen.add(what)
            if self._graph is None or what != self._captured:
                return run(pixels, layers)
            self._pixels.copy_(pixels, non_blocking=True)
            self._graph.replay()
            return [(local.clone(), global_.clone()) for local, global_ in self._found]

    def _capture(self, run: Pass, pixels: Tensor, layers: Sequence[Hashable], device: torch.device) -> None:
        if torch.cuda.mem_get_info(device)[0] < torch.cuda.memory_reserved(device):
            return  # a graph keeps its memory beside that of other batches
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        still = torch.empty_like(pixels, device=device, memory_format=torch.contiguous_format).copy_(pixels)
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            # This puts back the thread's stream; `graph` does not where it fails.
            with torch.cuda.stream(side):
                _require_silent(run, still, layers)
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    found = run(still, layers)
        except RuntimeError:
            torch.cuda.synchronize(device)
            return
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph, self._pixels, self._found = graph, still, found


def _require_silent(run: Pass, pixels: Tensor, layers: Sequence[Hashable]) -> None:
    """Run a pass, which fills libraries' caches, too; RuntimeError if it waits for the device.

    A capture would fail in the middle there; before 2.12, torch's allocator believes after that that it goes on.
    """
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(pixels, layers)
    finally:
        torch.cuda.set_sync_debug_mode(before)
