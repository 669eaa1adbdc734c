"""Checkpoints of transformers of a moment, in folders as the hub has them: one small random model of each family."""

from functools import partial

import torch
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SIDE = 32
VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": SIDE,
    "patch_size": 8, "initializer_range": 0.3,
}  # fmt: skip
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 60,
    "max_position_embeddings": 20, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
BERT = {**TEXT, "pad_token_id": 2}
VOCABULARY = ["<s>", "</s>", "<pad>", "<unk>", "<mask>", "a", "picture", "of", "thing", "number", *map(str, range(30))]
VOCABULARY += ["photo", "red", "square", "two", "dogs"]
MAPS = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "initializer_range": 0.3}
SWIN = {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
STRETCH = {"size": {"height": SIDE, "width": SIDE}}
CROP = {"size": {"shortest_edge": 36}, "crop_size": {"height": SIDE, "width": SIDE}}


def _joint(model, config, **settings):
    text = {**TEXT, "projection_size": VIT["hidden_size"]} if model is hf.SiglipModel else TEXT
    return model(config(vision_config=VIT, text_config=text, **settings))


def _paligemma():
    """Of pictures and texts, but with one vector for each patch, which its language model reads."""
    text = {**TEXT, "model_type": "gemma", "head_dim": 8, "num_key_value_heads": 1}
    vision = {**VIT, "model_type": "siglip_vision_model", "projection_dim": 16}
    config = hf.PaliGemmaConfig(vision_config=vision, text_config=text, projection_dim=16, image_token_index=5)
    return hf.PaliGemmaForConditionalGeneration(config), hf.SiglipImageProcessor(**STRETCH)


def _alone(name, processor, kind="Model", **settings):
    """Return what makes a model of a library's class and its image processor."""
    return lambda: (getattr(hf, f"{name}{kind}")(getattr(hf, f"{name}Config")(**settings)), processor())


_CROPPED, _STRETCHED = partial(hf.CLIPImageProcessor, **CROP), partial(hf.ViTImageProcessor, **STRETCH)
_BIT, _EDGE = partial(hf.BitImageProcessor, **CROP), partial(hf.ConvNextImageProcessor, size={"shortest_edge": 64})
_OBLONG = partial(hf.BitImageProcessor, size={"shortest_edge": 64}, crop_size={"height": SIDE, "width": 48})
_DEIT = partial(hf.DeiTImageProcessor, size={"height": 36, "width": 36}, crop_size=CROP["crop_size"])
# By family the model and the image processor that its checkpoints have.
IMAGE_FAMILIES = {
    "clip": lambda: (_joint(hf.CLIPModel, hf.CLIPConfig, projection_dim=24), _CROPPED()),
    "siglip": lambda: (_joint(hf.SiglipModel, hf.SiglipConfig), hf.SiglipImageProcessor(**STRETCH)),
    "siglip2": lambda: (_joint(hf.SiglipModel, hf.SiglipConfig), hf.SiglipImageProcessor(**STRETCH, resample=2)),
    "metaclip2": lambda: (_joint(hf.MetaClip2Model, hf.MetaClip2Config, projection_dim=24), _CROPPED()),
    "paligemma": _paligemma,
    "dinov2": _alone("Dinov2", _BIT, **VIT, mlp_ratio=2),
    "oblong": _alone("Dinov2", _OBLONG, **VIT, mlp_ratio=2),
    "dinov2-registers": _alone("Dinov2WithRegisters", _BIT, **VIT, mlp_ratio=2, num_register_tokens=3),
    "dinov3": _alone("DINOv3ViT", partial(hf.DINOv3ViTImageProcessor, **STRETCH), **VIT, num_register_tokens=4),
    "vit": _alone("ViT", _STRETCHED, **VIT),
    "vit-classifier": _alone("ViT", _STRETCHED, "ForImageClassification", **VIT),
    "deit": _alone("DeiT", _DEIT, **VIT),
    "beit": _alone("Beit", partial(hf.BeitImageProcessor, **STRETCH), **VIT, use_mean_pooling=True),
    "swin": _alone("Swin", _STRETCHED, **SWIN, initializer_range=0.3),
    "swinv2": _alone("Swinv2", _STRETCHED, **SWIN),
    "convnext": _alone("ConvNext", _EDGE, **MAPS),
    "convnextv2": _alone("ConvNextV2", _EDGE, **MAPS),
    "resnet": _alone("ResNet", _EDGE, embedding_size=8, hidden_sizes=MAPS["hidden_sizes"], depths=MAPS["depths"]),
}


def save_image_model(folder, family, seed=0):
    """Write a checkpoint of a family of `IMAGE_FAMILIES`; return the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, processor = IMAGE_FAMILIES[family]()
        for name, value in model.named_parameters():
            if value.ndim == 1 and "norm" not in name and "lambda" not in name:
                torch.nn.init.normal_(value, std=0.3)  # biases, which the library begins with zeros
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


# By family the model, what its tokenizer puts before and after a caption, and further settings of the tokenizer.
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 60}
_DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 60, "max_position_embeddings": 20}
_IDS = {"model_input_names": ["input_ids"]}
_text = partial(_alone, processor=lambda: None)
TEXT_FAMILIES = {
    "clip": (IMAGE_FAMILIES["clip"], ("<s>", "</s>"), {"pad_token": "</s>"}),
    "metaclip2": (IMAGE_FAMILIES["metaclip2"], ("<s>", "</s>"), {"pad_token": "</s>"}),
    "siglip": (IMAGE_FAMILIES["siglip"], ("", "</s>"), {"pad_token": "</s>", **_IDS}),
    "siglip-masked": (IMAGE_FAMILIES["siglip"], ("", "</s>"), {}),
    "siglip-left": (IMAGE_FAMILIES["siglip"], ("", "</s>"), {"padding_side": "left", **_IDS}),
    "clip-text": (_text("CLIPText", **TEXT), ("<s>", "</s>"), {}),
    "bert": (_text("Bert", **BERT), ("<s>", "</s>"), {}),
    "roberta": (_text("Roberta", **{**BERT, "max_position_embeddings": 23}), ("<s>", "</s>"), {}),
    "distilbert": (_text("DistilBert", **_DISTIL, pad_token_id=2, initializer_range=0.3), ("<s>", "</s>"), {}),
    "mpnet": (
        _text("MPNet", **{**BERT, "pad_token_id": 1, "max_position_embeddings": 22}),
        *(("<s>", "</s>"), {"pad_token": "</s>"}),
    ),
    "t5": (_text("T5", **_T5, pad_token_id=2, eos_token_id=1), ("", "</s>"), {}),
}


def save_text_model(folder, family, seed=0):
    """Write a checkpoint of a family of `TEXT_FAMILIES`, with its image processor if it has one; return the folder."""
    make, (begin, end), settings = TEXT_FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, processor = make()
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    save_tokenizer(folder, begin, end, **settings)
    return folder


def save_tokenizer(folder, begin, end, **settings):
    """Write a tokenizer of whole words in lower case."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, "<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around = " ".join(filter(None, (begin, "$A", end)))
    specials = [(word, VOCABULARY.index(word)) for word in (begin, end) if word]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=specials)
    named = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    named = {f"{name}_token": word for name, word in named.items()}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**named, **settings}).save_pretrained(folder)


def save_sentence_model(folder, mode, normalised, legacy=False, seed=0):
    """Write a folder of sentence-transformers around a small MPNet, by that library; return the folder."""
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import modules

    plain = save_text_model(folder.with_name(f"{folder.name}-plain"), "mpnet", seed)
    parts = [modules.Transformer(str(plain), max_seq_length=12), modules.Pooling(16, pooling_mode=mode)]
    st.SentenceTransformer(modules=[*parts, *([modules.Normalize()] if normalised else [])], device="cpu").save(
        str(folder)
    )
    return folder
