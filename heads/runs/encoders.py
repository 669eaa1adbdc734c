"""The encoders that the features of a run came from, for pictures and captions that no store holds.

A run that was fine-tuned carries its own backbones. For the others the run's folder may say in `encoders.json` what
made its features (`hub.save_to_folder` writes it), else its store does.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...pipeline.documents import read_json
from ...pipeline.encoders import EncoderSpec, TextEncoder, VisualEncoder, load_text, load_visual
from ...pipeline.encoders.words import WordsEncoder
from ...pipeline.errors import EncoderError, RunError
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.reading.origin import Origin
from ...pipeline.store import FeatureCache
from ...pipeline.store.create import fingerprint
from ..model import facts_of_each
from .features import caption_set_of_run, image_set_of_run
from .info import BranchName, as_tuple
from .run import Run

ORIGINS = "encoders.json"
Opener = Callable[[], FeatureCache]
# Of each feature set, with the dtype that its features are rounded to.
ImageEncoders = tuple[tuple[VisualEncoder, str], ...]
TextEncoders = tuple[tuple[TextEncoder, str], ...]


def find_image_encoders(
    run: Run, open_cache: Opener, weights: str | None, device: str, trust: bool = False
) -> ImageEncoders:
    """Return the encoder of each of a run's image feature sets.

    Args:
        run: the run.
        open_cache: opens the store, which is asked where the run does not say what made its features.
        weights: a file, ``imagenet``, ``random:SEED``, or a checkpoint's folder or hub id; None: as run or store name
            them. Of several sets one for each, separated by commas; an empty one counts as None.
        device: where they run.
        trust: let a file of weights run code while it is read.

    Raises:
        EncoderError: the weights are not named, or are others than the run's; or the features were imported.
        RunError, CacheError: run or store are damaged, or do not fit each other.
    """
    spec = own_backbone(run, "image")
    if spec is not None and weights is None:
        encoder = load_visual(spec, device)
        _require(run, "image", encoder.identity, spec.dtype)
        return ((encoder, spec.dtype),)
    origins = origins_of(run, "image", open_cache)
    named = weights_of_each(weights, origins, "--visual-weights")
    pairs = zip(origins, named, strict=True)
    return tuple((origin.load_images(given, device, trust), origin.dtype) for origin, given in pairs)


def find_text_encoders(
    run: Run, open_cache: Opener, weights: str | None, device: str, trust: bool = False
) -> TextEncoders:
    """Return the encoder of each of a run's caption feature sets.

    Args:
        run: the run; words are read by its vocabulary, without the store.
        open_cache: as for `find_image_encoders`.
        weights: a folder or hub id; None: as run or store name them. Sets of words have none; of several others one
            for each, as for `find_image_encoders`.
        device: where they run.
        trust: let a program that a checkpoint comes with run.

    Raises:
        EncoderError, RunError, CacheError: as for `find_image_encoders`.
    """
    spec = own_backbone(run, "text")
    if spec is not None and weights is None:
        encoder = load_text(spec, device)
        _require(run, "text", encoder.identity, spec.dtype)
        return ((encoder, spec.dtype),)
    origins = origins_of(run, "text", open_cache) if reads_states(run) else ()
    named = zip(origins, weights_of_each(weights, origins, "--text-weights"), strict=True)
    states = iter([(origin.load_captions(given, device, trust), origin.dtype) for origin, given in named])
    words = WordsEncoder(run.vocabulary) if run.vocabulary is not None else None
    return tuple(
        (words, "int32") if words is not None and facts.kind == "words" else next(states)
        for facts in facts_of_each(run.text_facts)
    )


def reads_states(run: Run) -> bool:
    """Return whether a run reads captions by a text encoder, and not by its own vocabulary alone."""
    return any(facts.kind != "words" for facts in facts_of_each(run.text_facts))


def weights_of_each(given: str | None, origins: Sequence[Origin], option: str) -> list[str | None]:
    """Return the weights of each set; EncoderError where they are not as many."""
    if given is None or len(origins) < 2:
        return [given] * len(origins)
    named = [name.strip() or None for name in given.split(",")]
    if len(named) != len(origins):
        raise EncoderError(
            f"the run reads {len(origins)} feature sets ({', '.join(origin.name for origin in origins)}), and {option} "
            f"names weights of {len(named)}; give one for each, separated by commas; one may be empty"
        )
    return list(named)


def own_backbone(run: Run, branch: BranchName) -> EncoderSpec | None:
    """Return the spec of a run's own backbone of ``image`` or ``text``; None where it has none."""
    return specs_of_run(run)[branch] if run.info.tuned(branch) else None


def specs_of_run(run: Run | str | Path) -> dict[BranchName, EncoderSpec]:
    """Return the specs of the backbones of a fine-tuned run.

    Raises:
        RunError: there is no such run, it has no backbones of its own or no finished epoch, or is damaged.
    """
    run = run if isinstance(run, Run) else Run(run)
    if run.info.backbones is None:
        raise RunError(f"{run.path} has no backbones of its own; --from-run takes a run that `xret finetune` made")
    _ = run.weights  # there is none before the first epoch's
    specs: dict[BranchName, EncoderSpec] = {}
    branches: tuple[BranchName, ...] = ("image", "text")
    for branch in branches:
        if not run.info.tuned(branch):
            continue
        if (path := run.backbone(branch)) is None:
            raise RunError(f"{run.path} has lost a backbone; restore it, or fine-tune with another --out")
        try:
            specs[branch] = EncoderSpec.from_json(run.info.backbones[branch]).with_source(str(path))
        except (EncoderError, TypeError) as error:
            raise RunError(f"{run.path}/run.json does not describe the run's backbones; get the run again") from error
    return specs


def origins_of(run: Run, branch: BranchName, open_cache: Opener) -> tuple[Origin, ...]:
    """Return what made each feature set of ``image`` or ``text`` that a run reads; sets of words are left out.

    Errors as for `find_image_encoders`.
    """
    if not run.has(ORIGINS):
        cache = open_cache()
        if branch == "image":
            return tuple(Origin.of(part) for part in parts_of(image_set_of_run(run, cache)))
        captions = parts_of(caption_set_of_run(run, cache))
        return tuple(Origin.of(part) for part in captions if part.kind != "words")
    file = run.file(ORIGINS)
    facts = facts_of_each(run.image_facts if branch == "image" else run.text_facts)
    made = [one for one, its in zip(run.info.prints(branch), facts, strict=True) if its.kind != "words"]
    try:
        told = as_tuple(read_json(file)[branch])
        origins = tuple(Origin.from_json(one) for one in told)
        damaged = [origin.fingerprint for origin in origins] != made
    except (OSError, ValueError, KeyError, TypeError) as error:  # EncoderError, too
        raise RunError(f"{file} is damaged; remove it and name the store with --store, or get the run again") from error
    if damaged:
        raise RunError(f"{file} does not fit the run's run.json; remove it and name the store, or get the run again")
    return origins


def origins_text(origins: Mapping[BranchName, Sequence[Origin]]) -> str:
    """Return `encoders.json`, by ``image`` and ``text``; of several feature sets a list."""
    told = {name: [origin.to_json() for origin in of_each] for name, of_each in origins.items()}
    values = {name: of_each[0] if len(of_each) == 1 else of_each for name, of_each in told.items()}
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def _require(run: Run, branch: BranchName, identity: dict[str, Any], dtype: str) -> None:
    if fingerprint(identity, dtype) != run.info.fingerprints[branch]:
        raise EncoderError(
            f"the {branch} backbone in {run.path} is not the one that run.json speaks of: it is damaged or was"
            " exchanged; get the run again"
        )
