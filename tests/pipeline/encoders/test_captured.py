"""Batches that a GPU repeats as a CUDA graph have the features of a plain pass."""

import pytest
import torch
from encoder_contract import picture
from small_checkpoints import save_image_model

from xret.pipeline.encoders.base import encode_layers
from xret.pipeline.encoders.registry import load_visual_layers
from xret.pipeline.encoders.spec import EncoderSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
RESNET = {"name": "resnet18", "weights": "random:0", "image_size": 64}
# Attention may be computed by another kernel within a capture, which rounds otherwise: in bfloat16 and float32.
CASES = {
    "a network that is cut": ([RESNET], 0.0),
    "two layers": ([{"name": "hf:{vit}", "layer": 1}, {"name": "hf:{vit}"}], 2e-2),
    "full precision": ([{"name": "hf:{vit}", "dtype": "float32"}], 5e-6),
}


@pytest.fixture
def loaded(made):
    def load(*options):
        vit = made(save_image_model, "vit")
        specs = [EncoderSpec(**{**one, "name": one["name"].format(vit=vit)}) for one in options]
        return load_visual_layers(specs, "cuda")

    return load


def batches_of(encoder, file):
    """Return five batches of noise, a smaller one and a full one, as the encoder decodes pictures."""
    like, _ = encoder.decode(picture(file))
    random = torch.Generator().manual_seed(0)
    noise = [torch.randint(0, 256, (size, *like.shape), generator=random) for size in (4, 4, 4, 4, 4, 3, 4)]
    return [batch.to(like.dtype) if like.dtype == torch.uint8 else batch / 128 - 1 for batch in noise]


def passes_of(encoder):
    """Return a list that grows with each pass through an encoder's network that the host goes through."""
    passes = []
    encoder.network.register_forward_pre_hook(lambda *_: passes.append(1))
    return passes


def are_plain(encoders, batches, found, rounding=0.0):
    """Assert that each encoder alone, batch by batch, gives the same but for so much of the largest value."""
    for batch, of_batch in zip(batches, found, strict=True):
        for encoder, features in zip(encoders, of_batch, strict=True):
            for one, plain in zip(features, encoder.encode(batch), strict=True):
                assert one.is_cuda and abs(one.cpu().numpy() - plain).max() <= rounding * abs(plain).max()


@pytest.mark.parametrize(("options", "rounding"), CASES.values(), ids=CASES)
def test_replayed_features_are_those_of_plain_passes(options, rounding, loaded, tmp_path):
    encoders = loaded(*options)
    batches = batches_of(encoders[0], tmp_path / "p.png")
    passes = passes_of(encoders[0])
    found = [encode_layers(encoders, batch) for batch in batches]  # later batches leave those of earlier ones alone
    assert len(passes) < len(batches)
    assert all(torch.equal(*both) for both in zip(found[2][0], encode_layers(encoders, batches[2])[0], strict=True))
    are_plain(encoders, batches, found, rounding)


def test_views_of_a_batch_do_not_overwrite_each_other(loaded, tmp_path):
    (grid,), (views,) = loaded(RESNET), loaded({**RESNET, "views": "dihedral:4"})
    batch = torch.stack(batches_of(grid, tmp_path / "p.png")[:4], 1)
    local, global_ = views.encode(batch)
    for view in range(4):
        alone, alone_global = grid.encode(batch[:, view])
        assert (local[:, view] == alone).all() and (global_[:, view] == alone_global).all()


def asks(_part, _inputs, maps):
    maps.sum().item()


def refuses(_part, _inputs, _maps):
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("this cannot be captured")


@pytest.mark.parametrize("hook", [asks, refuses])
def test_a_network_that_cannot_be_captured_runs_plainly(hook, loaded, tmp_path):
    encoders = loaded(RESNET)
    batches = batches_of(encoders[0], tmp_path / "p.png")
    passes = passes_of(encoders[0])
    encoders[0].network.layer1.register_forward_hook(hook)
    found = [encode_layers(encoders, batch) for batch in batches]
    assert len(passes) >= len(batches)
    are_plain(encoders, batches, found)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(1, device="cuda").item()  # its random numbers are not those of a capture
    others = loaded(RESNET)
    are_plain(others, batches, [encode_layers(others, batch) for batch in batches])
