"""Weights: read from a file, downloaded or drawn at random, put into a network that they must fit, and hashed."""

import hashlib
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from ..errors import EncoderError, nearest
from .spec import EncoderSpec

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum


def seed_or_file(spec: EncoderSpec) -> int | Path | None:
    """Return the seed of ``random:SEED`` or the path of a file of weights; None: the published ones."""
    if spec.weights is None:
        return None
    if seed := re.fullmatch(r"random:(\d{1,18})", spec.weights):
        return int(seed[1])
    if Path(spec.weights).is_file():
        return Path(spec.weights)
    hint = nearest(spec.weights, ["imagenet", "random:0"])
    raise EncoderError(f"weights '{spec.weights}' are no file, nor 'imagenet' or 'random:SEED'{hint}")


def load_network(
    spec: EncoderSpec, build: Callable[[], nn.Module], run: Callable[[Any], Any], published: "WeightsEnum | None"
) -> tuple[str, Any]:
    """Build a network of torchvision's on the CPU and fill it; return its weights' entry in an identity, and itself.

    Random weights get the statistics of their batch norms by `settle_norms`, while `run` runs the network; `published`
    are the weights if the spec names none. EncoderError: the weights cannot be obtained, or do not fit.
    """
    source = seed_or_file(spec)
    if isinstance(source, int):
        torch.default_generator.manual_seed(source)
        network = build()
        settle_norms(network, lambda: run(network))
        return f"random:{source}", network
    state = _fetch(published, spec) if source is None else read_weights(source, spec.trust)
    network = build()
    load_strictly(network, state, spec)
    return digest(network.state_dict()), network


def _fetch(published: "WeightsEnum | None", spec: EncoderSpec) -> dict[str, Tensor]:
    if published is None:
        raise EncoderError(f"torchvision has no ImageNet weights of {spec.name}; give a file of weights")
    try:
        with redirect_stdout(sys.stderr):  # torch announces a download; standard output is for results
            return dict(published.get_state_dict(progress=sys.stderr.isatty(), check_hash=True))
    except (OSError, RuntimeError) as error:
        cached = Path(torch.hub.get_dir(), "checkpoints", published.url.rpartition("/")[2])
        raise EncoderError(
            f"the {published.name} weights of {spec.name} cannot be fetched ({error}); download {published.url}"
            f" elsewhere and give it as --visual-weights FILE, or put it at {cached}"
        ) from error


def read_weights(path: Path, trust: bool = False) -> dict[str, Tensor]:
    """Read a state dict from a ``.safetensors`` file or from a file that `torch.save` wrote.

    In the latter it may lie under ``state_dict`` or ``model``, its names may begin with ``module.``, as `DataParallel`
    leaves them, and it may be one of several by name (``base``, ``top``), which become prefixes.

    With `trust` pickles are read, too, which can run any code, and whose arrays may be numpy's. EncoderError: the file
    cannot be read, is no file of weights, or holds objects without `trust`.
    """
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _unpickle(path, trust)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise EncoderError(f"{path}: the weights cannot be read: {error.strerror}") from error
    except Exception as error:  # torch raises anything on damage
        if isinstance(error, pickle.UnpicklingError) and not trust:
            raise EncoderError(
                f"{path} is damaged, or holds pickled objects, which could run code; save its state dict alone as"
                " .safetensors, or give --trust if you know where it comes from"
            ) from error
        raise EncoderError(
            f"{path} is no file of weights (.pth, .pt, .safetensors), or damaged; get it again"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    flat = dict(_flat(content)) if isinstance(content, Mapping) else {}
    if not any(isinstance(value, Tensor) for value in flat.values()):
        raise EncoderError(f"{path}: there are no named weights in it; give a file with a network's state dict")
    return flat


def _unpickle(path: Path, trust: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickle protocols that nothing here depends on
        try:
            return torch.load(path, map_location="cpu", weights_only=not trust, encoding="latin1")
        except RuntimeError:  # not written by torch
            if not trust:
                raise
        with path.open("rb") as file:
            return pickle.load(file, encoding="latin1")  # as Python 2 wrote arrays


def _flat(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values; those of a state dict inside are named after it, too."""
    for name, value in content.items():
        short = name.removeprefix("module.") if isinstance(name, str) else ""
        if isinstance(value, Mapping):
            yield from ((f"{short}.{inner}", value) for inner, value in _flat(value))
        elif short:
            numbers = isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
            yield short, torch.from_numpy(value.copy()) if numbers else value


_AUXILIARY = re.compile(r"(aux\d|AuxLogits)\.")  # classifiers of GoogLeNet and Inception v3, for training only
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)")  # ``norm.1`` for ``norm1``


def load_strictly(network: nn.Module, weights: Mapping[str, Any], spec: EncoderSpec) -> None:
    """Copy `weights` into `network`; all its names and shapes must be there, and no others: see `require_fit`."""
    state = {_OLD_DENSENET.sub(r"\1\2", key): value for key, value in weights.items() if not _AUXILIARY.match(key)}
    own = network.state_dict()
    require_fit(own, state, spec)
    # Into its own: some networks refuse weights without the version of their layout, which safetensors cannot hold.
    own.update(state)
    network.load_state_dict(own)


def require_fit(
    expected: Mapping[str, Tensor], weights: Mapping[str, Any], spec: EncoderSpec, optional: Collection[str] = ()
) -> None:
    """Raise EncoderError unless weights have the names and shapes of the expected ones.

    Names in `optional` may be missing, and so may counters of batches, which old files lack.
    """
    shapes = {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)}
    kinds = {
        "missing": [n for n in expected if not (n in weights or n in optional or n.endswith("num_batches_tracked"))],
        "unknown": [name for name in weights if name not in expected],
        "of another shape": [
            f"{name} ({shapes.get(name)} in place of {list(value.shape)})"
            for name, value in expected.items()
            if name in weights and shapes.get(name) != list(value.shape)
        ],
    }
    if faults := misfits(kinds):
        raise EncoderError(f"{spec.source}: these weights do not fit '{spec.name}': {faults}; give its own weights")


def misfits(kinds: Mapping[str, list[str]]) -> str:
    """Return how many names there are of each kind of fault, and the first three; empty where there are none."""
    return "; ".join(
        f"{len(names)} {what} ({', '.join([*names[:3], *(['…'] if len(names) > 3 else [])])})"
        for what, names in kinds.items()
        if names
    )


def require_finite(network: nn.Module, what: str) -> None:
    """Raise EncoderError if the weights of a network, which a message calls `what`, hold NaN or infinity."""
    buffers = dict(network.named_buffers())
    for name, value in network.state_dict().items():
        # A buffer may begin with infinity, as a bound that nothing has reached yet.
        if bool((value.isnan() if name in buffers else ~value.isfinite()).any()):
            raise EncoderError(f"{what}: {name} holds NaN or infinity; get the model again")


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 in hexadecimal of names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def autocast(device: str, half: bool) -> torch.autocast:
    """Let a GPU multiply matrices in bfloat16 if `half`; a CPU always computes in float32."""
    kind = device.partition(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=half and kind == "cuda")


def settle_norms(network: nn.Module, run: Callable[[], Any]) -> None:
    """Give the batch norms of a network the statistics that they see while `run` runs it; it stays in eval mode.

    Without that, the features of random weights grow or vanish from layer to layer.
    """
    norms = [module for module in network.eval().modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    if norms:
        with torch.inference_mode():
            run()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.zero_()


def noise_images(count: int, image_size: int) -> Tensor:
    """Draw images [count, 3, S, S] in 0..1, each with its own mixture of shades, shapes, edges and grain.

    With images of one smoothness, features of photographs or flat drawings grow from layer to layer, up to thousands.
    """
    weights = torch.rand(count, 4, 1, 1, 1) ** 3
    weights /= weights.square().sum(1, keepdim=True).sqrt()

    def noise(channels: int) -> Tensor:
        fields = [torch.randn(count, channels, side, side) for side in (1, 4, 16, 64)]
        scaled = [functional.interpolate(field, (image_size, image_size), mode="bilinear") for field in fields]
        return (weights * torch.stack(scaled, 1)).sum(1)

    return torch.sigmoid(4 * (noise(1) + 0.6 * noise(3)))


def noise(shape: tuple[int, int]) -> Tensor:
    """Return pixels of nothing, float32 [1,3,H,W], always the same, to try a network with."""
    return torch.linspace(-1, 1, 3 * shape[0] * shape[1]).view(1, 3, *shape)
