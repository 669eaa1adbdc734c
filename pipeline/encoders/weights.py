"""Weights: read from a file, downloaded or drawn at random, put into a network that they must fit, and hashed."""

import hashlib
import io
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from ..errors import EncoderError, nearest
from .pickles import require_modest, require_stored

_DEEPEST, _MOST_ENTRIES = 16, 10_000_000  # of mappings inside one another, in all of them
_PICKLES = 5  # at the beginning of a file of torch's before 1.6

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum


def load_network(
    weights: str,
    trust: bool,
    *,
    build: Callable[[], nn.Module],
    settle: Callable[[nn.Module], None],
    published: "WeightsEnum | None",
    what: str,
) -> tuple[str, Any]:
    """Build a network of torchvision's on the CPU and fill it; return its weights' entry in an identity, and itself.

    Args:
        weights, trust: as of `registry.load_visual`.
        build: makes the network; its own weights are random.
        settle: gives random weights the statistics of their batch norms, by `settle_norms`.
        published: the weights that ``imagenet`` stands for; None: there are none.
        what: how a message calls them.

    Raises:
        EncoderError: the weights cannot be obtained, or do not fit.
    """
    if weights == "imagenet":
        if published is None:
            raise EncoderError(f"torchvision has no {what}; give a file of weights")
        origin, state = what, fetch(published, what)
    elif isinstance(source := seed_or_file(weights, imagenet=True), int):
        with seeded(source):
            network = build()
            settle(network)
        return f"random:{source}", network
    else:
        origin, state = weights, read_weights(source, trust)
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights, which are replaced
        network = build()
    load_strictly(network, state, origin)
    return digest(network.state_dict()), network


def read_weights(path: Path, trust: bool = False) -> dict[str, Tensor]:
    """Read a state dict from a ``.safetensors`` file or from a file that `torch.save` wrote.

    In the latter it may lie under ``state_dict`` or ``model``, its names may begin with ``module.``, as
    `DataParallel` leaves them, and it may be one of several by name (``base``, ``top``), which become prefixes.

    With `trust` also pickles are read, whose arrays may be numpy's. A pickle can run any code while it is read;
    without `trust` nothing in the file is ever executed.

    Raises:
        EncoderError: the file cannot be read, holds more than tensors and plain values, or no state dict.
    """
    damaged = f"{path}: this is not a file of weights (.pth, .pt, .safetensors), or it is damaged; get it again"
    content = _read(path, trust, damaged)
    if not _is_modest(content):
        raise EncoderError(damaged)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    flat = dict(_flat(content)) if isinstance(content, Mapping) else {}
    if not any(isinstance(value, Tensor) for value in flat.values()):
        raise EncoderError(f"{path}: there are no named weights in it; give a file with a network's state dict")
    if not all(_is_plain(value) for value in flat.values() if isinstance(value, Tensor)):
        raise EncoderError(damaged)
    return flat


def seed_or_file(weights: str, *, imagenet: bool) -> int | Path:
    """Return the seed of ``random:SEED``, or the path of a file of weights.

    Raises:
        EncoderError: they are neither; the message offers ``imagenet`` as well if `imagenet` says so.
    """
    if seed := re.fullmatch(r"random:(\d{1,18})", weights):
        return int(seed[1])
    if Path(weights).is_file():
        return Path(weights)
    known, either = (["imagenet", "random:0"], "'imagenet', nor ") if imagenet else (["random:0"], "")
    raise EncoderError(
        f"weights '{weights}': this is neither {either}an existing file nor 'random:SEED' with a whole number"
        f"{nearest(weights, known)}; give one of them as --visual-weights"
    )


def _is_modest(content: Any) -> bool:
    """Return whether the mappings in a file, each as often as it is referred to, are few enough to be looked through.

    A pickle may let one be in itself, or twice in each of a long chain.
    """
    level, entries = [content], 0
    for _ in range(_DEEPEST):
        level = [one for one in level if isinstance(one, Mapping)]
        entries += sum(map(len, level))
        if not level or entries > _MOST_ENTRIES:
            return not level
        level = [value for one in level for value in one.values()]
    return False


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers are all in its memory: a file can make large ones of a few bytes."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _flat(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values; those of a state dict inside are named after it, too."""
    for name, value in content.items():
        short = name.removeprefix("module.") if isinstance(name, str) else ""
        if isinstance(value, Mapping):
            yield from ((f"{short}.{inner}", value) for inner, value in _flat(value))
        elif short:
            yield short, _tensor(value) if isinstance(value, np.ndarray) else value


def _tensor(array: np.ndarray) -> Tensor | np.ndarray:
    """Return an array as a tensor; one of texts or objects as it is."""
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):
        return array


def _read(path: Path, trust: bool, damaged: str) -> Any:
    try:
        with path.open("rb") as file:
            start = file.read(1)
        if path.suffix == ".safetensors":
            return load_file(path)
        if start == b"P":
            require_stored(path)
        with warnings.catch_warnings(), _Reader(io.FileIO(path)) as reader:
            for _ in range(_PICKLES if start != b"P" else 0):
                if reader.peek(1):
                    require_modest(reader)
            reader.seek(0)
            warnings.simplefilter("ignore")  # of pickle protocols that nothing here depends on
            return torch.load(path if start == b"P" else reader, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if start not in (b"P", b"\x80"):  # neither a zip archive nor a pickle
            raise EncoderError(damaged) from error
        if trust:
            return _unpickle(path, damaged)
        raise EncoderError(
            f"{path}: besides tensors it holds pickled objects, which could run code and are refused;"
            " if you know where it comes from, save its state dict alone, once, as .safetensors, which every command"
            " reads, or give --trust to one that takes it"
        ) from error
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise EncoderError(f"{path}: the weights cannot be read ({error.strerror}); check the path") from error
    except Exception as error:  # torch raises anything on damage
        raise EncoderError(damaged) from error


class _Reader(io.BufferedReader):
    """A file that makes no room for more than it has, whatever a damaged size in it asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > io.DEFAULT_BUFFER_SIZE:
            size = min(size, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(size)


def _unpickle(path: Path, damaged: str) -> Any:
    """Read a file that is trusted, by running it."""
    try:
        with path.open("rb") as file:
            if file.read(1) != b"P":
                file.seek(0)
                content = pickle.load(file, encoding="latin1")  # as Python 2 wrote arrays
                if not isinstance(content, int):  # with a number begin the files of old versions of torch
                    return content
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # a pickle may raise anything
        raise EncoderError(damaged) from error


def fetch(entry: "WeightsEnum", what: str) -> dict[str, Tensor]:
    """Return a state dict of torchvision's from its cache, downloading it if need be; a message calls it `what`.

    Raises:
        EncoderError: it cannot be downloaded.
    """
    try:
        with redirect_stdout(sys.stderr):  # torch announces a download; standard output is for results
            return dict(entry.get_state_dict(progress=sys.stderr.isatty(), check_hash=True))
    except (OSError, RuntimeError) as error:
        cached = Path(torch.hub.get_dir(), "checkpoints", entry.url.rpartition("/")[2])
        raise EncoderError(
            f"the {what} cannot be fetched ({error}); download {entry.url} elsewhere and give it as --visual-weights"
            f" FILE, or put it at {cached}"
        ) from error


def load_strictly(network: nn.Module, weights: Mapping[str, Any], origin: str) -> None:
    """Copy `weights`, which come from `origin`, into `network`; all its names and shapes must be there, and no others.

    Raises:
        EncoderError: they do not fit; the message tells how many are missing, unknown or of another shape.
    """
    weights = _present_names(weights)
    own = network.state_dict()
    # Batch norms wrote no such counter before 2018, and it has no part in the features.
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    faults = misfits({name: list(value.shape) for name, value in own.items()}, weights, counters)
    if faults:
        raise EncoderError(
            f"{origin}: these weights do not fit {type(network).__name__}: {faults}; give the weights of this network"
        )
    # Into its own: some networks refuse weights that do not tell the version of their layout, which safetensors cannot.
    own.update(weights)
    network.load_state_dict(own)


def misfits(
    expected: Mapping[str, list[int]], weights: Mapping[str, Any], optional: Collection[str], most: int = 3
) -> str:
    """Return what `misfit` says of weights by name against the expected shapes; empty if all fit.

    Names in `optional` may be missing.
    """
    missing = [name for name in expected if name not in weights and name not in optional]
    unknown = [name for name in weights if name not in expected]
    misshapen = [
        f"{name} ({_shape(weights[name])} in place of {shape})"
        for name, shape in expected.items()
        if name in weights and _shape(weights[name]) != shape
    ]
    return misfit(missing, unknown, misshapen, most)


def misfit(missing: list[str], unknown: list[str], misshapen: list[str], most: int = 3) -> str:
    """Return how many weights do not fit, and the first `most` names of each kind; empty if all fit."""
    kinds = {"missing": missing, "unknown": unknown, "of another shape": misshapen}
    return "; ".join(
        f"{len(names)} {what} ({', '.join([*names[:most], *(['…'] if len(names) > most else [])])})"
        for what, names in kinds.items()
        if names
    )


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


def _present_names(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Name weights as torchvision does now, and leave out the heads that only training uses.

    The published DenseNets write ``norm.1`` for ``norm1``; GoogLeNet and Inception v3 hold auxiliary classifiers.
    """
    auxiliary = re.compile(r"(aux\d|AuxLogits)\.")
    old = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)")
    return {old.sub(r"\1\2", name): value for name, value in weights.items() if not auxiliary.match(name)}


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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch's random numbers on the CPU follow from a seed; afterwards they go on as if none had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


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

    Images that are all of one smoothness give statistics under which the features of photographs, or of flat
    drawings, grow from layer to layer, up to thousands.
    """
    weights = torch.rand(count, 4, 1, 1, 1) ** 3
    weights /= weights.square().sum(1, keepdim=True).sqrt()

    def noise(channels: int) -> Tensor:
        fields = [torch.randn(count, channels, side, side) for side in (1, 4, 16, 64)]
        scaled = [functional.interpolate(field, (image_size, image_size), mode="bilinear") for field in fields]
        return (weights * torch.stack(scaled, 1)).sum(1)

    return torch.sigmoid(4 * (noise(1) + 0.6 * noise(3)))
