"""Encoders put back for a fine-tuning."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoder_contract import image_encoder

from xret.heads.training.finetuning.reattached import put_back_images
from xret.pipeline.errors import CacheError


def test_a_saved_grid_of_bottom_up_attention_is_read_as_any_weights(tmp_path):
    encoder, path = image_encoder("butd-grid", "random:0", 64), tmp_path / "backbone.safetensors"
    pixels = 255 * torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))  # float32, as it decodes them
    with torch.no_grad():
        for parameter in encoder.network.parameters():
            parameter.mul_(1.01)
    encoder.save(path)
    again = image_encoder("butd-grid", path, 64)
    assert again.identity == {**encoder.identity, "weights": encoder.weights_id()}
    assert np.array_equal(again.encode(pixels)[0], encoder.encode(pixels)[0])


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("roi", {"name": "butd"}), ("grid", None), ("grid", {"name": "vgg11", "pool": (2, 2)}), ("grid", {"name": "a:B"})],
)
def test_what_cannot_be_put_back_says_why(kind, spec, tmp_path):
    features = SimpleNamespace(
        kind=kind, identity={}, dtype="float16", name="set@1", cache=SimpleNamespace(url="s"), attributes={"spec": spec}
    )
    with pytest.raises(CacheError, match=r"cannot be trained: .*`reattach` text"):
        put_back_images(features, np.arange(3), tmp_path, None, "cpu", None)
