"""Heads on features of timm and open_clip: trained, searched with new pictures and texts, image encoders tuned."""

import open_clip
import pytest
import small_open_clip
import torch
from PIL import Image
from safetensors.torch import load_file
from scores import score
from small_timm import save_timm_model

import xret
from xret.pipeline.errors import EncoderError

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"model.dim": 16, "schedule.epochs": 1, "data.batch_size": 8}
TUNED = {"schedule.epochs": 2, "finetune.image_frozen": 0, "data.unit": "image", "data.captions": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a data set, files of weights, and a store with two sets of images; return their folder."""
    from conftest import tiny_dataset

    folder = tmp_path_factory.mktemp("data")
    tiny_dataset.__wrapped__(folder)(folder=folder / "tiny", train=12, val=4, test=6)
    small_open_clip.save_clip(folder / "clip.pt", "small-ViT")
    save_timm_model(folder / "swin.pth", "small_swin")
    extract(folder, encoder="open_clip:small-ViT", visual_weights=folder / "clip.pt", text_weights=folder / "clip.pt")
    extract(folder, visual="timm:small_swin.squashed", visual_weights=folder / "swin.pth", text=None, layer=0)
    return folder


def extract(folder, **options):
    words = {key: str(value) if key.endswith("weights") else value for key, value in options.items()}
    return xret.extract(folder / "tiny" / "tiny.yaml", folder / "s.zarr", **words, device="cpu")


def trained(data, out, image):
    chosen = {**SETTINGS, "data.image": image, "data.text": "small-ViT"}
    xret.train(str(data / "s.zarr"), recipe="vsepp", out=out, settings=chosen, device="cpu")
    return out


@torch.no_grad()
def test_without_a_head_it_is_what_open_clip_alone_gives(data):
    found = score(data / "s.zarr", device="cpu")
    model, _, transform = open_clip.create_model_and_transforms("small-ViT", pretrained=str(data / "clip.pt"))
    pictures = [Image.open(data / "tiny" / "images" / name) for name in found.file_names]
    pixels, tokens = (
        torch.stack([transform(one) for one in pictures]),
        open_clip.get_tokenizer("small-ViT")(found.texts),
    )
    image, text, *_ = model.eval()(pixels, tokens)
    torch.testing.assert_close(found.similarity, image @ text.T, rtol=0, atol=2e-3)  # rounded to float16


@pytest.mark.parametrize(("image", "file"), [("small-ViT", "clip.pt"), ("small_swin", "swin.pth")])
def test_new_pictures_and_texts_are_encoded_like_those_of_the_store(data, tmp_path, image, file):
    run = trained(data, tmp_path / "run", image)
    assert xret.load(run, device="cpu").search("a picture")  # the files are where they were
    weights = {"visual_weights": str(data / file), "text_weights": str(data / "clip.pt")}
    retriever = xret.load(run, device="cpu", **weights)
    caption = retriever.cache.caption_texts(*retriever.cache.captions_of(16, 22))[0]
    (text,), (picture,) = (
        retriever.encode_text([caption]),
        retriever.encode_images([data / "tiny" / "images" / "16.jpg"]),
    )
    own = next(hit for hit in retriever.search(caption, k=6) if hit.file_name == "16.jpg")
    assert own.score == pytest.approx(torch.nn.functional.cosine_similarity(text, picture, dim=0).item(), abs=2e-3)
    other = small_open_clip.save_clip(tmp_path / "other.pt", "small-ViT", seed=1)
    with pytest.raises(EncoderError, match=r"is not what .* was made with .its weights differ"):
        xret.load(run, device="cpu", text_weights=str(other)).search("a picture")


@pytest.mark.parametrize(("image", "file"), [("small-ViT", "clip.pt"), ("small_swin", "swin.pth")])
def test_the_image_encoder_is_put_back_and_learns(data, tmp_path, image, file):
    run = trained(data, tmp_path / "run", image)
    words = {"data_root": str(data / "tiny"), "device": "cpu", "settings": TUNED}
    xret.finetune(run, out=tmp_path / "tuned", visual_weights=str(data / file), reattach=["image"], **words)
    saved = load_file(tmp_path / "tuned" / "image_backbone.safetensors")
    given = torch.load(data / file, weights_only=True)
    assert saved.keys() <= given.keys()
    assert max((saved[name] - given[name]).abs().max() for name in saved if saved[name].is_floating_point()) > 1e-6
    extract(data, encoder=tmp_path / "tuned")
    assert xret.evaluate(tmp_path / "tuned", device="cpu") is not None
