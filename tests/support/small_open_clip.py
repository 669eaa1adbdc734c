"""Models of open_clip of a moment: architectures of its own kinds, registered from config files as its README says."""

import json
import tempfile
from pathlib import Path

import open_clip
import torch

_TEXT = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 3}
_VIT = {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8}
CONFIGS = {
    "small-ViT": {"embed_dim": 24, "vision_cfg": _VIT, "text_cfg": _TEXT, "quick_gelu": True},
    "small-attentive": {"embed_dim": 24, "vision_cfg": {**_VIT, "attentional_pool": True}, "text_cfg": _TEXT},
    "small-RN": {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8, "patch_size": None},
        "text_cfg": _TEXT,
    },
    "small-timm": {
        "embed_dim": 24,
        "vision_cfg": {"timm_model_name": "test_vit3", "timm_pool": "", "timm_proj": "linear", "image_size": 160},
        "text_cfg": {**_TEXT, "no_causal_mask": True, "pool_type": "last", "proj_bias": True},
        "custom_text": True,
    },
}


def register(**configs):
    """Let open_clip know architectures, by name with ``_`` for ``-``."""
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs.items():
            Path(folder, f"{name.replace('_', '-')}.json").write_text(json.dumps(config))
        open_clip.add_model_config(folder)
        open_clip.factory._MODEL_CONFIG_PATHS.pop()  # the folder does not stay


register(**CONFIGS)


def save_clip(path, name, seed=0):
    """Write the state dict of a model with weights of its own into a file; return the file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = open_clip.create_model(name)
        for value in model.parameters():
            if value.ndim == 1:
                torch.nn.init.normal_(value, 0.5, 0.3)  # norms and biases, which begin with zeros and ones
            elif value.ndim == 2 and value.shape[0] < 100:
                torch.nn.init.normal_(value, std=0.3)
    torch.save(model.state_dict(), path)
    return path
