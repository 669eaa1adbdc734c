"""Checkpoints of transformers of a moment, in folders as the hub has them: one small random model of each family."""

import torch
import transformers as hf

SIDE = 32
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": SIDE,
    "patch_size": 8,
    "initializer_range": 0.3,
}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 20,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MAPS = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "initializer_range": 0.3}
SWIN = {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
STRETCH = {"size": {"height": SIDE, "width": SIDE}}
CROP = {"size": {"shortest_edge": 36}, "crop_size": {"height": SIDE, "width": SIDE}}


def _joint(model, config, **settings):
    return model(config(vision_config=VIT, text_config=TEXT, **settings))


# By family the model and the image processor that its checkpoints have.
IMAGE_FAMILIES = {
    "clip": lambda: (_joint(hf.CLIPModel, hf.CLIPConfig, projection_dim=24), hf.CLIPImageProcessor(**CROP)),
    "siglip": lambda: (_joint(hf.SiglipModel, hf.SiglipConfig), hf.SiglipImageProcessor(**STRETCH)),
    "siglip2": lambda: (_joint(hf.SiglipModel, hf.SiglipConfig), hf.SiglipImageProcessor(**STRETCH, resample=2)),
    "metaclip2": lambda: (
        _joint(hf.MetaClip2Model, hf.MetaClip2Config, projection_dim=24),
        hf.CLIPImageProcessor(**CROP),
    ),
    "dinov2": lambda: (hf.Dinov2Model(hf.Dinov2Config(**VIT, mlp_ratio=2)), hf.BitImageProcessor(**CROP)),
    "dinov2-registers": lambda: (
        hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**VIT, mlp_ratio=2, num_register_tokens=3)),
        hf.BitImageProcessor(**CROP),
    ),
    "dinov3": lambda: (
        hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**VIT, num_register_tokens=4)),
        hf.DINOv3ViTImageProcessor(**STRETCH),
    ),
    "vit": lambda: (hf.ViTModel(hf.ViTConfig(**VIT)), hf.ViTImageProcessor(**STRETCH)),
    "vit-classifier": lambda: (hf.ViTForImageClassification(hf.ViTConfig(**VIT)), hf.ViTImageProcessor(**STRETCH)),
    "deit": lambda: (
        hf.DeiTModel(hf.DeiTConfig(**VIT)),
        hf.DeiTImageProcessor(size={"height": 36, "width": 36}, crop_size=CROP["crop_size"]),
    ),
    "beit": lambda: (hf.BeitModel(hf.BeitConfig(**VIT, use_mean_pooling=True)), hf.BeitImageProcessor(**STRETCH)),
    "swin": lambda: (hf.SwinModel(hf.SwinConfig(**SWIN, initializer_range=0.3)), hf.ViTImageProcessor(**STRETCH)),
    "swinv2": lambda: (hf.Swinv2Model(hf.Swinv2Config(**SWIN)), hf.ViTImageProcessor(**STRETCH)),
    "convnext": lambda: (
        hf.ConvNextModel(hf.ConvNextConfig(**MAPS)),
        hf.ConvNextImageProcessor(size={"shortest_edge": 64}),
    ),
    "convnextv2": lambda: (
        hf.ConvNextV2Model(hf.ConvNextV2Config(**MAPS)),
        hf.ConvNextImageProcessor(size={"shortest_edge": 64}),
    ),
    "resnet": lambda: (
        hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=MAPS["hidden_sizes"], depths=MAPS["depths"])),
        hf.ConvNextImageProcessor(size={"shortest_edge": 64}),
    ),
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
