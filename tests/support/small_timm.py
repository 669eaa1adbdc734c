"""Models of timm of a moment: its own test models, and small ones of other families, registered as its guide says."""

import timm
import torch
from timm.models import register_model
from timm.models._registry import generate_default_cfgs
from timm.models.eva import _create_eva
from timm.models.swin_transformer import _create_swin_transformer
from timm.models.vision_transformer import _create_vision_transformer

_OF_SIZE = {"num_classes": 7, "fixed_input_size": True, "first_conv": "patch_embed.proj"}
default_cfgs = generate_default_cfgs(
    {
        "small_swin.own": {**_OF_SIZE, "input_size": (3, 32, 32), "crop_pct": 0.9, "classifier": "head.fc"},
        "small_swin.squashed": {**_OF_SIZE, "input_size": (3, 32, 32), "crop_mode": "squash", "classifier": "head.fc"},
        "small_eva.own": {**_OF_SIZE, "input_size": (3, 48, 48), "crop_mode": "border", "classifier": "head"},
        "small_registers.own": {**_OF_SIZE, "input_size": (3, 48, 48), "crop_pct": 1.0, "classifier": "head"},
    }
)


@register_model
def small_swin(pretrained=False, **kwargs):
    own = {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
    return _create_swin_transformer("small_swin", pretrained=pretrained, **(own | kwargs))


@register_model
def small_eva(pretrained=False, **kwargs):
    own = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "swiglu_mlp": True, "use_rot_pos_emb": True}
    return _create_eva("small_eva", pretrained=pretrained, **(own | kwargs))


@register_model
def small_registers(pretrained=False, **kwargs):
    own = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "reg_tokens": 3, "no_embed_class": True}
    return _create_vision_transformer("small_registers", pretrained=pretrained, **(own | kwargs))


def save_timm_checkpoint(folder, name):
    """Write a model with weights of its own into a folder as timm puts it on the hub."""
    folder.mkdir()
    model = timm.create_model(name, checkpoint_path=str(save_timm_model(folder / "own.pth", name)))
    (folder / "own.pth").unlink()
    timm.models.save_for_hf(model, folder)
    return folder


def save_timm_model(path, name, seed=0):
    """Write the state dict of a model with weights of its own into a file; return the file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = timm.create_model(name)
        for value in model.parameters():
            if value.ndim == 1:
                torch.nn.init.normal_(value, 0.5, 0.3)  # norms and biases, which begin with zeros and ones
    torch.save(model.state_dict(), path)
    return path
