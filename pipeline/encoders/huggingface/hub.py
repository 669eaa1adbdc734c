"""Models of the Hugging Face hub: found in a folder, in the hub's cache or on the hub, and complete."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import huggingface_hub.utils.logging as hub_logging
import torch
from huggingface_hub import try_to_load_from_cache
from transformers.utils import logging as transformers_logging

from ...errors import EncoderError
from ...wording import reason
from ..weights import digest, misfits, require_finite

_HUB_ID = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?")
_FILES = {"text": "the tokenizer's files", "image": "preprocessor_config.json"}
_OTHERS = {"text": "vis", "image": "text"}  # how the names of the other tower's parts begin

Kind = Literal["text", "image"]
T = TypeVar("T")


def place_of(source: str, offline: bool) -> tuple[str, dict[str, Any]]:
    """Return what the loaders of transformers take for a source: a folder or model id, and options.

    The options name the revision (a branch, a tag or a commit) that stands after ``@``, and say whether to do without
    the hub.
    """
    found = None if Path(source).is_dir() else _HUB_ID.fullmatch(source)
    name, revision = found.groups() if found else (source, None)
    return name, {"local_files_only": offline, **({"revision": revision} if revision else {})}


def commit_of(source: str) -> dict[str, str]:
    """Return the commit of the hub from which a source was loaded, as a version to record; none of a folder."""
    name, options = place_of(source, offline=True)
    if Path(name).is_dir():
        return {}
    file = try_to_load_from_cache(name, "config.json", revision=options.get("revision"))
    return {"commit": Path(file).parent.name} if isinstance(file, str) else {}  # snapshots/COMMIT/config.json


def load_from(source: str, kind: Kind, load: Callable[[bool], T]) -> T:
    """Return what `load` makes of a folder or a model id; its argument is whether to do without the hub.

    What lies in the hub's cache is used without asking the hub.

    Raises:
        EncoderError: there is no such model, it is incomplete, or needs code of its own.
    """
    is_folder = source != "" and Path(source).is_dir()
    if not is_folder and not _HUB_ID.fullmatch(source):
        raise EncoderError(f"{kind} weights '{source}': there is no such folder; give a folder or a hub id")
    for offline in [True] if is_folder else [True, False]:
        if not offline:
            print(f"Fetching {kind} weights '{source}' from the Hugging Face hub, into its cache.", file=sys.stderr)
        try:
            with quiet():
                return load(offline)
        except EncoderError:
            raise
        except Exception as error:  # these libraries raise all kinds of errors on damaged or missing files
            cause = error
            if isinstance(error, ImportError):
                said = " ".join(str(error).split())
                raise EncoderError(f"{kind} weights '{source}' need a package that is missing: {said}") from error
            if "trust_remote_code" in str(error):
                raise EncoderError(
                    f"{kind} weights '{source}' come with a program of their own; read it, and give --trust to run it"
                ) from error
    if is_folder:
        raise EncoderError(
            f"the folder '{source}' is not a complete {kind} model ({reason(cause)}); it needs config.json, the"
            f" weights and {_FILES[kind]}"
        ) from cause
    raise EncoderError(
        f"{kind} weights '{source}' are no folder here, and cannot be loaded from the Hugging Face hub"
        f" ({reason(cause)}); check the name and the connection, or give a folder"
    ) from cause


def load_model(
    source: str, kind: Kind, offline: bool, trust: bool, auto: Any, **options: Any
) -> tuple[Any, bool, str | None]:
    """Return a model in float32, as its documentation loads it, whether its pooler's weights are missing, its space.

    Of a model of pictures and texts the other tower is left out; a checkpoint may lack it, as a tuned one does. Such a
    model's space is the digest of both towers, None of one alone or of any other model; see `base.Encoder`.

    Args:
        source, offline: as of `load_from`.
        kind: what a message calls the weights.
        trust: let code that comes with the model run.
        auto: the class of transformers that finds the model's own.
        options: further arguments of its `from_pretrained`.

    Raises:
        EncoderError: the weights do not fit the model's config.json, or hold NaN.
    """
    name, how = place_of(source, offline)
    model, info = auto.from_pretrained(
        name,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        trust_remote_code=trust,
        **how,
        **options,
    )
    joint = hasattr(model, f"get_{kind}_features")
    other = {name for name, _ in model.named_parameters() if joint and name.startswith(_OTHERS[kind])}
    lacking = set(info["missing_keys"])
    whole = not other <= lacking
    prefix, own = f"{model.base_model_prefix}.", dict(model.named_children())
    inside = [key for key in info["unexpected_keys"] if key.removeprefix(prefix).split(".")[0] in own]
    missing, unknown = (sorted(key for key in keys if "pooler." not in key) for keys in (lacking, inside))
    faults = misfits(
        {
            "missing": [key for key in missing if whole or key not in other],
            "unknown": unknown,
            "of another shape": sorted(key[0] for key in info["mismatched_keys"]),
        }
    )
    if faults:
        raise EncoderError(f"{kind} weights '{source}' do not fit their config.json: {faults}; get the model again")
    require_finite(model, f"{kind} weights '{source}'")
    space = digest(model.state_dict()) if joint and whole else None
    for part, _ in list(model.named_children()):
        if joint and part.startswith(_OTHERS[kind]):
            setattr(model, part, None)
    return model.eval().requires_grad_(False), any("pooler." in key for key in lacking - other), space


def counted_from_0(what: str, layer: int, layers: int) -> int:
    """Return a layer's number from 0, of so many above the embeddings; numbers below 0 count from the last layer.

    Raises:
        EncoderError: `what` has no such layer.
    """
    if not -layers - 1 <= layer <= layers:
        raise EncoderError(
            f"{what} have no layer {layer}; choose one from 0, the embeddings, to {layers}, or from -1, the last layer,"
            f" down to -{layers + 1}"
        )
    return layer % (layers + 1)


def autocast(device: str, half: bool) -> torch.autocast:
    """Let a GPU multiply matrices in bfloat16 if `half`; a CPU always computes in float32."""
    kind = device.partition(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=half and kind == "cuda")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' logs and bars while they load or save; what matters becomes an error here."""
    logs: list[Any] = [transformers_logging, hub_logging]  # their functions have no types
    bars, levels = logs[0].is_progress_bar_enabled(), [log.get_verbosity() for log in logs]
    logs[0].disable_progress_bar()
    for log in logs:
        log.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.set_verbosity(level)
        if bars:
            logs[0].enable_progress_bar()
