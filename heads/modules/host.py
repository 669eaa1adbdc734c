"""What the host knows of tensors on a device, so that it need not wait for the device to tell it.

Lengths, orders and positives are made on the host. What is sent to a device carries the values that it was made from.
"""

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device, without waiting for it; `on_host` gives them back."""
    if device.type == "cpu":
        return values
    return known(values.pin_memory().to(device, non_blocking=True), values)


def known(values: Tensor, host: Tensor) -> Tensor:
    """Return a tensor of which `on_host` gives these values."""
    values.host = host  # type: ignore[attr-defined]
    return values


def on_host(values: Tensor) -> Tensor:
    """Return the values that a tensor was sent from; of any other a copy, for which the host waits."""
    found: Tensor | None = getattr(values, "host", None)
    return values.cpu() if found is None else found
