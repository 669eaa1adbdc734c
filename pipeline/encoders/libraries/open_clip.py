"""Both towers of open_clip's models: states of patches or tokens, and the projected embedding.

Source: open_clip's README, "Usage", and `forward_intermediates` of its models.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from ...errors import EncoderError, nearest
from .. import weights
from ..base import in_passes, library_versions, load_library, require_cut
from ..grid import GRID_OPTIONS, Grid
from ..huggingface.hub import plain, quiet, states_of
from ..huggingface.texts import TokenEncoder, tokenizer_digest
from ..spec import EncoderSpec


class ClipImageEncoder(Grid):
    """Encode images as the patches or cells of an image tower, and its projected embedding.

    Layer -1 is the last, after the model's norm where that goes over the patches.
    """

    takes = GRID_OPTIONS | {"layer"}

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        self.device, self._half = device, spec.half
        model, self.name, self.space, described = _load(spec, "visual")
        tower = self.network = model.visual.to(device)
        transform = import_module("open_clip.transform")
        pictures = transform.PreprocessCfg(**tower.preprocess_cfg)
        if spec.whole:
            require_cut(spec.name, pictures.resize_mode != "squash")
            pictures = replace(pictures, resize_mode="squash")
        *steps, _, normalize = transform.image_transform_v2(pictures, is_train=False).transforms
        self._prepare_by(steps, normalize.mean, normalize.std)
        height, width = (pictures.size,) * 2 if isinstance(pictures.size, int) else pictures.size
        trunk = getattr(tower, "trunk", None)  # of timm
        before = getattr(trunk, "num_prefix_tokens", 0) if trunk is not None else int(hasattr(tower, "class_embedding"))
        # Where a tower pools before its norm, or by attention, that norm is not of the patches.
        own = getattr(tower, "attn_pool", None) is None and not getattr(tower, "final_ln_after_pool", False)
        norm = trunk is not None or (own and hasattr(tower, "ln_post"))
        self._what, self._pixels = spec.name, weights.noise((height, width)).to(device)
        with torch.inference_mode(), weights.autocast(device, spec.half):
            maps = tower.forward_intermediates(self._pixels, intermediates_only=True)["image_intermediates"]
        self._last = len(maps) - 1
        self._normed = self._last if norm else None
        settings = {key: plain(getattr(pictures, key)) for key in ("mean", "std", "interpolation", "resize_mode")}
        shown = {
            "shortest": {"resize": height, "crop": height},
            "squash": {"stretch": height},
            "longest": {"resize": height, "pad": height},
        }
        self.identity: dict[str, Any] = {
            "encoder": "open_clip",
            "weights": described.get("weights") or self.weights_id(),
            "preprocessing": {
                **{"decoder": "pillow", "processor": "open_clip", "size": [height, width], **settings},
                **(shown[pictures.resize_mode] if height == width else {}),
            },
            "tokens_left_out": before,
            "global": "projected",
            **described,
        }
        self.versions = library_versions("torch", "torchvision", "open_clip", "timm", "PIL")
        self.use_layer(spec.layer)

    def _run(self, pixels: Tensor, layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        network: Any = self.network
        maps: dict[int, Tensor] = {}
        for wanted in in_passes(layers, self._normed):
            indices = sorted({*wanted, self._last})  # CLIP's ResNets stop at the last that is asked for
            found = network.forward_intermediates(
                pixels, indices=indices, normalize_intermediates=wanted == [self._normed]
            )
            maps |= dict(zip(indices, found["image_intermediates"], strict=True))
        return [(maps[layer], found["image_features"]) for layer in layers]

    def _state(self) -> dict[str, Tensor]:
        return {f"visual.{name}": value for name, value in self.network.state_dict().items()}


class ClipTextEncoder(TokenEncoder):
    """Encode captions as the states of their tokens in a text tower, and its projected embedding.

    Layer 0 are the embeddings, -1 the last states, after the model's norm.
    """

    suffix = ".safetensors"  # of what `save` writes

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        super().__init__(spec, device)
        model, self.name, self.space, described = _load(spec, "text")
        self.network = model.text
        tokenizer = self._load_tokenizer(described["model"]["name"])
        blocks = getattr(self.network.transformer, "resblocks", None)  # None: a tower of transformers
        self._what = spec.name
        self._last = self.network.config.num_hidden_layers if blocks is None else len(blocks)
        self.network.to(device=device).eval().requires_grad_(False)
        self.identity = {
            "encoder": "open_clip",
            "weights": described.get("weights") or self.weights_id(),
            "preprocessing": {
                "tokenizer": tokenizer,
                "max_length": self.max_length,
                **({} if spec.prompt is None else {"prompt": spec.prompt}),
                "padding": {"tokens": self._width, "with": self._pad},
            },
            "global": "projected",
            **described,
        }
        self.versions = library_versions("torch", "open_clip", "transformers")
        self.use_layer(spec.layer)

    def _load_tokenizer(self, arch: str) -> str:
        with quiet():
            self._tokenizer = import_module("open_clip").get_tokenizer(arch)
        inner = getattr(self._tokenizer, "tokenizer", None)  # of transformers
        self._pad = 0 if inner is None else int(inner.pad_token_id)
        self._pads_with_end = inner is not None and inner.pad_token_id == inner.eos_token_id  # as SigLIP's
        self._width = self.max_length = min(int(self._tokenizer.context_length), int(self.network.context_length))
        if inner is not None:
            return tokenizer_digest(inner)
        words = {"class": type(self._tokenizer).__name__, "vocabulary": self._tokenizer.encoder}
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()

    def _ids(self, texts: list[str], most: int) -> list[list[int]]:
        rows = self._tokenizer(texts, context_length=most).tolist() if texts else []
        for row in rows:
            while row and row[-1] == self._pad:
                row.pop()
            if self._pads_with_end or not row:
                row.append(self._pad)
        return rows

    def _backend(self) -> Tokenizer | None:
        tokenizer: Any = self._tokenizer
        if hasattr(tokenizer, "tokenizer"):
            return tokenizer.tokenizer.backend_tokenizer
        if type(tokenizer).__name__ != "SimpleTokenizer":
            return None
        ends = [(tokenizer.decoder[mark], mark) for mark in (tokenizer.sot_token_id, tokenizer.eot_token_id)]
        merges = list(tokenizer.bpe_ranks)
        backend = Tokenizer(models.BPE(tokenizer.encoder, merges, end_of_word_suffix="</w>", unk_token=ends[1][0]))
        # Of what its ftfy mends in texts: composed characters and straight quotes.
        quotes = [normalizers.Replace(Regex(curly), straight) for curly, straight in (("[‘’‚‛]", "'"), ("[“”„‟]", '"'))]
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), *quotes, normalizers.Lowercase()])
        words = Regex(tokenizer.pat.pattern)
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "removed", invert=True), to_bytes])
        backend.post_processor = processors.TemplateProcessing(
            f"{ends[0][0]} $0 {ends[1][0]}", f"{ends[0][0]} $A $B {ends[1][0]}", ends
        )
        return backend

    def _run(self, inputs: Tensor, inside: Tensor, layers: Sequence[int | None]) -> list[tuple[Tensor, Tensor]]:
        with weights.autocast(self.device, self._half):
            of_blocks = hasattr(self.network, "forward_intermediates")
            states, pooled = (self._of_blocks if of_blocks else self._of_transformers)(inputs, layers)
        return [(one.float(), pooled.float()) for one in states]

    def _of_blocks(self, inputs: Tensor, layers: Sequence[int | None]) -> tuple[list[Tensor], Tensor]:
        found = self.network.forward_intermediates(inputs, output_fmt="NLC")
        blocks = found["text_intermediates"]

        def states(layer: int | None) -> Tensor:
            if layer == 0:
                embedded: Tensor = self.network.token_embedding(inputs)
                return embedded + self.network.positional_embedding[: inputs.shape[1]]
            return self.network.ln_final(blocks[-1]) if layer is None else blocks[layer - 1]

        return [states(layer) for layer in layers], found["text_features"]

    def _of_transformers(self, inputs: Tensor, layers: Sequence[int | None]) -> tuple[list[Tensor], Tensor]:
        """Do what `HFTextEncoder.forward` does, and keep the states."""
        mask = (inputs != self.network.config.pad_token_id).long()
        found = self.network.transformer(input_ids=inputs, attention_mask=mask, output_hidden_states=True)
        return [states_of(found, layer) for layer in layers], self.network.proj(self.network.pooler(found, mask))

    def words(self, texts: Sequence[str]) -> list[list[int | None]]:
        """Raise EncoderError: the library's tokenizers mark no words and have no mask."""
        raise EncoderError("open_clip's tokenizers cannot mask words; set finetune.mask_words=0")

    def save(self, path: Path) -> None:
        """Write the tower as a ``.safetensors`` file, named as in a file of both towers."""
        state = self.network.state_dict()
        save_file({f"text.{name}": value.detach().cpu().contiguous() for name, value in state.items()}, path)


def _load(spec: EncoderSpec, tower: Literal["visual", "text"]) -> tuple[Any, str, str | None, dict[str, Any]]:
    """Load a model on the CPU, of which one tower is wanted; only that has to be in a file.

    Return the model, frozen; the name of a set; the space of both towers, None where only one was read; and entries of
    the identity: ``model``, and of random weights ``weights``. EncoderError: open_clip is not installed, there is no
    such architecture or tag, or the weights do not fit.
    """
    library, source = load_library("open_clip", "open-clip"), weights.seed_or_file(spec)
    arch, _, tag = spec.model.rpartition("/") if "/" in spec.model else (spec.model, "", "")
    arch = arch.replace("/", "-")
    config = _config(library, arch, tag, source is None)
    described: dict[str, Any] = {"model": {"name": arch} | ({"tag": tag} if tag else {})}
    settings: dict[str, Any] = {"force_custom_text": True, "pretrained_text": False}
    size = config["vision_cfg"].get("image_size", 224)
    sides = {size} if isinstance(size, int) else set(size)
    if spec.image_size is not None and spec.image_size not in sides:
        settings["force_image_size"] = spec.image_size
    if source is None:
        settings["pretrained"] = tag
    elif tag:
        settings["force_preprocess_cfg"] = library.get_pretrained_cfg(arch, tag)
    torch.default_generator.manual_seed(source if isinstance(source, int) else 0)
    with quiet():
        model = library.create_model(arch, **settings)
        if isinstance(source, int):
            described["weights"] = f"random:{source}"
            weights.settle_norms(model.visual, lambda: model.visual(weights.noise_images(16, max(sides))))
    both = _fill(model, spec, weights.read_weights(source, spec.trust), tower) if isinstance(source, Path) else True
    weights.require_finite(model, f"the weights of {spec.name}")
    name = f"{arch}-{tag}" if source is None else arch
    return model.eval().requires_grad_(False), name, _space(model) if both else None, described


def _config(library: Any, arch: str, tag: str, published: bool) -> dict[str, Any]:
    known = library.list_models()
    if arch not in known:
        raise EncoderError(f"open_clip has no architecture '{arch}'{nearest(arch, known)}; see open_clip.list_models()")
    config: dict[str, Any] = library.get_model_config(arch)
    tags = library.list_pretrained_tags_by_model(arch)
    if (tag or published) and tag not in tags:
        raise EncoderError(
            f"open_clip has no weights '{arch}/{tag}'{nearest(tag, tags)}; give a file, or open_clip:{arch}/TAG (its"
            f" tags: {', '.join(tags) or 'none'})"
        )
    quick = tag and library.get_pretrained_cfg(arch, tag).get("quick_gelu") and not config.get("quick_gelu")
    if quick and f"{arch}-quickgelu" in known:  # open_clip only warns, and gives other features
        raise EncoderError(
            f"open_clip:{arch}/{tag}: these weights were trained with another activation than {arch} has; give"
            f" open_clip:{arch}-quickgelu/{tag}"
        )
    return config


def _fill(model: Any, spec: EncoderSpec, state: dict[str, Tensor], tower: str) -> bool:
    """Fill a model from a state dict, as `open_clip.load_checkpoint` does; return whether both towers were in it."""
    library = import_module("open_clip.model")
    state = import_module("open_clip.convert").convert_state_dict(model, state)
    if "positional_embedding" in state:
        state = library.convert_to_custom_text_state_dict(state)
    state = {key: value for key, value in state.items() if not _idle(key)}
    own = {key: value for key, value in model.state_dict().items() if not _idle(key)}
    try:
        library.resize_pos_embed(state, model)
        library.resize_text_pos_embed(state, model)
    except (AssertionError, AttributeError, RuntimeError):
        pass  # what has another shape is named below
    both = any(key in own and not key.startswith(f"{tower}.") for key in state)
    weights.require_fit({key: value for key, value in own.items() if both or key.startswith(f"{tower}.")}, state, spec)
    model.load_state_dict({**model.state_dict(), **state})
    return both


def _idle(key: str) -> bool:
    return key.startswith("logit_") or key.endswith(".position_ids")


def _space(model: Any) -> str:
    """Return the digest of both towers without positions of images, which go with the pictures' size."""
    positions = re.compile(r"visual\..*pos")
    parts = {key: value for key, value in model.named_parameters() if not (_idle(key) or positions.match(key))}
    return weights.digest(parts)
