"""Text towers of open_clip: the states of the tokens, and the projected embedding.

Source: open_clip's README, "Usage", and `forward_intermediates` of its text transformers.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...errors import EncoderError
from ...wording import reason
from ..base import library_versions
from ..huggingface.bert import BertEncoder
from ..huggingface.hub import autocast, quiet
from .clip_models import load_clip
from .pictures import load_library

_PROBED = ("a", "a photo of two dogs", "a very long sentence " * 99)


class ClipTextEncoder(BertEncoder):
    """Encode captions as the states of their tokens in a text tower, and its projected embedding.

    Args:
        name, trust: as of `clip_models.load_clip`.
        device, layer, special_tokens, max_tokens, prompt: as of `registry.load_text`.
        file: the weights, as of `clip_models.load_clip`.
        half: let a GPU compute in bfloat16.

    Raises:
        EncoderError: there is no such model, or an option does not fit it.
    """

    _advice = "another architecture"
    suffix = ".safetensors"  # of what `save` writes

    def __init__(
        self,
        name: str,
        device: str,
        layer: int = -1,
        special_tokens: bool = True,
        max_tokens: int | None = None,
        prompt: str | None = None,
        *,
        file: str = "imagenet",
        half: bool = True,
        trust: bool = False,
    ) -> None:
        self._file, self._half, self._trust = file, half, trust
        super().__init__(name, device, layer, special_tokens, max_tokens, prompt)
        self.versions = library_versions("torch", "open_clip", "transformers")

    def _load(self, weights: str) -> tuple[Any, Any]:
        loaded = load_clip(weights, self._file, "text", trust=self._trust)
        self.name, self.space = loaded.name, loaded.space
        self._described, self._seed = loaded.described, loaded.seed
        tower = loaded.model.text
        tokenizer = Tokenizer(loaded.what, loaded.described["name"], tower.context_length)
        self._width = tokenizer.model_max_length
        return tower, tokenizer

    @property
    def _config(self) -> Any:
        blocks = getattr(self.network.transformer, "resblocks", None)
        if blocks is None:  # a tower of transformers
            return self.network.config
        return SimpleNamespace(num_hidden_layers=len(blocks))

    def _longest(self) -> int:
        return self._width

    def _padding(self) -> int:
        return int(self._tokenizer.pad)

    def _identify(self, layer: str) -> dict[str, Any]:
        identity = super()._identify(layer)
        identity["preprocessing"]["padding"] = {"tokens": self._width, "with": self._pad}
        return {
            **identity,
            "encoder": "open_clip",
            "weights": self._seed or identity["weights"],
            "model": self._described,
            "global": "projected",
        }

    def _settings(self) -> dict[str, Any]:
        return {}

    def _stop_at(self, layer: int) -> None:
        self._layer = layer  # the embedding is of the last in any case

    def words(self, texts: Sequence[str]) -> list[list[int | None]]:
        """Refuse: the library's tokenizers tell no words and know no mask.

        Raises:
            EncoderError: always.
        """
        raise EncoderError(
            "the tokenizers of open_clip do not tell which pieces make a word, so words cannot be masked; set"
            " finetune.mask_words=0"
        )

    def save(self, path: Path) -> None:
        """Write the tower as a ``.safetensors`` file, named as in a file of both towers."""
        save_file({f"text.{name}": value.detach().cpu().contiguous() for name, value in self._state().items()}, path)

    def _run(self, inputs: Tensor, inside: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self._half):
            if hasattr(self.network, "forward_intermediates"):
                states, pooled = self._of_blocks(inputs)
            else:
                states, pooled = self._of_transformers(inputs)
        return states.float(), pooled.float()

    def _of_blocks(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        block = self._config.num_hidden_layers - 1 if self._layer is None else max(self._layer - 1, 0)
        found = self.network.forward_intermediates(
            inputs, indices=[block], normalize_intermediates=self._layer is None, output_fmt="NLC"
        )
        states = found["text_intermediates"][0]
        if self._layer == 0:
            states = self.network.token_embedding(inputs) + self.network.positional_embedding[: inputs.shape[1]]
        return states, found["text_features"]

    def _of_transformers(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `HFTextEncoder.forward` does, and keep the states."""
        mask = (inputs != self.network.config.pad_token_id).long()
        found = self.network.transformer(
            input_ids=inputs, attention_mask=mask, output_hidden_states=self._layer is not None
        )
        states = found.last_hidden_state if self._layer is None else found.hidden_states[self._layer]
        return states, self.network.proj(self.network.pooler(found, mask))


class Tokenizer:
    """A tokenizer of open_clip, called as one of transformers: ids without padding.

    Args:
        what: how a message calls the model.
        arch: its architecture.
        most: tokens that the model takes.

    Attributes:
        pad: id of the padding.

    Raises:
        EncoderError: its files cannot be fetched, or it does more than to pad the ids.
    """

    unk_token_id = 0

    def __init__(self, what: str, arch: str, most: int) -> None:
        library = load_library("open_clip", "open-clip")
        try:
            with quiet():
                self._own = library.get_tokenizer(arch)
                self._inner = getattr(self._own, "tokenizer", None)  # of transformers
                self.model_max_length = int(min(self._own.context_length, most))
                self.pad = 0 if self._inner is None else self._inner.pad_token_id
                alike = [torch.equal(self._padded(text), self._own([text])[0]) for text in _PROBED]
        except Exception as error:  # of the hub's library, or of the tokenizer
            raise EncoderError(
                f"the tokenizer of {what} cannot be loaded ({reason(error)}); check the connection"
            ) from error
        if not all(alike):
            raise EncoderError(
                f"the tokenizer of {what} marks captions in a way that xret does not know; choose another"
            )
        self.is_fast = self._inner is not None and self._inner.is_fast

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_special_tokens_mask: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """Return ``input_ids`` of one text or several, and ``special_tokens_mask`` if it is asked for."""
        if isinstance(texts, str):
            (ids,) = self([texts], add_special_tokens=add_special_tokens)["input_ids"]
            special = set(self.all_special_ids)
            return {"input_ids": ids, "special_tokens_mask": [int(token in special) for token in ids]}
        most = max_length if truncation else None
        return {"input_ids": [self._ids(text, add_special_tokens, most) for text in texts]}

    def _ids(self, text: str, special: bool, most: int | None) -> list[int]:
        if self._inner is None:
            start, end = [[token] if special else [] for token in (self._own.sot_token_id, self._own.eot_token_id)]
            ids = self._own.encode(text)
            return [*start, *(ids if most is None else ids[: most - len(start + end)]), *end]
        cut: dict[str, Any] = {} if most is None else {"truncation": True, "max_length": most}
        ids = self._inner(self._own.clean_fn(text), add_special_tokens=special, verbose=False, **cut)["input_ids"]
        strip = self._inner.sep_token_id if self._own.strip_sep_token else None
        return [token for token in ids if token != strip]

    def _padded(self, text: str) -> Tensor:
        ids = self._ids(text, True, self._own.context_length)
        return torch.tensor(ids + [self.pad] * (self._own.context_length - len(ids)))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the marks of a caption's beginning and end."""
        return list((self._own if self._inner is None else self._inner).all_special_ids)

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer in Rust that does the work, of `is_fast`."""
        return None if self._inner is None else self._inner.backend_tokenizer

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        vocabulary: dict[str, int] = self._own.encoder if self._inner is None else self._inner.get_vocab()
        return vocabulary
