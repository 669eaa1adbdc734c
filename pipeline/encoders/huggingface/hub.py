"""Models of the Hugging Face hub: found in a folder, in the hub's cache or on the hub, and complete."""

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from huggingface_hub import try_to_load_from_cache
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from ...errors import EncoderError
from ..weights import digest, misfits, require_finite

_HUB_ID = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?")
_OTHERS = {"text": "vis", "image": "text"}  # how the names of the other tower's parts begin

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A folder or hub id, whose revision (a branch, a tag or a commit) may stand after ``@``."""

    source: str
    kind: Literal["text", "image"]  # of the encoder
    trust: bool = False  # let code that comes with the model run
    offline: bool = True  # do without the hub

    def __str__(self) -> str:
        return f"{self.kind} weights '{self.source}'"

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.source != "" and Path(self.source).is_dir()

    @property
    def location(self) -> tuple[str, dict[str, Any]]:
        """What the loaders of transformers take: a folder or model id, and options."""
        found = None if self.is_folder else _HUB_ID.fullmatch(self.source)
        name, revision = found.groups() if found else (self.source, None)
        return name, {"local_files_only": self.offline, **({"revision": revision} if revision else {})}

    def file(self, name: str) -> Path:
        """Return one of its files; OSError: it has none of that name."""
        place, how = self.location
        return Path(str(cached_file(place, name, **how)))

    def load(self, auto: Any, **options: Any) -> Any:
        """Return what the class `auto` of transformers makes of it."""
        name, how = self.location
        return auto.from_pretrained(name, trust_remote_code=self.trust, **how, **options)

    def commit(self) -> dict[str, str]:
        """Return the commit of the hub from which it was loaded, as a version to record; none of a folder."""
        name, options = self.location
        file = None if self.is_folder else try_to_load_from_cache(name, "config.json", revision=options.get("revision"))
        return {"commit": Path(file).parent.name} if isinstance(file, str) else {}  # snapshots/COMMIT/config.json


def load_from(source: str, kind: Literal["text", "image"], trust: bool, load: Callable[[Checkpoint], T]) -> T:
    """Return what `load` makes of a folder or a model id; the hub is asked only for what its cache lacks.

    EncoderError: there is no such folder, or the model needs code of its own without `trust`.
    """
    found = Checkpoint(source, kind, trust)
    if not found.is_folder and not _HUB_ID.fullmatch(source):
        raise EncoderError(f"{found}: there is no such folder; give a folder or a hub id")
    try:
        with quiet():
            return load(found)
    except EncoderError:
        raise
    except Exception as error:  # these libraries raise all kinds of errors on damaged or missing files
        if "trust_remote_code" in str(error):
            sentence = f"{found} come with a program of their own; read it, and give --trust to run it"
            raise EncoderError(sentence) from error
        if found.is_folder:
            raise
    print(f"Fetching {found} from the Hugging Face hub, into its cache.", file=sys.stderr)
    with quiet():
        return load(replace(found, offline=False))


def load_model(checkpoint: Checkpoint, auto: Any, **options: Any) -> tuple[Any, bool, str | None]:
    """Return a model in float32, as its documentation loads it, whether its pooler's weights are missing, its space.

    Of a model of pictures and texts the other tower is left out; a checkpoint may lack it, as a tuned one does. The
    space is the digest of both towers, None for any other model; see `base.Encoder`. EncoderError: the weights do not
    fit the model's config.json, or hold NaN.
    """
    # Mismatched sizes are refused below, by name.
    options |= {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = checkpoint.load(auto, **options)
    joint, others = hasattr(model, f"get_{checkpoint.kind}_features"), _OTHERS[checkpoint.kind]
    other = {name for name, _ in model.named_parameters() if joint and name.startswith(others)}
    lacking = set(info["missing_keys"])
    whole = not other <= lacking
    if faults := _faults(model, info, set() if whole else other):
        raise EncoderError(f"{checkpoint} do not fit their config.json: {faults}; get the model again")
    require_finite(model, str(checkpoint))
    space = digest(model.state_dict()) if joint and whole else None
    for part, _ in list(model.named_children()):
        if joint and part.startswith(others):
            setattr(model, part, None)
    return model.eval().requires_grad_(False), any("pooler." in key for key in lacking - other), space


def _faults(model: Any, info: Mapping[str, Any], optional: set[str]) -> str:
    """Return which weights do not fit; a pooler's, and those that are `optional`, may be missing."""
    prefix, parts = f"{model.base_model_prefix}.", dict(model.named_children())
    unknown = {key for key in info["unexpected_keys"] if key.removeprefix(prefix).split(".")[0] in parts}
    faults = {"missing": set(info["missing_keys"]) - optional, "unknown": unknown}
    sure = {what: sorted(key for key in keys if "pooler." not in key) for what, keys in faults.items()}
    return misfits(sure | {"of another shape": sorted(key for key, *_ in info["mismatched_keys"])})


def states_of(found: Any, layer: int | None) -> torch.Tensor:
    """Return the states of a layer from a model's outputs; None: of the last, after the model's own norm."""
    return found.last_hidden_state if layer is None else found.hidden_states[layer]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' logs, warnings, bars and prints while they load; what matters becomes an error here."""
    disabled, handler = logging.root.manager.disable, logging.NullHandler()
    bars = transformers_logging.is_progress_bar_enabled()
    logging.root.addHandler(handler)  # without any, a library's call makes one that stays
    logging.disable(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.root.removeHandler(handler)
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()


def plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if isinstance(value, bool | float | str) else int(value)
