"""Token features of any text encoder of transformers, and the global feature that its authors use.

Source: the models' pages in transformers' documentation; sentence-transformers' folders say themselves how they pool.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding

from ...errors import EncoderError
from ..weights import digest
from .bert import BertEncoder, maximum
from .hub import autocast, load_from, load_model, load_tokenizer, place_of
from .sentences import Pooling, read_pooling

# Settings that change the features of equal weights.
_SHAPING = (
    *("num_attention_heads", "hidden_act", "layer_norm_eps", "eos_token_id", "layer_norm_epsilon", "feed_forward_proj"),
    *("dense_act_fn", "activation", "relative_attention_num_buckets", "relative_attention_max_distance", "n_heads"),
)
# Models that were trained on captions padded to all of their positions.
_PADDED = ("siglip", "siglip2", "siglip_text_model", "siglip2_text_model")


# Towers of such models on their own. Other models' poolers are trained for other ends: BERT's to tell whether a
# sentence follows.
_POOLED = ("clip_text_model", "metaclip_2_text_model", "siglip_text_model", "siglip2_text_model")


class HubTextEncoder(BertEncoder):
    """Encode captions as the states of their tokens and one global feature.

    The global feature is the projected embedding of a model of pictures and texts (CLIP, SigLIP), of the last layer;
    else what a sentence-transformers folder says; else what the model itself pools, where it has no layer for that
    alone; else the maximum of the states.

    Args:
        weights, device, layer, special_tokens, max_tokens, prompt: as of `registry.load_text`.
        half: let a GPU compute in bfloat16.
        trust: let a program that comes with the checkpoint run.

    Raises:
        EncoderError: there is no such model, it is incomplete, or an option does not fit it.
    """

    _advice = "another text encoder"

    def __init__(
        self,
        weights: str,
        device: str,
        layer: int = -1,
        special_tokens: bool = True,
        max_tokens: int | None = None,
        prompt: str | None = None,
        *,
        half: bool = True,
        trust: bool = False,
    ) -> None:
        self._half, self._trust = half, trust
        self._global = ""
        super().__init__(weights, device, layer, special_tokens, max_tokens, prompt)

    def _load(self, weights: str) -> tuple[Any, Any]:
        model, tokenizer, self._pooling, self.space = load_from(
            weights, "text", lambda off: _load(weights, off, self._trust)
        )
        if self._prompt is None and self._pooling is not None and self._pooling.prompt is not None:
            raise EncoderError(
                f"text weights '{weights}' are meant to see {self._pooling.prompt!r} before every text; give"
                f" --prompt '{self._pooling.prompt}{{}}', another prompt, or --prompt '{{}}' for none"
            )
        self._joint = hasattr(model, "get_text_features")
        config = getattr(model.config, "text_config", model.config)
        if config.model_type in _PADDED:
            self._width = int(config.max_position_embeddings)
        self._masked = not self._width or "attention_mask" in tokenizer.model_input_names
        self._global = self._way(model)
        return model, tokenizer

    def _longest(self) -> int:
        seen = None if self._pooling is None else self._pooling.most
        return super()._longest() if seen is None else min(seen, super()._longest())

    def _way(self, model: Any) -> str:
        """Return where the global feature comes from."""
        if self._joint:
            return "projected"
        if self._pooling is not None:
            return self._pooling.described
        return "pooled" if model.config.model_type in _POOLED else "maximum"

    @property
    def _config(self) -> Any:
        return getattr(self.network.config, "text_config", self.network.config)

    def _padding(self) -> int:
        pad = self._tokenizer.pad_token_id
        return super()._padding() if pad is None else int(pad)

    def _stop_at(self, layer: int) -> None:
        if self._global in ("projected", "pooled"):  # of the last layer
            self._layer = layer
        else:
            super()._stop_at(layer)

    def _identify(self, layer: str) -> dict[str, Any]:
        identity = super()._identify(layer)
        if self._width:
            identity["preprocessing"]["padding"] = {
                "tokens": self._width,
                "with": self._pad,
                "side": self._tokenizer.padding_side,
                "masked": self._masked,
            }
        return {**identity, "encoder": "hf", "global": self._global}

    def _settings(self) -> dict[str, Any]:
        return {key: value for key in _SHAPING if (value := getattr(self._config, key, None)) is not None}

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""
        unused = ("logit_", "pooler.")
        return digest({key: value for key, value in self._state().items() if not any(part in key for part in unused)})

    def save(self, folder: Path) -> None:
        """Write the model, cut layers included, the tokenizer and the pooling as the hub has them."""
        super().save(folder)
        if self._pooling is not None:
            self._pooling.save(folder)

    def _run(self, inputs: Tensor, inside: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        width = inputs.shape[1]
        places = torch.arange(width, device=inputs.device)
        # Where captions are padded before them, the places move on by what is no caption.
        ahead = width - inside.sum(1, keepdim=True) if self._tokenizer.padding_side == "left" else places[:1]
        moved = (places - ahead) % width
        arguments = {"input_ids": inputs.gather(1, moved.expand_as(inputs))}
        if self._masked:
            arguments["attention_mask"] = inside.long().gather(1, moved.expand_as(inputs))
        run: Any = self.network.get_text_features if self._joint else self.network
        with autocast(self.device, self._half):
            found = run(**arguments, output_hidden_states=self._layer is not None)
        states = (found.last_hidden_state if self._layer is None else found.hidden_states[self._layer]).float()
        back = ((places + ahead) % width).expand_as(inputs)
        states = states.gather(1, back[:, :, None].expand_as(states))
        if self._global in ("projected", "pooled"):
            return states, found.pooler_output.float()
        return states, maximum(states, kept) if self._pooling is None else self._pooling.pool(states, inside)


def _load(weights: str, offline: bool, trust: bool) -> tuple[Any, Any, Pooling | None, str | None]:
    """Return a model, its tokenizer, how a sentence-transformers folder pools, and the model's space."""
    name, options = place_of(weights, offline)
    config = AutoConfig.from_pretrained(name, **options, trust_remote_code=trust)
    alone = str((config.architectures or [""])[0]).endswith("EncoderModel")  # as the encoder of T5 is saved
    auto = AutoModelForTextEncoding if alone or getattr(config, "is_encoder_decoder", False) else AutoModel
    model, _, space = load_model(weights, "text", offline, trust, auto)
    if model.main_input_name != "input_ids" and not hasattr(model, "get_text_features"):
        raise EncoderError(
            f"text weights '{weights}' are a {type(model).__name__}, which takes no texts; give a text model, or use it"
            " as --visual"
        )
    pooling = read_pooling(weights, offline)
    tokenizer = load_tokenizer(weights, offline, getattr(config, "text_config", config), trust)
    return model, tokenizer, pooling, space
