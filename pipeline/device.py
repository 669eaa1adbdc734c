"""Where to compute: the one reading of ``--device``."""

import torch

from .errors import DeviceError


def pick_device(name: str) -> torch.device:
    """Return the device for ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        DeviceError: no such device is here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"there is no device '{name}'; take auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device '{name}' is not here: torch sees {torch.cuda.device_count()} GPUs; take --device cpu"
        )
    return device
