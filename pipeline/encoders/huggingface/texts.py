"""Token features of any text encoder of transformers, and the global feature that its authors use.

``bert`` is a model of the BERT family, whose global feature is the maximum of its tokens' states. Source: the models'
pages in transformers' documentation.
"""

import hashlib
import json
import os
import threading
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer

from ...device import to_host
from ...errors import EncoderError
from ..base import TextEncoder, choose_layer, library_versions
from ..spec import HUB, EncoderSpec, short_name
from ..weights import autocast, digest
from .hub import Checkpoint, load_from, load_model, quiet, states_of
from .sentences import Pooling, read_pooling

# Dask's tasks already run in parallel; the tokenizers' own threads warn when a process forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BERT = "bert-base-uncased"  # the published weights of ``bert``
# Settings that change the features of equal weights.
_SHAPING = (
    *("num_attention_heads", "hidden_act", "layer_norm_eps", "eos_token_id", "layer_norm_epsilon", "feed_forward_proj"),
    *("dense_act_fn", "activation", "relative_attention_num_buckets", "relative_attention_max_distance", "n_heads"),
)
_NEAR = 0.2  # of the length of states: how far rounding to bfloat16 may put them apart
# Models that were trained on captions padded to all of their positions.
_PADDED = ("siglip", "siglip2", "siglip_text_model", "siglip2_text_model")
# Towers of pictures and texts on their own. Other models' poolers are trained for other ends: BERT's to tell whether a
# sentence follows.
_POOLED = ("clip_text_model", "metaclip_2_text_model", "siglip_text_model", "siglip2_text_model")


class TokenEncoder(TextEncoder):
    """What encoders of captions share: the states of their tokens, special ones included, and one global feature."""

    takes = frozenset({"layer", "prompt", "weights"})
    kind = "tokens"
    suffix = ""  # `save` writes a folder
    network: Any
    identity: dict[str, Any]
    max_length: int  # tokens of a caption that the network sees, special tokens included
    _layer: int | None = None  # whose states are the local features; None: the last, after the model's own norm
    _last: int  # number of the last layer
    _what: str  # its name in errors
    _width = 0  # to how many tokens captions are padded at least
    _pad = 0  # the token that they are padded with
    _unused: tuple[str, ...] = ()  # parts of names of weights that do not decide the features

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        self.device, self._half, self._prompt = device, spec.half, spec.prompt

    def use_layer(self, layer: int) -> None:
        """Let the local features be those of a layer."""
        layer = choose_layer(self._what, layer, self._last + 1)
        self._layer = None if layer == self._last else layer
        states, pooled = self.encode(self.tokenize(["a"]))
        self.channels, self.global_channels = states.shape[1], pooled.shape[1]
        name = "last_hidden_state" if self._layer is None else f"hidden_states.{layer}"
        self.identity = {**self.identity, "layer": name}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each caption's tokens, at most `max_length`; a caption without any gets one unk."""
        return self._ids(self._prompted(texts), self.max_length)

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Return how many captions `tokenize` cuts short."""
        return sum(len(ids) > self.max_length for ids in self._ids(self._prompted(texts), self.max_length + 1))

    def _prompted(self, texts: Sequence[str]) -> list[str]:
        return [text if self._prompt is None else self._prompt.replace("{}", text) for text in texts]

    @abstractmethod
    def _ids(self, texts: list[str], most: int) -> list[list[int]]:
        """Return the ids of each text, at least one and at most so many."""

    def portable_tokenizer(self) -> Tokenizer:
        """Return a tokenizer of the library tokenizers that cuts texts, and pads them after their end, as here.

        EncoderError: this one is not of that library.
        """
        tokenizer = self._backend()
        if tokenizer is None:
            raise EncoderError(f"the tokenizer of '{self.name}' is not of the library tokenizers")
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.enable_truncation(self.max_length)
        tokenizer.enable_padding(pad_id=self._pad, length=self._width or None)
        return tokenizer

    @abstractmethod
    def _backend(self) -> Tokenizer | None:
        """Return what the library tokenizers makes ids by; None where another program does."""

    def encode(self, ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Encode captions as `tokenize` gives them: states, packed [sum of lengths,C], and global features [B,D]."""
        return to_host(*self.encode_layers(ids, [self])[0])

    @torch.inference_mode()
    def encode_layers(
        self, ids: Sequence[Sequence[int]], encoders: "Sequence[TokenEncoder]"
    ) -> list[tuple[Tensor, Tensor]]:
        """Return what `encode` of each encoder does, on the device; they differ in their layers alone."""
        length = torch.tensor([len(caption) for caption in ids])
        token = nn.utils.rnn.pad_sequence([torch.tensor(list(caption)) for caption in ids], True)
        found = self._features(token, length, [one._layer for one in encoders])
        # The places are found on the host: a GPU asked for them would have to be waited for.
        inside = (torch.arange(token.shape[1]) < length[:, None]).flatten().nonzero()[:, 0]
        inside = inside.to(self.device, non_blocking=True)
        return [(states.flatten(0, 1)[inside], pooled) for states, pooled in found]

    def features(self, token: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a padded batch of ids [B,N] and their lengths [B], int64, so that gradients reach `network`.

        Return states [B,N,C], zeros after the lengths, and the global feature of each caption [B,D], on the device.
        """
        return self._features(token, length, [self._layer])[0]

    def _features(self, token: Tensor, length: Tensor, layers: Sequence[int | None]) -> list[tuple[Tensor, Tensor]]:
        token = token.to(self.device, non_blocking=True)
        length = length.to(self.device, non_blocking=True)[:, None]
        lacking = self._width - token.shape[1]
        inputs = nn.functional.pad(token, (0, lacking)) if lacking > 0 else token
        inside = torch.arange(inputs.shape[1], device=self.device) < length
        found = self._run(inputs.masked_fill(~inside, self._pad), inside, layers)
        return [(one.masked_fill(~inside[:, :, None], 0)[:, : token.shape[1]], pooled) for one, pooled in found]

    @abstractmethod
    def _run(self, inputs: Tensor, inside: Tensor, layers: Sequence[int | None]) -> list[tuple[Tensor, Tensor]]:
        """Return of each layer states [B,W,C] and global features [B,D] of ids [B,W]; `inside` is false for padding."""

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""
        state = self.network.state_dict()
        return digest({key: value for key, value in state.items() if not any(part in key for part in self._unused)})


class HubTextEncoder(TokenEncoder):
    """Encode captions as the states of their tokens and one global feature.

    The global feature is the projected embedding of a model of pictures and texts (CLIP, SigLIP), of the last layer;
    else what a folder of sentence-transformers makes; else what the model itself pools, where it has no layer for that
    alone; else, and always of ``bert``, the maximum of the states.
    """

    _unused = ("logit_", "pooler.")

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        super().__init__(spec, device)
        bert, source = spec.name == "bert", spec.source or BERT
        if not bert and spec.weights is not None:
            raise EncoderError(f"'{spec.name}' names its weights itself; leave {spec.weights} out")
        self.name = short_name(source)
        loaded = load_from(source, "text", spec.trust and not bert, lambda found: _load(found, bert, spec.prompt))
        self.network, self._tokenizer, self._pooling, self.space = loaded
        self._lock = threading.Lock()  # a tokenizer keeps its settings for truncation between calls
        self._joint = hasattr(self.network, "get_text_features")
        self._half = spec.half and not bert
        config, pads = getattr(self.network.config, "text_config", self.network.config), []
        if not bert:
            pads = [self._tokenizer.pad_token_id]
            self._width = int(config.max_position_embeddings) if config.model_type in _PADDED else 0
        self._left = self._width > 0 and self._tokenizer.padding_side == "left"
        self._masked = not self._width or "attention_mask" in self._tokenizer.model_input_names
        self._pad = int(next((pad for pad in [*pads, config.pad_token_id] if pad is not None), 0))
        self._global = self._pooled(config, bert)
        most = self._pooling.most if self._pooling is not None else None
        limits = [self._tokenizer.model_max_length, _positions(self.network, config)]
        self.max_length = min(limits if most is None else [*limits, most])
        checkpoint = Checkpoint(source, "text")
        self._what, self._last = str(checkpoint), getattr(config, "num_hidden_layers", 0)
        self.network.to(device=device).eval().requires_grad_(False)
        self.identity = self._identity(config, bert)
        self.versions = library_versions("torch", "transformers", "tokenizers") | checkpoint.commit()
        self._require_unseen_padding()
        self.use_layer(spec.layer)

    def _require_unseen_padding(self) -> None:
        ids = self.tokenize(["a", "a text of seven words or more"])
        (states, pooled), (alone, pooled_alone) = self.encode(ids), self.encode(ids[:1])
        pairs = (states[: len(alone)], alone), (pooled[:1], pooled_alone)
        if any(np.linalg.norm(beside - own) > _NEAR * np.linalg.norm(own) for beside, own in pairs):
            sees = "sees the padding of a text beside a longer one, so that its features would depend on others"
            raise EncoderError(f"{self._what}: the model {sees}; take another text encoder")

    def _identity(self, config: Any, bert: bool) -> dict[str, Any]:
        settings = {key: value for key in _SHAPING if (value := getattr(config, key, None)) is not None}
        side = self._tokenizer.padding_side
        padding = {"tokens": self._width, "with": self._pad, "side": side, "masked": self._masked}
        return {
            "encoder": "bert" if bert else HUB.rstrip(":"),
            "weights": self.weights_id(),
            "model": {"class": type(self.network).__name__, **settings},
            "preprocessing": {
                "tokenizer": tokenizer_digest(self._tokenizer),
                "max_length": self.max_length,
                **({} if self._prompt is None else {"prompt": self._prompt}),
                **({"padding": padding} if self._width else {}),
            },
            **({} if bert else {"global": self._global}),
        }

    def _pooled(self, config: Any, bert: bool) -> str:
        if self._joint:
            return "projected"
        if self._pooling is not None:
            return self._pooling.described
        return "pooled" if not bert and config.model_type in _POOLED else "maximum"

    def _ids(self, texts: list[str], most: int) -> list[list[int]]:
        encodings = self._encodings(texts, most)["input_ids"] if texts else []
        return [ids or [self._tokenizer.unk_token_id or 0] for ids in encodings]

    def _backend(self) -> Tokenizer | None:
        return self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None

    def _encodings(self, texts: list[str], most: int) -> Any:
        with self._lock:
            return self._tokenizer(texts, padding=False, truncation=True, max_length=most)

    def _run(self, inputs: Tensor, inside: Tensor, layers: Sequence[int | None]) -> list[tuple[Tensor, Tensor]]:
        # Where captions are padded to all positions and before them, they move on by what is no caption.
        ahead = inputs.shape[1] - inside.sum(1, keepdim=True) if self._left else None
        arguments = {"input_ids": _turned(inputs, ahead)}
        if self._masked:
            arguments["attention_mask"] = _turned(inside.long(), ahead)
        run: Any = self.network.get_text_features if self._joint else self.network
        with autocast(self.device, self._half):
            found = run(**arguments, output_hidden_states=any(layer is not None for layer in layers))

        def features(layer: int | None) -> tuple[Tensor, Tensor]:
            states = _turned(states_of(found, layer).float(), None if ahead is None else -ahead)
            if self._global in ("projected", "pooled"):
                return states, found.pooler_output.float()
            if self._pooling is not None:
                return states, self._pooling.pool(states, inside)
            # The states of padding are not zero, and could be larger.
            return states, states.masked_fill(~inside[:, :, None], -torch.inf).amax(1)

        return [features(layer) for layer in layers]

    def words(self, texts: Sequence[str]) -> list[list[int | None]]:
        """Return the number of its word in the caption for each id that `tokenize` gives; None: a special token.

        EncoderError: the tokenizer marks no words, or has nothing to put in their place.
        """
        marks = {None, *(getattr(self._tokenizer, f"{mark}_token_id") for mark in ("bos", "eos", "pad"))}
        # CLIP's unknown token is the mark of the end, where its text tower stops reading.
        unmasked = self._tokenizer.mask_token_id is None and self._tokenizer.unk_token_id in marks
        if unmasked or not self._tokenizer.is_fast:
            lacks = "neither a mask nor an unknown token" if unmasked else "no marks of which pieces make a word"
            raise EncoderError(
                f"the tokenizer of '{self.name}' has {lacks}, so words cannot be masked; set finetune.mask_words=0"
            )
        encodings = self._encodings(self._prompted(texts), self.max_length)
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

    def save(self, folder: Path) -> None:
        """Write the model, the tokenizer and the pooling as the hub has them."""
        with quiet():
            self.network.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
        if self._pooling is not None:
            self._pooling.save(folder)


def _turned(rows: Tensor, by: Tensor | None) -> Tensor:
    """Return `rows` [B,W] or [B,W,C] moved on by so many places [B,1]; what leaves at the end comes in at the start."""
    if by is None:
        return rows
    width = rows.shape[1]
    places = (torch.arange(width, device=rows.device) - by) % width
    return rows.gather(1, places if rows.ndim == 2 else places[:, :, None].expand_as(rows))


def _load(checkpoint: Checkpoint, bert: bool, prompt: str | None) -> tuple[Any, Any, Pooling | None, str | None]:
    """Return a model, its tokenizer, how a folder of sentence-transformers pools, and the model's space."""
    config = checkpoint.load(AutoConfig)
    seq2seq = getattr(config, "is_encoder_decoder", False)
    if bert and (seq2seq or hasattr(config, "text_config")):
        raise EncoderError(
            f"{checkpoint} are of a {config.model_type} model, and 'bert' takes the BERT family; give them as"
            f" {HUB}{checkpoint.source}"
        )
    alone = str((config.architectures or [""])[0]).endswith("EncoderModel")  # as the encoder of T5 is saved
    auto = AutoModelForTextEncoding if alone or seq2seq else AutoModel
    model, _, space = load_model(checkpoint, auto, **({"attn_implementation": "eager"} if bert else {}))
    if model.main_input_name != "input_ids" and not hasattr(model, "get_text_features"):
        raise EncoderError(
            f"{checkpoint} are a {type(model).__name__}, which takes no texts; give a text model, or use it as --visual"
        )
    tokenizer = checkpoint.load(AutoTokenizer)
    vocabulary, rows = tokenizer.get_vocab(), getattr(config, "text_config", config).vocab_size
    # Without its files a tokenizer is made all the same, and knows the special tokens only.
    if not set(vocabulary) - set(tokenizer.all_special_tokens):
        raise FileNotFoundError("its tokenizer lacks a vocabulary: vocab.txt or tokenizer.json")
    if max(vocabulary.values()) >= rows:
        raise EncoderError(
            f"{checkpoint}: the tokenizer has {len(vocabulary)} tokens and the model knows {rows}; put the model's own"
            " tokenizer next to it"
        )
    return model, tokenizer, None if bert else read_pooling(checkpoint, prompt), space


def _positions(model: Any, config: Any) -> int:
    """Return how many positions a model knows; RoBERTa and its kin begin to count after the padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return getattr(config, "max_position_embeddings", 512)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of what a tokenizer does, without its settings of the moment."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        for momentary in ("version", "truncation", "padding"):
            content.pop(momentary, None)
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
