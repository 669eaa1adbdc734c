"""What every encoder that can be fine-tuned promises: gradients reach its network, and what it saves is read back."""

import numpy as np
import pytest
import small_open_clip  # noqa: F401 - it registers its architectures
import small_timm  # noqa: F401 - it registers its models
import torch
from PIL import Image
from small_checkpoints import save_image_model, save_sentence_model, save_text_model, save_tokenizer

from xret.pipeline.encoders.registry import make_text, make_visual
from xret.pipeline.errors import EncoderError
from xret.pipeline.extraction.options import Options, with_backbones
from xret.pipeline.reading.origin import extraction_words

TEXTS = ["a picture of thing 1 2", "two dogs", "a red square number 3"]
# By name what `make_visual` takes as name, weights, size and layer; ``hf:FAMILY`` stands for the family's checkpoint.
_PICTURES = ("clip", "siglip", "dinov2", "dinov3", "vit-classifier", "beit", "swinv2", "convnext", "resnet")
VISUAL = {family: (f"hf:{family}", "imagenet", None, -1) for family in _PICTURES} | {
    "clip, a layer, resized": ("hf:clip", "imagenet", 48, 1),
    "timm": ("timm:small_registers", "random:0", None, -1),
    "timm, a layer": ("timm:small_swin.squashed", "random:0", None, 0),
    "open_clip": ("open_clip:small-ViT", "random:0", None, -1),
    "open_clip, of a side": ("open_clip:small-ViT", "random:0", 48, 1),
    "open_clip, a ResNet": ("open_clip:small-RN", "random:0", None, -1),
}
# By name what `make_text` takes as weights, layer, special tokens, most tokens and prompt.
_CAPTIONS = ("clip", "siglip", "siglip-left", "clip-text", "roberta", "t5")
TEXT = {family: (f"hf:{family}", -1, True, None, None) for family in _CAPTIONS} | {
    "clip, a layer": ("hf:clip", 1, False, 9, "a photo of {}"),
    "t5, a layer": ("hf:t5", 1, True, 9, None),
    "sentences": ("hf:sentences", -1, True, None, None),
    "open_clip": ("open_clip:small-ViT", -1, True, None, None),
    "open_clip, a layer": ("open_clip:small-timm", 1, False, 9, "a photo of {}"),
}


def folder_of(name, folder, save):
    """Write the checkpoint that a name stands for; return the name of its folder."""
    if not name.startswith("hf:"):
        return name
    if name == "hf:sentences":
        return f"hf:{save_sentence_model(folder / 'sentences', 'mean', True)}"
    return f"hf:{save(folder / 'given', name[3:])}"


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


def read_again(encoder, run, branch):
    """Save an encoder as a fine-tuned run does; return the options that name what is there."""
    run.mkdir()
    encoder.save(path := run / f"{branch}_backbone{encoder.suffix}")
    words = extraction_words([encoder]) | {"dtype": "float32"}
    return Options(**with_backbones(words, *((path, None) if branch == "image" else (None, path))))


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
def test_an_image_encoder_learns_and_is_read_back(case, tmp_path):
    name, weights, size, layer = case
    encoder = make_visual(folder_of(name, tmp_path, save_image_model), weights, size, "cpu", layer=layer, half=False)
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (90, 120, 3), dtype=np.uint8)) for _ in range(2)]
    pixels = torch.stack([encoder.prepare(picture) for picture in pictures])
    before = learn(encoder, pixels)
    again = read_again(encoder, tmp_path / "run", "image").load_visual("cpu")
    is_the_same(again, encoder, before, pixels)
    assert torch.equal(torch.stack([again.prepare(picture) for picture in pictures]), pixels)


@pytest.mark.parametrize("case", TEXT.values(), ids=TEXT)
def test_a_text_encoder_learns_and_is_read_back(case, tmp_path):
    name, *how = case
    encoder = make_text(folder_of(name, tmp_path, save_text_model), "cpu", *how, half=False, file="random:0")
    ids = encoder.tokenize(TEXTS)
    length = torch.tensor([len(caption) for caption in ids])
    token = torch.nn.utils.rnn.pad_sequence([torch.tensor(caption) for caption in ids], True)
    before = learn(encoder, token, length)
    again = read_again(encoder, tmp_path / "run", "text").load_text("cpu")
    is_the_same(again, encoder, before, token, length)
    assert again.tokenize(TEXTS) == ids


def test_one_tower_is_no_other(tmp_path):
    """What is saved of a CLIP is one of its towers."""
    folder = save_text_model(tmp_path / "clip", "clip")
    make_visual(f"hf:{folder}", "imagenet", None, "cpu").save(tmp_path / "image")
    make_text(f"hf:{folder}", "cpu", -1, True, None).save(tmp_path / "text")
    save_tokenizer(tmp_path / "image", "<s>", "</s>")
    with pytest.raises(EncoderError, match=r"do not fit their config.json: \d+ missing \(text_"):
        make_text(f"hf:{tmp_path / 'image'}", "cpu", -1, True, None)
    with pytest.raises(EncoderError, match=r"do not fit their config.json: \d+ missing \(vis"):
        make_visual(f"hf:{tmp_path / 'text'}", "imagenet", None, "cpu")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "hf:clip",
            "neither a mask nor an unknown token apart from its marks, so words cannot be masked; set finetune",
        ),
        (
            "open_clip:small-ViT",
            "of open_clip do not tell which pieces make a word, so words cannot be masked; set fin",
        ),
    ],
)
def test_words_are_not_masked_by_the_mark_of_the_end(name, sentence, tmp_path):
    """As in CLIP's tokenizer, where the unknown token is the mark of the end."""
    name = folder_of(name, tmp_path, save_text_model)
    if name.startswith("hf:"):
        save_tokenizer(tmp_path / "given", "<s>", "</s>", pad_token="</s>", unk_token="</s>", mask_token=None)
    encoder = make_text(name, "cpu", -1, True, None, file="random:0")
    with pytest.raises(EncoderError, match=sentence):
        encoder.words(TEXTS)
