"""Models of open_clip by architecture and tag, with weights from the hub, from a file or drawn at random."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import EncoderError, nearest
from ...wording import reason
from ..huggingface.hub import quiet
from ..weights import digest, misfits, noise_images, read_weights, require_finite, seed_or_file, seeded, settle_norms
from .pictures import load_library

Tower = Literal["visual", "text"]


@dataclass(frozen=True)
class ClipModel:
    """A model of open_clip; its parts are ``visual`` and ``text``."""

    model: Any
    what: str  # how a message calls it
    name: str  # a set's name begins with it
    described: dict[str, str]  # architecture and tag, as an identity has them
    seed: str | None  # ``random:SEED`` where its weights are such
    space: str | None  # of both towers' global features; None where only one tower was read


def load_clip(name: str, weights: str, tower: Tower, image_size: int | None = None, trust: bool = False) -> ClipModel:
    """Return a model in float32, on the CPU and in evaluation mode, which one tower of is wanted.

    Args:
        name: the architecture, and after a slash the tag of pretrained weights, which also says how pictures are
            prepared.
        weights: ``imagenet``, which means those of the tag, a file, or ``random:SEED``.
        tower: which has to be in a file.
        image_size: side of the input, pixels; None: the architecture's own.
        trust: let a file of weights run code while it is read.

    Raises:
        EncoderError: open_clip is not installed, there is no such architecture or tag, or the weights do not fit.
    """
    library, what = load_library("open_clip", "open-clip"), f"open_clip:{name}"
    arch, _, tag = name.rpartition("/") if "/" in name else (name, "", "")
    arch = arch.replace("/", "-")
    config = _config(library, arch, tag)
    if weights == "imagenet" and not tag:
        raise EncoderError(
            f"{what} names no weights; give a tag as open_clip:{arch}/TAG, or a file as {_option(tower)} FILE; its tags"
            f" are {', '.join(library.list_pretrained_tags_by_model(arch)) or 'none'}"
        )
    source = None if weights == "imagenet" else seed_or_file(weights, imagenet=True)
    settings: dict[str, Any] = {"force_custom_text": True, "pretrained_text": False}
    if image_size is not None and image_size not in _sides(config):
        settings["force_image_size"] = image_size
    with _building(what, image_size), _silent():
        if source is None:
            model = _of_tag(library, what, arch, tag, tower, settings)
        else:
            settings["force_preprocess_cfg"] = library.get_pretrained_cfg(arch, tag) if tag else None
            with seeded(source if isinstance(source, int) else 0):
                model = library.create_model(arch, **settings)
                if isinstance(source, int):
                    images = noise_images(16, max(_sides(config)))
                    settle_norms(model.visual, lambda: model.visual(images))
    whole = True
    if isinstance(source, Path):
        whole = _fill(model, what, weights, read_weights(source, trust), tower)
    require_finite(model, f"the weights of {what}" if source is None else f"weights '{weights}' of {what}")
    model.eval().requires_grad_(False)
    described = {"name": arch} | ({"tag": tag} if tag else {})
    named = f"{arch}-{tag}" if source is None else arch
    seed = weights if isinstance(source, int) else None
    return ClipModel(model, what, named, described, seed, _space(model) if whole else None)


def _option(tower: Tower) -> str:
    return f"--{tower}-weights"


def _config(library: Any, arch: str, tag: str) -> dict[str, Any]:
    """Return an architecture's config.

    Raises:
        EncoderError: there is no such architecture, no such tag of it, or that was trained with another activation.
    """
    config: dict[str, Any] | None = library.get_model_config(arch) if arch in library.list_models() else None
    if config is None:
        known = library.list_models()
        raise EncoderError(
            f"open_clip has no architecture '{arch}'{nearest(arch, known)}; open_clip.list_models() lists them"
        )
    tags = library.list_pretrained_tags_by_model(arch)
    if tag and tag not in tags:
        raise EncoderError(
            f"open_clip's architecture '{arch}' has no weights tagged '{tag}'{nearest(tag, tags)}; its tags are"
            f" {', '.join(tags) or 'none'}"
        )
    quick = tag and library.get_pretrained_cfg(arch, tag).get("quick_gelu") and not config.get("quick_gelu")
    if quick and f"{arch}-quickgelu" in library.list_models():  # open_clip only warns, and gives other features
        raise EncoderError(
            f"open_clip:{arch}/{tag}: these weights were trained with another activation than {arch} has; give"
            f" open_clip:{arch}-quickgelu/{tag}"
        )
    return config


def _sides(config: dict[str, Any]) -> set[int]:
    """Return height and width of the pixels that an architecture takes."""
    size = config["vision_cfg"].get("image_size", 224)
    return {size} if isinstance(size, int) else set(size)


def _of_tag(library: Any, what: str, arch: str, tag: str, tower: Tower, settings: dict[str, Any]) -> Any:
    """Build a model with the weights of a tag, from the hub or its cache."""
    try:
        library.download_pretrained(library.get_pretrained_cfg(arch, tag))
    except Exception as error:  # the hub's library raises all kinds of errors without a connection
        raise EncoderError(
            f"the weights of {what} cannot be fetched ({reason(error)}); check the connection, or give a file of"
            f" them as {_option(tower)} FILE"
        ) from error
    return library.create_model(arch, pretrained=tag, **settings)


@contextmanager
def _building(what: str, image_size: int | None) -> Iterator[None]:
    """Turn what a constructor raises into a sentence."""
    try:
        yield
    except EncoderError:
        raise
    except Exception as error:  # of open_clip, timm or transformers, which have the towers
        way = "leave --image-size out" if image_size is not None else "check the connection, or choose another"
        raise EncoderError(f"{what} cannot be built ({reason(error)}); {way}") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Silence open_clip, which logs and warns of what becomes an error here, and prints."""
    logger, handler, disabled = logging.getLogger(), logging.NullHandler(), logging.root.manager.disable
    logger.addHandler(handler)  # without any, logging makes one that stays
    logging.disable(logging.CRITICAL)
    try:
        with quiet(), redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        logger.removeHandler(handler)


def _fill(model: Any, what: str, weights: str, state: dict[str, Tensor], tower: Tower) -> bool:
    """Fill a model from a state dict, as `open_clip.load_checkpoint` does; return whether both towers were in it.

    One tower suffices if it is the wanted one.
    """
    library = import_module("open_clip.model")
    state = import_module("open_clip.convert").convert_state_dict(model, state)
    if "positional_embedding" in state:
        state = library.convert_to_custom_text_state_dict(state)
    state = {key: value for key, value in state.items() if not _aside(key)}
    own = {key: value for key, value in model.state_dict().items() if not _aside(key)}
    try:
        library.resize_pos_embed(state, model)
        library.resize_text_pos_embed(state, model)
    except (AssertionError, AttributeError, RuntimeError):
        pass  # what has another shape is named below
    whole = any(key in own and not key.startswith(f"{tower}.") for key in state)
    wanted = {key: list(value.shape) for key, value in own.items() if whole or key.startswith(f"{tower}.")}
    counters = [key for key in wanted if key.endswith("num_batches_tracked")]
    if faults := misfits(wanted, state, counters):
        raise EncoderError(f"{weights}: these weights do not fit {what}: {faults}; give the weights of this model")
    model.load_state_dict({**model.state_dict(), **state})
    return whole


def _aside(key: str) -> bool:
    """Return whether a weight has no part in the features."""
    return key.startswith("logit_") or key.endswith(".position_ids")


@torch.inference_mode()
def _space(model: Any) -> str:
    """Return what tells the joint space of both towers; positions, which go with the pictures' size, are left out."""
    weights = dict(model.named_parameters())
    return digest(
        {
            key: value
            for key, value in weights.items()
            if not (_aside(key) or (key.startswith("visual.") and "pos" in key))
        }
    )
