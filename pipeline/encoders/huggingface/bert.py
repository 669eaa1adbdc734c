"""Token features: the hidden states of a Hugging Face encoder of the BERT family, of any layer.

`BertEncoder` is ``--text bert``. `texts.HubTextEncoder` makes more of the same, of any text model of transformers.
"""

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import EncoderError
from ..base import library_versions
from ..weights import digest
from ..weights_source import short_name
from .hub import commit_of, counted_from_0, load_text_model, quiet

# Dask's tasks already run in parallel; the tokenizers' own threads warn when a process forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Settings that change the features of equal weights.
_SHAPING = ("num_attention_heads", "hidden_act", "layer_norm_eps")


class BertEncoder:
    """Encode captions as the states of their tokens, and the maximum over them."""

    _encoder = "bert"  # in the identity; a set is named after the model
    kind = "tokens"
    space: str | None = None
    vocabulary: tuple[str, ...] | None = None
    channels: int | None
    global_channels: int | None
    network: Any  # the model up to the wanted layer
    max_length: int  # tokens of a caption that the network sees, special tokens included
    suffix = ""  # `save` writes a folder
    _width = 0  # to how many tokens captions are padded at least

    def __init__(
        self,
        weights: str,
        device: str,
        layer: int = -1,
        special_tokens: bool = True,
        max_tokens: int | None = None,
        prompt: str | None = None,
    ) -> None:
        """Load model and tokenizer; arguments and errors as of `registry.load_text`."""
        self.device, self._special_tokens, self._prompt = device, special_tokens, prompt
        self.name = short_name(weights)
        self.network, self._tokenizer = self._load(weights)
        self.network.to(device).eval().requires_grad_(False)
        self._lock = threading.Lock()  # a tokenizer keeps its settings for truncation between calls
        config = self._config
        self._pad = self._padding()
        before, after = _specials(self._tokenizer)
        self.max_length = _max_length(weights, self._longest(), max_tokens, len(before + after))
        # What `encode` puts around the ids that `tokenize` gives, and whose states it leaves out again.
        self._before, self._after = ([], []) if special_tokens else (before, after)
        layers = getattr(config, "num_hidden_layers", 0)
        layer = counted_from_0(f"text weights '{weights}'", "--text-layer", layer, layers)
        self._layer: int | None = None  # the last hidden state
        self._above: dict[str, Tensor] = {}  # weights of layers that are cut off
        self.identity = self._identify("last_hidden_state" if layer == layers else f"hidden_states.{layer}")
        self.versions = library_versions("torch", "transformers", "tokenizers") | commit_of(weights)
        try:
            if layer < layers:
                self._stop_at(layer)
            states, pooled = self.encode(self.tokenize(["a"]))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise EncoderError(
                f"'{weights}' is a {type(self.network).__name__}, which does not encode captions token by token;"
                f" choose {self._advice}"
            ) from error
        self.channels, self.global_channels = states.shape[1], pooled.shape[1]

    _advice = "a model of the BERT family"

    def _load(self, weights: str) -> tuple[Any, Any]:
        """Return the network and its tokenizer."""
        return load_text_model(weights)

    @property
    def _config(self) -> Any:
        return self.network.config

    def _longest(self) -> int:
        """Return how many tokens of a caption can be encoded."""
        return min(self._tokenizer.model_max_length, _positions(self.network, self._config))

    def _padding(self) -> int:
        """Return the token that captions are padded with."""
        pad = getattr(self._config, "pad_token_id", None)
        return 0 if pad is None else int(pad)

    def _identify(self, layer: str) -> dict[str, Any]:
        preprocessing = {"tokenizer": _tokenizer_digest(self._tokenizer), "max_length": self.max_length}
        if not self._special_tokens:
            preprocessing["special_tokens"] = False
        if self._prompt is not None:
            preprocessing["prompt"] = self._prompt
        return {
            "encoder": self._encoder,
            "weights": self.weights_id(),
            "model": {"class": type(self.network).__name__, **self._settings()},
            "preprocessing": preprocessing,
            "layer": layer,
        }

    def _settings(self) -> dict[str, Any]:
        """Return what of the config changes the features of equal weights."""
        return {key: getattr(self._config, key, None) for key in _SHAPING}

    def _stop_at(self, layer: int) -> None:
        """Take the states of a layer; those above it are cut off, if that leaves the states as they are."""
        whole = self.network.state_dict()
        if not _cut(self.network, layer, self.tokenize(["a"])):
            self._layer = layer
        left = self.network.state_dict()
        self._above = {name: value.cpu() for name, value in whole.items() if name not in left}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of the tokens whose states `encode` gives; a caption without any gets one unk."""
        return self._ids(texts, truncation=True, max_length=self._room)

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Return how many captions `tokenize` cuts short."""
        return sum(len(ids) > self._room for ids in self._ids(texts, truncation=False))

    @property
    def _room(self) -> int:
        return self.max_length - len(self._before + self._after)

    def _ids(self, texts: Sequence[str], **truncation: Any) -> list[list[int]]:
        if not texts:
            return []
        ids = self._encodings(texts, **truncation)["input_ids"]
        return [caption or [self._tokenizer.unk_token_id or 0] for caption in ids]

    def _encodings(self, texts: Sequence[str], **truncation: Any) -> Any:
        if self._prompt is not None:
            texts = [self._prompt.replace("{}", text) for text in texts]
        with self._lock:
            # verbose=False: it would log that a caption is too long.
            return self._tokenizer(
                list(texts), add_special_tokens=self._special_tokens, padding=False, verbose=False, **truncation
            )

    @torch.inference_mode()
    def encode(self, ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Encode captions as `tokenize` gives them: the states, packed [sum of lengths,C], and their maxima [B,C]."""
        length = torch.tensor([len(caption) for caption in ids])
        token = nn.utils.rnn.pad_sequence([torch.tensor(list(caption)) for caption in ids], True)
        states, pooled = self.features(token, length)
        inside = torch.arange(token.shape[1]) < length[:, None]
        return states[inside.to(self.device)].cpu().numpy(), pooled.cpu().numpy()

    def features(self, token: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a padded batch, so that gradients reach `network`.

        Args:
            token: ids as `tokenize` gives them, int64 [B,N]; what stands after a length does not matter.
            length: int64 [B].

        Returns:
            States [B,N,C], zeros after the lengths, and the global feature of each caption [B,D], on the device.
        """
        token, length = token.to(self.device), length.to(self.device)[:, None]
        first, more = len(self._before), len(self._before + self._after)
        place = torch.arange(max(self._width, token.shape[1] + more), device=self.device)
        inputs = token.new_full((len(token), len(place)), self._pad)
        kept = (place >= first) & (place < first + length)
        inputs[:, :first] = token.new_tensor(self._before)
        inputs[kept] = token[place[: token.shape[1]] < length]
        for offset, special in enumerate(self._after):
            inputs.scatter_(1, first + length + offset, special)
        states, pooled = self._run(inputs, place < length + more, kept)
        states = states.masked_fill(~kept[:, :, None], 0)
        return states[:, first : first + token.shape[1]], pooled

    def _run(self, inputs: Tensor, inside: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Run the network.

        Args:
            inputs: ids with the special tokens, int64 [B,W].
            inside: whether a place is no padding, bool [B,W].
            kept: whether its state is a local feature, bool [B,W].

        Returns:
            States [B,W,C] and global features [B,D].
        """
        arguments = {"input_ids": inputs, "attention_mask": inside.long()}
        if self._layer is None:
            states = self.network(**arguments).last_hidden_state
        else:
            states = self.network(**arguments, output_hidden_states=True).hidden_states[self._layer]
        return states, maximum(states, kept)

    def words(self, texts: Sequence[str]) -> list[list[int | None]]:
        """Return the number of its word in the caption for each id that `tokenize` gives; None: a special token.

        Raises:
            EncoderError: the tokenizer does not tell.
        """
        if not self._tokenizer.is_fast:
            raise EncoderError(
                "the tokenizer of these text weights does not tell which pieces make a word, so words cannot be masked;"
                " set finetune.mask_words=0"
            )
        marks = {None, *(getattr(self._tokenizer, f"{mark}_token_id") for mark in ("bos", "eos", "pad"))}
        # CLIP's unknown token is the mark of the end, where its text tower stops reading.
        if self._tokenizer.mask_token_id is None and self._tokenizer.unk_token_id in marks:
            raise EncoderError(
                "the tokenizer of these text weights has neither a mask nor an unknown token apart from its marks, so"
                " words cannot be masked; set finetune.mask_words=0"
            )
        encodings = self._encodings(texts, truncation=True, max_length=self._room)
        return [encodings.word_ids(row) or [0] for row in range(len(texts))]

    @property
    def mask_token(self) -> int:
        """The id of a masked piece; where the tokenizer has none, that of an unknown one."""
        mask = self._tokenizer.mask_token_id
        return self._tokenizer.unk_token_id or 0 if mask is None else mask

    @property
    def plain_tokens(self) -> list[int]:
        """The ids of the vocabulary without the special tokens', ascending."""
        return sorted(set(self._tokenizer.get_vocab().values()) - set(self._tokenizer.all_special_ids))

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""
        return digest({name: value for name, value in self._state().items() if "pooler." not in name})

    def save(self, folder: Path) -> None:
        """Write the model, cut layers included, and the tokenizer as the hub has them."""
        with quiet():
            self.network.save_pretrained(folder, state_dict=self._state())
            self._tokenizer.save_pretrained(folder)

    def _state(self) -> dict[str, Tensor]:
        return {**self._above, **self.network.state_dict()}


def maximum(states: Tensor, kept: Tensor) -> Tensor:
    """Return the maximum [B,C] of the states [B,W,C] to keep; those of padding are not zero, and could be larger."""
    return states.masked_fill(~kept[:, :, None], -torch.inf).amax(1)


def _positions(model: Any, config: Any) -> int:
    """Return how many positions a model knows; RoBERTa and its kin begin to count after the padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return getattr(config, "max_position_embeddings", 512)


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that a tokenizer puts before and after a caption."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["special_tokens_mask"]
    own = [place for place, special in enumerate(mask) if not special] or [len(ids)]
    return ids[: own[0]], ids[own[-1] + 1 :]


def _max_length(weights: str, most: int, max_tokens: int | None, specials: int) -> int:
    """Return `max_tokens`, which must be more than the special tokens and no more than the model takes."""
    if max_tokens is not None and not specials < max_tokens <= most:
        raise EncoderError(
            f"text weights '{weights}' take {specials + 1} to {most} tokens a caption, {specials} of them special"
            f" tokens, and not {max_tokens}; choose another --max-tokens"
        )
    return max_tokens or most


@torch.inference_mode()
def _cut(model: Any, layer: int, ids: list[list[int]]) -> bool:
    """Drop the layers above `layer`; return whether the last hidden state is then that layer's.

    If not (layers that share their weights, or a normalisation after the last), the model stays as it was.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    stacks = [stack for stack in stacks if len(stack) == model.config.num_hidden_layers]
    if len(stacks) != 1:
        return False
    inputs = torch.tensor(ids, device=model.device)
    wanted = model(input_ids=inputs, output_hidden_states=True).hidden_states[layer]
    above = stacks[0][layer:]
    del stacks[0][layer:]
    try:
        alike = torch.equal(model(input_ids=inputs).last_hidden_state, wanted)
    except UnboundLocalError:  # DeBERTa's does not run without any layer
        alike = False
    if not alike:
        stacks[0].extend(above)
    return alike


def _tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of what a tokenizer does, without its settings of the moment."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        for momentary in ("version", "truncation", "padding"):
            content.pop(momentary, None)
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
