"""How a sentence-transformers folder makes one vector of a text: ``modules.json`` and the pooling that it names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils.hub import cached_file

from ...errors import EncoderError
from .bert import maximum
from .hub import place_of

# As older folders have it: a switch for each way.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_WAYS = ("cls", "max", "mean", "lasttoken")


@dataclass(frozen=True)
class Pooling:
    """How the states of a text become one vector.

    Attributes:
        way: ``cls``, ``max``, ``mean`` or ``lasttoken`` of all tokens, special ones included.
        normalised: whether the vector is divided by its norm.
        most: tokens of a text that are seen; None: what the model takes.
        prompt: what the authors put before every text; None: nothing.
    """

    way: str
    normalised: bool
    most: int | None
    prompt: str | None = None

    @property
    def described(self) -> str:
        """The same in words."""
        return f"{self.way}, normalised" if self.normalised else self.way

    def pool(self, states: Tensor, inside: Tensor) -> Tensor:
        """Return the vectors [B,C] of states [B,W,C]; `inside`, bool [B,W], says which are no padding."""
        if self.way == "cls":
            pooled = states[:, 0]
        elif self.way == "lasttoken":
            pooled = states[torch.arange(len(states), device=states.device), inside.sum(1) - 1]
        elif self.way == "max":
            pooled = maximum(states, inside)
        else:
            pooled = (states * inside[:, :, None]).sum(1) / inside.sum(1)[:, None]
        return functional.normalize(pooled) if self.normalised else pooled

    def save(self, folder: Path) -> None:
        """Write the files from which `read_pooling` reads it again."""
        kinds = ["Transformer", "Pooling", *(["Normalize"] if self.normalised else [])]
        modules = [
            {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": kind}
            for number, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": self.way}))
        if self.most is not None:
            (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": self.most}))


def read_pooling(weights: str, offline: bool) -> Pooling | None:
    """Return how a folder or model id of sentence-transformers pools; None where it is no such.

    Raises:
        EncoderError: it computes something that xret does not.
    """
    modules = _read(weights, "modules.json", offline)
    if modules is None:
        return None
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0].get("path"):
        raise EncoderError(
            f"text weights '{weights}': their modules.json computes {', '.join(kinds) or 'nothing'}, and xret computes"
            " Transformer, Pooling and Normalize; take them as --text bert --text-weights, which pools by the maximum"
        )
    settings = _read(weights, f"{modules[1].get('path')}/config.json", offline) or {}
    named = settings.get("pooling_mode") or [way for key, way in _SWITCHES.items() if settings.get(key)]
    ways = [named] if isinstance(named, str) else list(named)
    if len(ways) != 1 or ways[0] not in _WAYS:
        raise EncoderError(
            f"text weights '{weights}' pool by {' and '.join(map(str, ways)) or 'nothing'}, and xret by"
            f" {', '.join(_WAYS)}; take them as --text bert --text-weights, which pools by the maximum"
        )
    seen = _read(weights, "sentence_bert_config.json", offline) or {}
    if seen.get("do_lower_case"):
        raise EncoderError(
            f"text weights '{weights}': their sentence_bert_config.json writes all texts in small letters, and xret"
            " leaves them as they are; write the captions so, and set its do_lower_case to false"
        )
    about = _read(weights, "config_sentence_transformers.json", offline) or {}
    prompt = (about.get("prompts") or {}).get(about.get("default_prompt_name"))
    return Pooling(ways[0], "Normalize" in kinds, seen.get("max_seq_length"), prompt or None)


def _read(weights: str, name: str, offline: bool) -> Any:
    """Return the content of a JSON file of a checkpoint; None where it has none."""
    place, options = place_of(weights, offline)
    file = cached_file(
        place,
        name,
        **options,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
