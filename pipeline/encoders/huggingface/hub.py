"""Models of the Hugging Face hub: found in a folder, in the hub's cache or on the hub, and complete."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypeVar

import huggingface_hub.utils.logging as hub_logging
import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ...errors import EncoderError
from ...wording import reason
from ..weights import digest, misfit, require_finite

_HUB_ID = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?")
_FILES = {"text": "the tokenizer's files", "image": "preprocessor_config.json"}
_OTHERS = {"text": "vis", "image": "text"}  # how the names of the other tower's parts begin

Kind = Literal["text", "image"]
T = TypeVar("T")


def load_text_model(weights: str) -> tuple[Any, Any]:
    """Return a model without the pooler on top, in float32, and its tokenizer.

    Args:
        weights: a folder, or a model id, with ``@`` and a revision if need be; what lies in the hub's cache is used
            without asking the hub.

    Raises:
        EncoderError: there is no such model, or it is incomplete.
    """

    def load(offline: bool) -> tuple[Any, Any]:
        model = _load_model(weights, offline)
        return model, load_tokenizer(weights, offline, model.config)

    return load_from(weights, "text", load)


def place_of(weights: str, offline: bool) -> tuple[str, dict[str, Any]]:
    """Return what the loaders of transformers take for `weights`: a folder or model id, and options.

    The options name the revision (a branch, a tag or a commit) that stands after ``@``, and say whether to do without
    the hub.
    """
    found = None if Path(weights).is_dir() else _HUB_ID.fullmatch(weights)
    name, revision = found.groups() if found else (weights, None)
    return name, {"local_files_only": offline, **({"revision": revision} if revision else {})}


def commit_of(weights: str) -> dict[str, str]:
    """Return the commit of the hub from which `weights` were loaded, as a version to record; none of a folder."""
    name, options = place_of(weights, offline=True)
    if Path(name).is_dir():
        return {}
    file = try_to_load_from_cache(name, "config.json", revision=options.get("revision"))
    return {"commit": Path(file).parent.name} if isinstance(file, str) else {}  # snapshots/COMMIT/config.json


def load_from(weights: str, kind: Kind, load: Callable[[bool], T]) -> T:
    """Return what `load` makes of `weights`, a folder or a model id; it is told whether to do without the hub.

    What lies in the hub's cache is used without asking the hub.

    Raises:
        EncoderError: there is no such model, it is incomplete, or needs code of its own.
    """
    is_folder = weights != "" and Path(weights).is_dir()
    if not is_folder and not _HUB_ID.fullmatch(weights):
        raise EncoderError(
            f"{kind} weights '{weights}': there is no such folder; give a folder or a model id of the hub"
        )
    for offline in [True] if is_folder else [True, False]:
        if not offline:
            print(f"Fetching {kind} weights '{weights}' from the Hugging Face hub, into its cache.", file=sys.stderr)
        try:
            with quiet():
                return load(offline)
        except EncoderError:
            raise
        except Exception as error:  # these libraries raise all kinds of errors on damaged or missing files
            cause = error
            if isinstance(error, ImportError):
                said = " ".join(str(error).split())
                raise EncoderError(f"{kind} weights '{weights}' need a package that is missing: {said}") from error
            if "trust_remote_code" in str(error):
                raise EncoderError(
                    f"{kind} weights '{weights}' come with a program of their own, which is not run; if you know where"
                    " they come from and have read it, give --trust"
                ) from error
    if is_folder:
        raise EncoderError(
            f"the folder '{weights}' is not a complete {kind} model ({reason(cause)}); it needs config.json, the"
            f" weights and {_FILES[kind]}"
        ) from cause
    raise EncoderError(
        f"{kind} weights '{weights}' are not a folder here, and cannot be loaded as a model of the Hugging Face hub"
        f" ({reason(cause)}); check the name and the connection, or give a folder"
    ) from cause


def load_model(weights: str, kind: Kind, offline: bool, trust: bool, auto: Any) -> tuple[Any, set[str], str | None]:
    """Return a model in float32, as its documentation loads it, the names of its pooler's missing weights, its space.

    Of a model of pictures and texts the other tower is left out; a checkpoint may lack it, as a tuned one does. Such a
    model's space is the digest of both towers, None of one alone or of any other model; see `base.Encoder`.

    Args:
        weights, offline: as `load_from` has them.
        kind: what a message calls the weights.
        trust: let code that comes with the model run.
        auto: the class of transformers that finds the model's own.

    Raises:
        EncoderError: the weights do not fit the model's config.json, or hold NaN.
    """
    name, options = place_of(weights, offline)
    model, info = auto.from_pretrained(
        name,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        **options,
        trust_remote_code=trust,
    )
    joint = hasattr(model, f"get_{kind}_features")
    other = {name for name, _ in model.named_parameters() if joint and name.startswith(_OTHERS[kind])}
    whole = not other <= set(info["missing_keys"])
    if not whole:
        info["missing_keys"] = set(info["missing_keys"]) - other
    if faults := _faults(model, info):
        raise EncoderError(f"{kind} weights '{weights}' do not fit their config.json: {faults}; get the model again")
    require_finite(model, f"{kind} weights '{weights}'")
    space = digest(model.state_dict()) if joint and whole else None
    if joint:
        _leave_out(model, _OTHERS[kind])
    return model.eval().requires_grad_(False), {key for key in info["missing_keys"] if "pooler." in key}, space


def _leave_out(model: nn.Module, beginning: str) -> None:
    """Take those parts off a model of pictures and texts whose names begin so: its other tower."""
    for name, _ in list(model.named_children()):
        if name.startswith(beginning):
            setattr(model, name, None)


def counted_from_0(what: str, option: str, layer: int, layers: int) -> int:
    """Return a layer's number from 0, of so many above the embeddings; numbers below 0 count from the last layer.

    Raises:
        EncoderError: `what` has no such layer; `option` chooses it.
    """
    if not -layers - 1 <= layer <= layers:
        raise EncoderError(
            f"{what} have no layer {layer}; choose a {option} from 0, the embeddings, to"
            f" {layers}, or from -1, the last layer, down to -{layers + 1}"
        )
    return layer % (layers + 1)


def autocast(device: str, half: bool) -> torch.autocast:
    """Let a GPU multiply matrices in bfloat16 where `half` says so; a CPU always computes in float32."""
    kind = device.partition(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=half and kind == "cuda")


def _load_model(weights: str, offline: bool) -> Any:
    name, options = place_of(weights, offline)
    config = AutoConfig.from_pretrained(name, **options, trust_remote_code=False)
    if hasattr(config, "text_config") or getattr(config, "is_encoder_decoder", False):
        raise EncoderError(
            f"text weights '{weights}' are of a {config.model_type} model, and --text bert takes the BERT family; give"
            f" them as --text hf:{weights}"
        )
    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"there is no plain encoder for a {type(config).__name__}")
    kind: Any = MODEL_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    without_pooler = {"add_pooling_layer": False} if "add_pooling_layer" in signature(kind).parameters else {}
    model, info = kind.from_pretrained(
        name,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        **options,
        **without_pooler,
    )
    if faults := _faults(model, info):
        raise EncoderError(f"text weights '{weights}' do not fit their config.json: {faults}; get the model again")
    return model


def _faults(model: Any, info: dict[str, Any]) -> str:
    """Return how many weights are missing, unknown or of another shape, and the first of each; the pooler's may be."""
    prefix = f"{model.base_model_prefix}."
    own = dict(model.named_children())
    inside = [key for key in info["unexpected_keys"] if key.removeprefix(prefix).split(".")[0] in own]
    missing, unknown = (
        [key for key in sorted(keys) if "pooler." not in key] for keys in (info["missing_keys"], inside)
    )
    return misfit(missing, unknown, sorted(key[0] for key in info["mismatched_keys"]))


def load_tokenizer(weights: str, offline: bool, config: Any, trust: bool = False) -> Any:
    """Return the tokenizer of a model whose text part has this config.

    Raises:
        EncoderError: the model does not know all of its tokens.
        FileNotFoundError: it has no vocabulary.
    """
    name, options = place_of(weights, offline)
    tokenizer = AutoTokenizer.from_pretrained(name, **options, trust_remote_code=trust)
    # Without its files a tokenizer is made all the same, and knows the special tokens only.
    vocabulary = tokenizer.get_vocab()
    if not set(vocabulary) - set(tokenizer.all_special_tokens):
        raise FileNotFoundError("its tokenizer lacks a vocabulary: vocab.txt or tokenizer.json")
    rows = getattr(config, "vocab_size", 0)
    if not rows:
        raise EncoderError(f"'{weights}' is a {config.model_type} model, which reads no texts; name another as --text")
    if max(vocabulary.values()) >= rows:
        raise EncoderError(
            f"text weights '{weights}': the tokenizer has {len(vocabulary)} tokens and the model knows {rows};"
            " put the model's own tokenizer next to it"
        )
    return tokenizer


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
