"""The encoders that features came from, for pictures and captions that no store holds.

`run.json` says what made the features; a run that was fine-tuned carries its own backbones.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...pipeline.encoders.origin import Origin
from ...pipeline.encoders.registry import is_own
from ...pipeline.encoders.spec import EncoderSpec
from ...pipeline.encoders.words import WordsEncoder
from ...pipeline.errors import EncoderError, RunError
from ...pipeline.wording import option
from .info import BRANCHES, BranchName
from .run import Run

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
        trust: let a file of weights, or a program that a checkpoint comes with, run code.

    Raises:
        EncoderError: the weights are not named, or are others than those; or the features were imported.
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
        named_by = option("visual-weights" if branch == "image" else "text-weights")
        raise EncoderError(
            f"the run reads {len(names)} feature sets ({', '.join(names)}), and {named_by} names weights of "
            f"{len(named)}; give one for each, separated by commas; one may be empty"
        )
    return list(named)


def specs_of_run(run: Run | str | Path, trust: bool = False) -> dict[BranchName, EncoderSpec]:
    """Return the specs of the backbones of a fine-tuned run; `trust` as of `Run`.

    Raises:
        RunError: there is no such run, it has no backbones of its own or no finished epoch, or is damaged.
    """
    run = run if isinstance(run, Run) else Run(run, trust)
    if run.info.finetuned is None:
        raise RunError(f"{run.path} has no backbones of its own; --encoder takes a run that `xret finetune` made")
    _ = run.weights  # there is none before the first epoch's
    specs = {branch: origins_of(run, branch)[0].spec for branch in BRANCHES if run.info.tuned(branch)}
    for name in (spec.name for spec in specs.values() if spec is not None and is_own(spec.name) and not trust):
        raise RunError(f"{run.path} names {name}, a program of its own; to run it, give --trust")
    return {branch: spec for branch, spec in specs.items() if spec is not None}
