"""Features on their way from the device to the dtype of a set."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..device import start_reading
from ..encoders.threads import encoding
from ..errors import CacheError
from ..store.create import misfit


def stacked(pictures: list[Tensor], device: str) -> Tensor:
    """Return pixels [B,…] of the host; from pinned memory a GPU takes them while the host goes on."""
    if device == "cpu":
        return torch.stack(pictures)
    shape, dtype = (len(pictures), *pictures[0].shape), pictures[0].dtype
    return torch.stack(pictures, out=torch.empty(shape, dtype=dtype, pin_memory=True))


def begin_reading(values: Tensor, dtype: str) -> Callable[[list[str]], np.ndarray]:
    """Begin to bring features [n,…,C] from their device in the dtype of a set; what is returned waits for them.

    It takes the names of the n samples, and raises CacheError for the first that the dtype cannot hold. The device
    casts them and finds the peaks that are checked; for the host's threads that is nothing to wait for.
    """
    peaks = values.new_zeros(values.shape[:-1])
    if values.numel():  # on a CPU in a third of the time of `abs` and `amax`
        peaks = torch.maximum(values.amax(-1), -values.amin(-1))
    found, stored = start_reading(peaks), start_reading(values.to(getattr(torch, dtype)))

    def rows_where(mask: np.ndarray) -> np.ndarray:
        with encoding(str(values.device)):
            return values[torch.from_numpy(mask)].cpu().numpy()

    def read(names: list[str]) -> np.ndarray:
        check_range(found().numpy(), rows_where, dtype, names)
        return stored().numpy()

    return read


def check_range(
    peaks: np.ndarray, rows_where: Callable[[np.ndarray], np.ndarray], dtype: str, names: list[str]
) -> None:
    """Refuse samples that the dtype cannot hold; peaks [n,…] and rows are as `misfit` takes them."""
    finite = np.isfinite(peaks).reshape(len(peaks), -1).all(axis=1)
    if not finite.all():
        raise CacheError(f"'{names[int(finite.argmin())]}': the encoder gave NaN or infinity; check its weights")
    if (found := misfit(peaks, rows_where, dtype)) is not None:
        way = "extract with --dtype float32, or other --layers if the encoder has any"
        raise CacheError(f"'{names[found[0]]}': {found[1]}; {way}")
