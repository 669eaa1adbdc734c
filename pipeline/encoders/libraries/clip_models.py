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
from ..base import load_library
from ..huggingface.hub import quiet
from ..spec import EncoderSpec
from ..weights import (
    digest,
    noise_images,
    read_weights,
    require_finite,
    require_fit,
    seed_or_file,
    seeded,
    settle_norms,
)

Tower = Literal["visual", "text"]


@dataclass(frozen=True)
class ClipModel:
    """A model of open_clip in float32, on the CPU and in evaluation mode; its parts are ``visual`` and ``text``."""

    model: Any
    arch: str
    name: str  # a set's name begins with it
    described: dict[str, str]  # architecture and tag, as an identity has them
    seed: str | None  # ``random:SEED`` where its weights are such
    space: str | None  # of both towers' global features; None where only one tower was read


def load_clip(spec: EncoderSpec, tower: Tower) -> ClipModel:
    """Return a model of which one tower is wanted; only that has to be in a file.

    Raises:
        EncoderError: open_clip is not installed, there is no such architecture or tag, or the weights do not fit.
    """
    library, what = load_library("open_clip", "open-clip"), spec.name
    arch, _, tag = spec.model.rpartition("/") if "/" in spec.model else (spec.model, "", "")
    arch = arch.replace("/", "-")
    config, source = _config(library, arch, tag), seed_or_file(spec)
    if source is None and not tag:
        tags = ", ".join(library.list_pretrained_tags_by_model(arch)) or "none"
        raise EncoderError(f"{what} names no weights; give a tag as open_clip:{arch}/TAG ({tags}), or a file")
    settings: dict[str, Any] = {"force_custom_text": True, "pretrained_text": False}
    size = config["vision_cfg"].get("image_size", 224)
    sides = {size} if isinstance(size, int) else set(size)
    if spec.image_size is not None and spec.image_size not in sides:
        settings["force_image_size"] = spec.image_size
    whole = True
    try:
        with _silent():
            if source is None:
                model = library.create_model(arch, pretrained=tag, **settings)
            else:
                settings["force_preprocess_cfg"] = library.get_pretrained_cfg(arch, tag) if tag else None
                with seeded(source if isinstance(source, int) else 0):
                    model = library.create_model(arch, **settings)
                    if isinstance(source, int):
                        images = noise_images(16, max(sides))
                        settle_norms(model.visual, lambda: model.visual(images))
        if isinstance(source, Path):
            whole = _fill(model, spec, read_weights(source, spec.trust), tower)
    except EncoderError:
        raise
    except Exception as error:  # of open_clip, timm, transformers or the hub's library
        way = "check the connection, or choose another" if spec.image_size is None else "leave --image-size out"
        raise EncoderError(f"{what} cannot be built ({reason(error)}); {way}") from error
    require_finite(model, f"the weights of {what}")
    model.eval().requires_grad_(False)
    described = {"name": arch} | ({"tag": tag} if tag else {})
    seed = spec.weights if isinstance(source, int) else None
    return ClipModel(model, arch, f"{arch}-{tag}" if source is None else arch, described, seed, _space(model, whole))


def _config(library: Any, arch: str, tag: str) -> dict[str, Any]:
    """Return an architecture's config.

    Raises:
        EncoderError: there is no such architecture, no such tag of it, or that was trained with another activation.
    """
    known = library.list_models()
    config: dict[str, Any] | None = library.get_model_config(arch) if arch in known else None
    if config is None:
        raise EncoderError(f"open_clip has no architecture '{arch}'{nearest(arch, known)}; see open_clip.list_models()")
    tags = library.list_pretrained_tags_by_model(arch)
    if tag and tag not in tags:
        raise EncoderError(
            f"open_clip's architecture '{arch}' has no weights tagged '{tag}'{nearest(tag, tags)}; its tags are"
            f" {', '.join(tags) or 'none'}"
        )
    quick = tag and library.get_pretrained_cfg(arch, tag).get("quick_gelu") and not config.get("quick_gelu")
    if quick and f"{arch}-quickgelu" in known:  # open_clip only warns, and gives other features
        raise EncoderError(
            f"open_clip:{arch}/{tag}: these weights were trained with another activation than {arch} has; give"
            f" open_clip:{arch}-quickgelu/{tag}"
        )
    return config


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


def _fill(model: Any, spec: EncoderSpec, state: dict[str, Tensor], tower: Tower) -> bool:
    """Fill a model from a state dict, as `open_clip.load_checkpoint` does; return whether both towers were in it."""
    library = import_module("open_clip.model")
    state = import_module("open_clip.convert").convert_state_dict(model, state)
    if "positional_embedding" in state:
        state = library.convert_to_custom_text_state_dict(state)
    state = {key: value for key, value in state.items() if not _idle(key)}
    own = {key: value for key, value in model.state_dict().items() if not _idle(key)}
    try:
        library.resize_pos_embed(state, model)
        library.resize_text_pos_embed(state, model)
    except (AssertionError, AttributeError, RuntimeError):
        pass  # what has another shape is named below
    whole = any(key in own and not key.startswith(f"{tower}.") for key in state)
    require_fit({key: value for key, value in own.items() if whole or key.startswith(f"{tower}.")}, state, spec)
    model.load_state_dict({**model.state_dict(), **state})
    return whole


def _idle(key: str) -> bool:
    """Return whether a weight has no part in the features."""
    return key.startswith("logit_") or key.endswith(".position_ids")


@torch.inference_mode()
def _space(model: Any, whole: bool) -> str | None:
    """Return what tells the joint space of both towers; positions, which go with the pictures' size, are left out."""
    weights = {key: value for key, value in model.named_parameters() if not _idle(key)}
    shared = {key: value for key, value in weights.items() if not (key.startswith("visual.") and "pos" in key)}
    return digest(shared) if whole else None
