"""The encoders that features came from, for pictures and captions that no store holds, which they encode likewise.

`run.json` says what made the features; a run that was fine-tuned carries its own backbones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from ...pipeline.data.images import PictureFile
from ...pipeline.encoders.base import TextEncoder, VisualEncoder, require_declared
from ...pipeline.encoders.origin import Origin
from ...pipeline.encoders.registry import is_own
from ...pipeline.encoders.spec import EncoderSpec
from ...pipeline.encoders.threads import encoding
from ...pipeline.encoders.words import WordsEncoder
from ...pipeline.errors import EncoderError, RunError, SampleError
from ...pipeline.reading.features import Features, pad, pad_ids, side_by_side
from ...pipeline.store.regions import Regions, lay_out
from .info import BRANCHES, BranchName
from .run import Run

BATCH = 32  # samples that go through an encoder at once
Picture: TypeAlias = str | Path | PictureFile | Image.Image
# A VisualEncoder or TextEncoder for each feature set, with the dtype that its features are rounded to.
Encoders = tuple[tuple[Any, str], ...]


def find_encoders(
    origins: Sequence[Origin],
    vocabulary: Sequence[str],
    branch: BranchName,
    weights: str | None,
    device: str,
    trust: bool = False,
) -> Encoders:
    """Return the encoder of each feature set of ``image`` or ``text``.

    Args:
        origins: what made the sets, see `origins_of`.
        vocabulary: by which words are read.
        branch: the side.
        weights: a file, ``imagenet``, ``random:SEED``, or a checkpoint's folder or hub id; None: as `origins` name
            them. Of several sets one for each but words, separated by commas; an empty one counts as None.
            EncoderError where they are not named, or are others than those; or the features were imported.
        trust: let a file of weights, or a program that a checkpoint comes with, run code.
    """
    named = iter(weights_of_each(weights, origins, branch))
    found: list[tuple[Any, str]] = []
    for origin in origins:
        if origin.kind == "words":
            found.append((WordsEncoder(tuple(vocabulary)), "int32"))
        else:
            load = origin.load_images if branch == "image" else origin.load_captions
            found.append((load(next(named), device, trust), origin.dtype))
    return tuple(found)


def origins_of(run: Run, branch: BranchName) -> tuple[Origin, ...]:
    """Return what made each feature set of ``image`` or ``text``; RunError where a backbone of the run is missing."""
    origins = run.info.origins(branch)
    if not run.info.tuned(branch):
        return origins
    if (path := run.backbone(branch)) is None:
        raise RunError(f"{run.path} has lost a backbone; restore it, or fine-tune with another --out")
    return tuple(replace(one, spec=one.spec and one.spec.with_source(str(path))) for one in origins)


def weights_of_each(given: str | None, origins: Sequence[Origin], branch: BranchName) -> list[str | None]:
    """Return the weights of each set but words; EncoderError where they are not as many."""
    names = [origin.name for origin in origins if origin.kind != "words"]
    if given is None or len(names) < 2:
        return [given] * len(names)
    named = [name.strip() or None for name in given.split(",")]
    if len(named) != len(names):
        named_by = "--visual-weights" if branch == "image" else "--text-weights"
        raise EncoderError(
            f"the run reads {len(names)} feature sets ({', '.join(names)}), and {named_by} names weights of "
            f"{len(named)}; give one for each, separated by commas; one may be empty"
        )
    return list(named)


def specs_of_run(run: Run | str | Path, trust: bool = False) -> dict[BranchName, EncoderSpec]:
    """Return the specs of the backbones of a fine-tuned run, opened with `trust`; RunError where it has none."""
    run = run if isinstance(run, Run) else Run(run, trust)
    if run.info.finetuned is None:
        raise RunError(f"{run.path} has no backbones of its own; --encoder takes a run that `xret finetune` made")
    _ = run.weights  # there is none before the first epoch's
    specs = {branch: origins_of(run, branch)[0].spec for branch in BRANCHES if run.info.tuned(branch)}
    for name in (spec.name for spec in specs.values() if spec is not None and is_own(spec.name) and not trust):
        raise RunError(f"{run.path} names {name}, a program of its own; to run it, give --trust")
    return {branch: spec for branch, spec in specs.items() if spec is not None}


def encode_images_by_all(
    encoders: Sequence[tuple[VisualEncoder, str]], device: str, images: Sequence[Picture]
) -> Iterator[Features]:
    """Yield the features that encoders on `device`, each with the dtype of its set, give pictures, some at a time.

    `images` are files, or folders of frames for videos; or decoded pictures. SampleError if one cannot be read, or a
    dtype cannot hold its features.
    """
    for first in range(0, len(images), BATCH):
        some = images[first : first + BATCH]
        decoded = [[_decode(encoder, image) for image in some] for encoder, _ in encoders]
        features, usable = encode_decoded(encoders, device, decoded)
        for image, good in zip(some, usable, strict=True):
            if not good:
                raise SampleError(
                    _name(image), "its features are beyond their dtype or no numbers; take another picture"
                )
        yield features


def encode_decoded(
    encoders: Sequence[tuple[VisualEncoder, str]], device: str, decoded: Sequence[Sequence[Any]]
) -> tuple[Features, np.ndarray]:
    """Return the features that encoders, each with its dtype, give B pictures, at most `BATCH`, by encoder as decoded.

    Also returned: whether the dtypes can hold those of each picture, bool [B].
    """
    made, usable = [], np.ones(len(decoded[0]), dtype=bool)
    for (encoder, dtype), pictures in zip(encoders, decoded, strict=True):
        with encoding(device):
            encoded = encoder.encode(torch.stack(list(pictures)) if encoder.kind == "grid" else list(pictures))
        require_declared(encoder, pictures, encoded)
        with np.errstate(over="ignore"):  # found below
            local, global_, length = _laid_out(encoder, dtype, encoded)
        for array in (local, global_):
            usable &= np.isfinite(array).reshape(len(pictures), -1).all(1)
        rows, whole, count = (torch.from_numpy(array).to(device) for array in (local, global_, length))
        made.append(Features(count, rows, whole, grid=encoder.grid))
    return side_by_side(made), usable


def encode_captions_by_all(
    encoders: Sequence[tuple[TextEncoder, str]], device: str, texts: Sequence[str]
) -> Iterator[Features]:
    """Yield the features of captions likewise; SampleError if a dtype cannot hold those of one."""
    for first in range(0, len(texts), BATCH):
        some = list(texts[first : first + BATCH])
        yield side_by_side([_encode_captions(encoder, dtype, device, some) for encoder, dtype in encoders])


def _encode_captions(encoder: TextEncoder, dtype: str, device: str, texts: list[str]) -> Features:
    ids = encoder.tokenize(texts)
    token, length = pad_ids(ids)
    with encoding(device):
        encoded = encoder.encode(ids)
    if encoded is None:
        return Features(length.to(device), token=token.to(device))
    require_declared(encoder, ids, encoded)
    with np.errstate(over="ignore"):  # found below
        states, pooled = (array.astype(dtype) for array in encoded)
    if not (np.isfinite(states).all() and np.isfinite(pooled).all()):
        raise SampleError("the text", f"its features are beyond {dtype} or no numbers; take other words")
    local = pad(torch.from_numpy(states), length).to(device)
    return Features(length.to(device), local, torch.from_numpy(pooled).to(device), token.to(device))


def _decode(encoder: VisualEncoder, image: Picture) -> Any:
    if isinstance(image, Image.Image) and encoder.kind == "frames":
        raise SampleError(_name(image), "this is no video; give a folder of frames")
    try:
        return encoder.decode(image)[0]
    except SampleError as error:
        raise SampleError(_name(image), error.reason) from error


def _name(image: Picture) -> str:
    if isinstance(image, PictureFile):
        return str(image.name)
    return "the picture" if isinstance(image, Image.Image) else str(image)


def _laid_out(
    encoder: VisualEncoder, dtype: str, encoded: "tuple[np.ndarray, np.ndarray] | list[Regions]"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return local features, the global ones, and how many local rows count, as the set's arrays hold them."""
    if not isinstance(encoded, list):
        local, global_ = encoded
        return local.astype(dtype), global_.astype(dtype), np.full(len(local), local.shape[1])
    arrays = {
        "local": np.empty((len(encoded), encoder.rows, encoder.channels), dtype),
        "global": np.empty((len(encoded), encoder.global_channels), dtype),
        "length": np.empty(len(encoded), np.int64),
    }
    for row, regions in enumerate(encoded):
        lay_out(arrays, row, regions)
    return arrays["local"], arrays["global"], arrays["length"]
