"""The encoders that the features of a run came from, for pictures and captions that no store holds.

A run that was fine-tuned carries its own backbones. For the others the run's folder may say in `encoders.json` what
made its features (`hub.save_to_folder` writes it), else its store does.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ...pipeline.cache import FeatureCache, fingerprint
from ...pipeline.encoders import TextEncoder, VisualEncoder
from ...pipeline.encoders.words import WordsEncoder
from ...pipeline.errors import EncoderError, RunError
from ...pipeline.extraction.options import Options, words_of_run
from ...pipeline.reading.origin import Origin
from ...pipeline.reading.reencoding import caption_encoder, image_encoder
from .features import caption_set_of_run, image_set_of_run
from .info import BranchName
from .run import Run

ORIGINS = "encoders.json"
Opener = Callable[[], FeatureCache]


def find_image_encoder(
    run: Run, open_cache: Opener, weights: str | None, device: str, trust: bool = False
) -> tuple[VisualEncoder, str]:
    """Return the encoder of a run's image features, and the dtype that they are rounded to.

    Args:
        run: the run.
        open_cache: opens the store, which is asked where the run does not say what made its features.
        weights: a file, ``imagenet``, ``random:SEED``, or a checkpoint's folder or hub id; None: as run or store name
            them.
        device: where it runs.
        trust: let a file of weights run code while it is read.

    Raises:
        EncoderError: the weights are not named, or are others than the run's; or the features were imported.
        RunError, CacheError: run or store are damaged, or do not fit each other.
    """
    options = own_backbone(run, "image")
    if options is not None and weights is None:
        encoder = options.load_visual(device)
        _require(run, "image", encoder.identity, options.dtype)
        return encoder, options.dtype
    origin = origin_of(run, "image", open_cache)
    return image_encoder(origin, weights, device, trust), origin.dtype


def find_text_encoder(
    run: Run, open_cache: Opener, weights: str | None, device: str, trust: bool = False
) -> tuple[TextEncoder, str]:
    """Return the encoder of a run's caption features, and the dtype that they are rounded to.

    Args:
        run: the run; words are read by its vocabulary, without the store.
        open_cache: as for `find_image_encoder`.
        weights: a folder or hub id; None: as run or store name them.
        device: where it runs.
        trust: let a program that a checkpoint comes with run.

    Raises:
        EncoderError, RunError, CacheError: as for `find_image_encoder`.
    """
    if run.vocabulary is not None:
        return WordsEncoder(run.vocabulary), "int32"
    options = own_backbone(run, "text")
    if options is not None and weights is None:
        encoder = options.load_text(device)
        _require(run, "text", encoder.identity, options.dtype)
        return encoder, options.dtype
    origin = origin_of(run, "text", open_cache)
    return caption_encoder(origin, weights, device, trust), origin.dtype


def own_backbone(run: Run, branch: BranchName) -> Options | None:
    """Return the options that name a run's own backbone of ``image`` or ``text``; None where it has none."""
    return Options(**words_of_run(run.path)) if run.info.tuned(branch) else None


def origin_of(run: Run, branch: BranchName, open_cache: Opener) -> Origin:
    """Return what made the run's features of ``image`` or ``text``; errors as for `find_image_encoder`."""
    file = run.path / ORIGINS
    if not file.is_file():
        cache = open_cache()
        return Origin.of(image_set_of_run(run, cache) if branch == "image" else caption_set_of_run(run, cache))
    try:
        origin = Origin(**json.loads(file.read_text(encoding="utf-8"))[branch])
        damaged = origin.fingerprint != run.info.fingerprints[branch]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is damaged; remove it and name the store with --store, or get the run again") from error
    if damaged:
        raise RunError(f"{file} does not fit the run's run.json; remove it and name the store, or get the run again")
    return origin


def origins_text(origins: Mapping[BranchName, Origin]) -> str:
    """Return `encoders.json`, by ``image`` and ``text``."""
    return json.dumps({name: asdict(origin) for name, origin in origins.items()}, indent=1, ensure_ascii=False) + "\n"


def _require(run: Run, branch: BranchName, identity: dict[str, Any], dtype: str) -> None:
    if fingerprint(identity, dtype) != run.info.fingerprints[branch]:
        raise EncoderError(
            f"the {branch} backbone in {run.path} is not the one that run.json speaks of: it is damaged or was"
            " exchanged; get the run again"
        )
