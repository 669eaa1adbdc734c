"""What every encoder that can be fine-tuned promises: gradients reach its network, and what it saves is read back."""

import numpy as np
import pytest
import small_open_clip  # noqa: F401 - it registers its architectures
import small_timm  # noqa: F401 - it registers its models
import torch
from encoder_contract import refused
from loaded import image_encoder, text_encoder
from PIL import Image
from small_bert import save_bert
from small_checkpoints import save_image_model, save_sentence_model, save_text_model, save_tokenizer

from xret.pipeline.encoders import EncoderSpec, load_text, load_visual

TEXTS = ["a picture of thing 1 2", "two dogs", "a red square number 3"]
# By case what a spec has; ``hf:FAMILY`` stands for the family's checkpoint.
VISUAL = {
    family: {"name": f"hf:{family}"}
    for family in ("clip", "siglip", "dinov2", "dinov3", "vit-classifier", "beit", "swinv2", "convnext", "resnet")
} | {
    "torchvision": {"name": "mobilenet_v3_small", "weights": "random:0", "image_size": 64},
    "clip, a layer, resized": {"name": "hf:clip", "image_size": 48, "layer": 1},
    "timm": {"name": "timm:small_registers", "weights": "random:0"},
    "timm, a layer": {"name": "timm:small_swin.squashed", "weights": "random:0", "layer": 0},
    "open_clip": {"name": "open_clip:small-ViT", "weights": "random:0"},
    "open_clip, of a side": {"name": "open_clip:small-ViT", "weights": "random:0", "image_size": 48, "layer": 1},
    "open_clip, a ResNet": {"name": "open_clip:small-RN", "weights": "random:0"},
}
TEXT = {
    family: {"name": f"hf:{family}"} for family in ("clip", "siglip", "siglip-left", "clip-text", "roberta", "t5")
} | {
    "bert": {"name": "bert", "weights": "bert"},
    "bert, a layer": {"name": "bert", "weights": "bert", "layer": 1},
    "clip, a layer": {"name": "hf:clip", "layer": 1, "prompt": "a photo of {}"},
    "t5, a layer": {"name": "hf:t5", "layer": 1},
    "sentences": {"name": "hf:sentences"},
    "sentences, by their library": {"name": "hf:sentences-max"},
    "open_clip": {"name": "open_clip:small-ViT", "weights": "random:0"},
    "open_clip, a layer": {"name": "open_clip:small-timm", "weights": "random:0", "layer": 1, "prompt": "one {}"},
}


@pytest.fixture
def spec_of(tmp_path):
    """Write the checkpoint that a case stands for; return its spec."""

    def find(case, save):
        case = dict(case)
        if case.get("weights") == "bert":
            case["weights"] = str(save_bert(tmp_path / "bert"))
        elif case["name"].startswith("hf:sentences"):
            mode = "max" if case["name"].endswith("max") else "mean"
            case["name"] = f"hf:{save_sentence_model(tmp_path / 'sentences', mode, True)}"
        elif case["name"].startswith("hf:"):
            case["name"] = f"hf:{save(tmp_path / 'given', case['name'][3:])}"
        return EncoderSpec(**case, dtype="float32")

    return find


def learn(encoder, *inputs):
    """Take a step along the gradient; return the features before it."""
    encoder.network.requires_grad_(True)
    local, global_ = encoder.features(*inputs)
    before = local.detach(), global_.detach()
    (local.square().mean() + global_.sin().mean()).backward()
    found = [parameter for parameter in encoder.network.parameters() if parameter.grad is not None]
    assert len(found) > 8
    with torch.no_grad():
        for parameter in found:
            parameter.sub_(parameter.grad.sign(), alpha=0.01)
    encoder.network.requires_grad_(False)
    return before


def saved(encoder, run, branch):
    """Save an encoder as a fine-tuned run does; return the spec of what is there, as `run.json` has it."""
    run.mkdir()
    encoder.save(path := run / f"{branch}_backbone{encoder.suffix}")
    return EncoderSpec.from_json(encoder.spec.without_folders().to_json()).with_source(str(path))


def is_the_same(again, encoder, before, *inputs):
    assert again.identity == {**encoder.identity, "weights": encoder.weights_id()}
    assert again.identity["weights"] != encoder.identity["weights"]
    assert again.space is None  # the other tower has not learnt with it
    with torch.no_grad():
        learnt = encoder.features(*inputs)
        for was, now, read in zip(before, learnt, again.features(*inputs), strict=True):
            assert torch.equal(read, now)
            assert not torch.allclose(was, now, atol=1e-4)


@pytest.mark.parametrize("case", VISUAL.values(), ids=VISUAL)
def test_an_image_encoder_learns_and_is_read_back(case, spec_of, tmp_path):
    encoder = load_visual(spec_of(case, save_image_model), "cpu")
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (90, 120, 3), dtype=np.uint8)) for _ in range(2)]
    pixels = torch.stack([encoder.prepare(picture) for picture in pictures])
    before = learn(encoder, pixels)
    again = load_visual(saved(encoder, tmp_path / "run", "image"), "cpu")
    is_the_same(again, encoder, before, pixels)
    assert torch.equal(torch.stack([again.prepare(picture) for picture in pictures]), pixels)


@pytest.mark.parametrize("case", TEXT.values(), ids=TEXT)
def test_a_text_encoder_learns_and_is_read_back(case, spec_of, tmp_path):
    encoder = load_text(spec_of(case, save_text_model), "cpu")
    ids = encoder.tokenize(TEXTS)
    length = torch.tensor([len(caption) for caption in ids])
    token = torch.nn.utils.rnn.pad_sequence([torch.tensor(caption) for caption in ids], True)
    before = learn(encoder, token, length)
    again = load_text(saved(encoder, tmp_path / "run", "text"), "cpu")
    is_the_same(again, encoder, before, token, length)
    assert again.tokenize(TEXTS) == ids
    packed, pooled = encoder.encode(ids)
    local, global_ = encoder.features(torch.nn.functional.pad(token, (0, 2), value=7), length)  # whatever stands there
    inside = torch.arange(local.shape[1]) < length[:, None]
    np.testing.assert_allclose(local[inside].numpy(), packed, atol=1e-5)
    np.testing.assert_allclose(global_.numpy(), pooled, atol=1e-5)
    assert not local[~inside].any()


def test_one_tower_is_no_other(tmp_path):
    """What is saved of a CLIP is one of its towers."""
    folder = save_text_model(tmp_path / "clip", "clip")
    image_encoder(f"hf:{folder}").save(tmp_path / "image")
    text_encoder(f"hf:{folder}").save(tmp_path / "text")
    save_tokenizer(tmp_path / "image", "<s>", "</s>")
    refused(r"do not fit their config.json: \d+ missing \(text_", text_encoder, f"hf:{tmp_path / 'image'}")
    refused(r"do not fit their config.json: \d+ missing \(vis", image_encoder, f"hf:{tmp_path / 'text'}")
