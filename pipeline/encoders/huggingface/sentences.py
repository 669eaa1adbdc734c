"""How a folder of sentence-transformers makes one vector of a text: the modules after its Transformer.

The library's own modules do it, where the extra ``sentences`` is installed; without it xret takes the mean.
"""

import json
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.utils.hub import cached_file

from ...errors import EncoderError
from ..base import load_library
from .hub import place_of

_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


class Pooling:
    """Makes one vector of the states of a text.

    Args:
        source: the folder or model id.
        files: content of `_FILES` by name, and of the first pooling's ``config.json``.
        offline: whether to do without the hub.

    Attributes:
        most: tokens of a text that are seen; None: what the model takes.
        described: how the vector is made, for an identity.

    Raises:
        EncoderError: it needs the library, which is not installed.
    """

    def __init__(self, source: str, files: dict[str, Any], offline: bool) -> None:
        self._files = files
        self._parts = files["modules.json"][1:]
        self.most: int | None = (files["sentence_bert_config.json"] or {}).get("max_seq_length")
        kinds = [part["type"].rpartition(".")[2] for part in self._parts]
        config = files["config"] or {}
        switches = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
        modes = [config["pooling_mode"]] if "pooling_mode" in config else switches
        self._simple = modes in (["mean"], ["pooling_mode_mean_tokens"]) and set(kinds[1:]) <= {"Normalize"}
        self._normalised = "Normalize" in kinds
        self.described = ", ".join([*map(str, modes), *map(str.lower, kinds[1:])])
        self._modules: list[Any] = []
        if not self._simple:
            library = load_library("sentence_transformers.util", "sentences")
            name, options = place_of(source, offline)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of where older folders find the modules
                made = [
                    library.import_from_string(part["type"]).load(name, subfolder=part["path"], **options)
                    for part in self._parts
                ]
            self._modules = [module.eval().requires_grad_(False) for module in made]

    def pool(self, states: Tensor, inside: Tensor) -> Tensor:
        """Return the vectors [B,D] of states [B,W,C]; `inside`, bool [B,W], says which are no padding."""
        if self._simple:
            pooled = (states * inside[:, :, None]).sum(1) / inside.sum(1)[:, None]
            return functional.normalize(pooled) if self._normalised else pooled
        features = {"token_embeddings": states, "attention_mask": inside.long()}
        for module in self._modules:
            features = module.to(states.device)(features)
        return features["sentence_embedding"]

    def save(self, folder: Path) -> None:
        """Write the files from which `read_pooling` reads it again."""
        for name in _FILES:
            if self._files[name] is not None:
                (folder / name).write_text(json.dumps(self._files[name]), encoding="utf-8")
        for number, part in enumerate(self._parts):
            (folder / part["path"]).mkdir(exist_ok=True)
            if self._modules:
                self._modules[number].save(str(folder / part["path"]))
        if not self._modules:
            (folder / self._parts[0]["path"] / "config.json").write_text(json.dumps(self._files["config"]))


def read_pooling(source: str, offline: bool, prompt: str | None) -> Pooling | None:
    """Return how a folder or model id of sentence-transformers pools; None where it is no such.

    Raises:
        EncoderError: it does more than to pool, or its authors want a prompt and `prompt` is None.
    """
    files = {name: _read(source, name, offline) for name in _FILES}
    modules = files["modules.json"]
    if modules is None:
        return None
    kinds = [str(module.get("type", "")) for module in modules]
    ours = all(kind.startswith("sentence_transformers.") for kind in kinds)
    if not ours or len(kinds) < 2 or not kinds[0].endswith(".Transformer") or modules[0].get("path"):
        raise EncoderError(
            f"text weights '{source}': xret cannot compute their modules.json ({', '.join(kinds)}); take them as --text"
            " bert, which pools by the maximum"
        )
    if (files["sentence_bert_config.json"] or {}).get("do_lower_case"):
        raise EncoderError(
            f"text weights '{source}' want texts in lower case, which xret leaves as they are; write the captions so,"
            " and set do_lower_case to false in their sentence_bert_config.json"
        )
    about = files["config_sentence_transformers.json"] or {}
    wanted = (about.get("prompts") or {}).get(about.get("default_prompt_name"))
    if prompt is None and wanted:
        raise EncoderError(
            f"text weights '{source}' are meant to see {wanted!r} before every text; give --prompt '{wanted}{{}}',"
            " another prompt, or --prompt '{}' for none"
        )
    files["config"] = _read(source, f"{modules[1].get('path')}/config.json", offline)
    return Pooling(source, files, offline)


def _read(source: str, name: str, offline: bool) -> Any:
    """Return the content of a JSON file of a checkpoint; None where it has none."""
    place, options = place_of(source, offline)
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(place, name, **options, **missing)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
