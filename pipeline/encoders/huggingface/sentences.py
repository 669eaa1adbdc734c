"""How a folder of sentence-transformers makes one vector of a text: the library's modules after its Transformer."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.utils.hub import cached_file

from ...errors import EncoderError
from ..base import load_library
from ..weights import digest
from .hub import Checkpoint

_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


class Pooling:
    """Makes one vector of the states of a text, as `described` in an identity."""

    def __init__(self, checkpoint: Checkpoint, files: dict[str, Any]) -> None:
        """Load the modules; `files` is the content of `_FILES` by name, `modules.json` at least."""
        self._files, self._parts = files, files["modules.json"][1:]
        self._config = _read(checkpoint, f"{self._parts[0].get('path')}/config.json") or {}
        # Tokens of a text that are seen; None: what the model takes.
        self.most: int | None = (files["sentence_bert_config.json"] or {}).get("max_seq_length")
        self.takes_prompt = self._config.get("include_prompt", True)  # whether its tokens have a part in the vector
        switches = [key for key, on in self._config.items() if key.startswith("pooling_mode_") and on is True]
        modes = [self._config["pooling_mode"]] if "pooling_mode" in self._config else switches
        library = load_library("sentence_transformers.util", "sentences")
        name, options = checkpoint.location
        made = [
            library.import_from_string(part["type"]).load(name, subfolder=part["path"], **options)
            for part in self._parts
        ]
        self._modules: list[Any] = [module.eval().requires_grad_(False) for module in made]
        kinds = ["-".join(type(part).__name__.lower() for part in module.modules()) for module in made[1:]]
        weights = nn.ModuleList(made).state_dict()  # of dense layers
        self._dims: int | None = (files["config_sentence_transformers.json"] or {}).get("truncate_dim")
        cut = [] if self._dims is None else [f"first {self._dims}"]
        self.described = ", ".join([*map(str, modes), *kinds, *([digest(weights)] if weights else []), *cut])

    def pool(self, states: Tensor, inside: Tensor) -> Tensor:
        """Return the vectors [B,D] of states [B,W,C]; `inside`, bool [B,W], is false for padding."""
        features = {"token_embeddings": states, "attention_mask": inside.long()}
        for module in self._modules:
            features = module.to(states.device)(features)
        return features["sentence_embedding"][:, : self._dims]

    def save(self, folder: Path) -> None:
        """Write the files from which `read_pooling` reads it again."""
        for name in _FILES:
            if self._files[name] is not None:
                (folder / name).write_text(json.dumps(self._files[name]), encoding="utf-8")
        for part, module in zip(self._parts, self._modules, strict=True):
            (folder / part["path"]).mkdir(exist_ok=True)
            module.save(str(folder / part["path"]))
        # As it was read: newer versions of the library write it in other words, which would be another identity.
        (folder / self._parts[0]["path"] / "config.json").write_text(json.dumps(self._config), encoding="utf-8")


def read_pooling(checkpoint: Checkpoint, prompt: str | None) -> Pooling | None:
    """Return how a folder or model id of sentence-transformers pools; None where it is no such.

    EncoderError: it changes the texts or runs other modules, its authors want a prompt and `prompt` is None, or the
    library is not installed.
    """
    files = {name: _read(checkpoint, name) for name in _FILES}
    if files["modules.json"] is None:
        return None
    kinds = [str(module.get("type", "")) for module in files["modules.json"]]
    ours = all(kind.startswith("sentence_transformers.") for kind in kinds)
    settings = files["sentence_bert_config.json"] or {}
    # Other tasks give logits of the vocabulary, as SPLADE's.
    plain = {"transformer_task": "feature-extraction", "do_lower_case": False, "processing_kwargs": {}}
    changes = [key for key, value in plain.items() if (settings.get(key) or value) != value]
    if not ours or changes or len(kinds) < 2 or not kinds[0].endswith(".Transformer"):
        what = " and ".join(changes) or f"modules of {', '.join(kinds)}"
        raise EncoderError(f"{checkpoint} want {what}, which xret does not run; use --text bert, which pools by itself")
    about = files["config_sentence_transformers.json"] or {}
    wanted = (about.get("prompts") or {}).get(about.get("default_prompt_name"))
    if prompt is None and wanted:
        raise EncoderError(
            f"{checkpoint} are meant to see {wanted!r} before every text; give --prompt '{wanted}{{}}', another prompt,"
            " or --prompt '{}' for none"
        )
    pooling = Pooling(checkpoint, files)
    if prompt not in (None, "{}") and not pooling.takes_prompt:
        raise EncoderError(
            f"{checkpoint} leave the tokens of a prompt out of the vector, which xret does not; give --prompt '{{}}'"
        )
    return pooling


def _read(checkpoint: Checkpoint, name: str) -> Any:
    place, options = checkpoint.location
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(place, name, **options, **missing)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
