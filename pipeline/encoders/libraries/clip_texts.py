"""Text towers of open_clip: the states of the tokens, and the projected embedding.

Source: open_clip's README, "Usage", and `forward_intermediates` of its text transformers.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...errors import EncoderError
from ...wording import reason
from ..base import library_versions, load_library
from ..huggingface.hub import autocast, quiet
from ..huggingface.texts import TokenEncoder, tokenizer_digest
from ..spec import EncoderSpec
from .clip_models import load_clip

_PROBES = ("a", "a photo of two dogs", "a very long sentence " * 99)


class ClipTextEncoder(TokenEncoder):
    """Encode captions as the states of their tokens in a text tower, and its projected embedding."""

    takes = frozenset({"layer", "prompt", "weights"})
    suffix = ".safetensors"  # of what `save` writes

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        """Load the tower; layer 0 are the embeddings, -1 the last states, after the model's norm.

        Raises:
            EncoderError: there is no such model, or an option does not fit it.
        """
        super().__init__(spec, device)
        loaded = load_clip(spec, "text")
        self.name, self.space, self.network = loaded.name, loaded.space, loaded.model.text
        self._load_tokenizer(spec.name, loaded.arch)
        blocks = getattr(self.network.transformer, "resblocks", None)  # None: a tower of transformers
        self._layers = self.network.config.num_hidden_layers if blocks is None else len(blocks)
        layer = self._settle(spec.name, spec.layer, self._layers)
        inner = self._inner
        words = {"class": type(self._own).__name__, "vocabulary": self._own.encoder if inner is None else None}
        digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()
        self.identity = {
            "encoder": "open_clip",
            "weights": loaded.seed or self.weights_id(),
            "model": loaded.described,
            "preprocessing": {
                "tokenizer": digest if inner is None else tokenizer_digest(inner),
                "max_length": self.max_length,
                **({} if spec.prompt is None else {"prompt": spec.prompt}),
                "padding": {"tokens": self._width, "with": self._pad},
            },
            "layer": layer,
            "global": "projected",
        }
        self.versions = library_versions("torch", "open_clip", "transformers")

    def _load_tokenizer(self, what: str, arch: str) -> None:
        """Load the tokenizer of an architecture, which must do no more than pad the ids.

        Raises:
            EncoderError: its files cannot be fetched, or it does more.
        """
        library = load_library("open_clip", "open-clip")
        try:
            with quiet():
                self._own = library.get_tokenizer(arch)
                self._inner = getattr(self._own, "tokenizer", None)  # of transformers
                self._pad = 0 if self._inner is None else int(self._inner.pad_token_id)
                most = int(self._own.context_length)
                self._width = self.max_length = min(most, int(self.network.context_length))
                probes = [self._ids_of(text, most) for text in _PROBES]
                padded = [ids + [self._pad] * (most - len(ids)) for ids in probes]
                alike = torch.equal(torch.tensor(padded), self._own(list(_PROBES)))
        except Exception as error:  # of the hub's library, or of the tokenizer
            raise EncoderError(f"the tokenizer of {what} cannot be loaded ({reason(error)})") from error
        if not alike:
            raise EncoderError(f"the tokenizer of {what} marks captions in a way that xret does not know")

    def _ids(self, texts: Sequence[str], most: int | None) -> list[list[int]]:
        return [self._ids_of(text, most) or [0] for text in self._prompted(texts)]

    def _ids_of(self, text: str, most: int | None) -> list[int]:
        if self._inner is None:
            ids = self._own.encode(text)
            return [self._own.sot_token_id, *(ids if most is None else ids[: most - 2]), self._own.eot_token_id]
        cut: dict[str, Any] = {} if most is None else {"truncation": True, "max_length": most}
        ids = self._inner(self._own.clean_fn(text), verbose=False, **cut)["input_ids"]
        strip = self._inner.sep_token_id if self._own.strip_sep_token else None
        return [token for token in ids if token != strip]

    def _run(self, inputs: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self._half):
            of_blocks = hasattr(self.network, "forward_intermediates")
            states, pooled = (self._of_blocks if of_blocks else self._of_transformers)(inputs)
        return states.float(), pooled.float()

    def _of_blocks(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        block = self._layers - 1 if self._layer is None else max(self._layer - 1, 0)
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

    def words(self, texts: Sequence[str]) -> list[list[int | None]]:
        """Refuse: the library's tokenizers tell no words and know no mask.

        Raises:
            EncoderError: always.
        """
        raise EncoderError("open_clip's tokenizers cannot mask words; set finetune.mask_words=0")

    def save(self, path: Path) -> None:
        """Write the tower as a ``.safetensors`` file, named as in a file of both towers."""
        state = self.network.state_dict()
        save_file({f"text.{name}": value.detach().cpu().contiguous() for name, value in state.items()}, path)
