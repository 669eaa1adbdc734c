"""Heads on features of transformers, timm and open_clip: trained, searched with new pictures and texts, and tuned."""

import json

import numpy as np
import open_clip
import pytest
import small_open_clip
import torch
from PIL import Image
from safetensors.torch import load_file
from small_checkpoints import save_image_model, save_text_model
from small_timm import save_timm_model
from torch.nn.functional import cosine_similarity, normalize

import xret
from xret.heads.evaluation.scoring import embed_split, open_frozen
from xret.pipeline.errors import EncoderError
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"model.dim": 16, "schedule.epochs": 1, "data.batch_size": 8}
SLOTS = {"aggregator.image.head_dim": 8, "aggregator.text.head_dim": 8, "aggregator.image.positions": "grid"}
TUNED = {"schedule.epochs": 2, "data.unit": "image", "data.captions": 1}
WEIGHTS = {"clip": "clip", "oblong": "oblong", "roberta": "roberta", "small-ViT": "clip.pt", "small_swin": "swin.pth"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a data set, checkpoints, and a store with four sets of images and three of captions; return a folder."""
    from conftest import tiny_dataset

    folder = tmp_path_factory.mktemp("data")
    tiny_dataset.__wrapped__(folder)(folder=folder / "tiny", train=12, val=4, test=6)
    save_text_model(folder / "clip", "clip")
    save_text_model(folder / "roberta", "roberta")
    save_image_model(folder / "oblong", "dinov2")
    file = folder / "oblong" / "preprocessor_config.json"
    sizes = {"crop_size": {"height": 32, "width": 48}, "size": {"shortest_edge": 64}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    small_open_clip.save_clip(folder / "clip.pt", "small-ViT")
    save_timm_model(folder / "swin.pth", "small_swin")
    clip = str(folder / "clip.pt")
    extract(folder, visual=f"hf:{folder}/clip", text=f"hf:{folder}/clip")
    extract(folder, visual=f"hf:{folder}/oblong", text=f"hf:{folder}/roberta")
    extract(folder, encoder="open_clip:small-ViT", visual_weights=clip, text_weights=clip)
    swin = {"visual": "timm:small_swin.squashed", "visual_weights": str(folder / "swin.pth")}
    extract(folder, **swin, text=None, layers=[0])
    return folder


def extract(folder, **options):
    return xret.extract(folder / "tiny" / "tiny.yaml", folder / "s.zarr", **options, device="cpu")


def trained(data, out, image, text, recipe="vsepp", **settings):
    chosen = {**SETTINGS, "data.image": image, "data.text": text, **settings}
    xret.train(str(data / "s.zarr"), recipe=recipe, out=out, settings=chosen, device="cpu")
    return out


@torch.no_grad()
def test_without_a_head_it_is_what_open_clip_alone_gives(data):
    ranker = open_frozen(str(data / "s.zarr"), "small-ViT,small-ViT")
    found = embed_split(ranker, "test", torch.device("cpu"))
    model, _, transform = open_clip.create_model_and_transforms("small-ViT", pretrained=str(data / "clip.pt"))
    pixels = [transform(Image.open(data / "tiny" / "images" / name)) for name in found.file_names]
    image, text, *_ = model.eval()(torch.stack(pixels), open_clip.get_tokenizer("small-ViT")(found.texts))
    torch.testing.assert_close(found.similarity, image @ text.T, rtol=0, atol=2e-3)  # rounded to float16


@pytest.mark.parametrize(("image", "text"), [("clip", "clip"), ("small-ViT", "small-ViT"), ("small_swin", "small-ViT")])
def test_new_pictures_and_texts_are_encoded_like_those_of_the_store(data, tmp_path, image, text):
    run = trained(data, tmp_path / "run", image, text)
    assert xret.load(run, device="cpu").search("a picture")  # the weights are where they were
    weights = {"visual_weights": str(data / WEIGHTS[image]), "text_weights": str(data / WEIGHTS[text])}
    retriever, picture = xret.load(run, device="cpu", **weights), data / "tiny" / "images" / "16.jpg"
    caption = retriever.cache.caption_texts(*retriever.cache.captions_of(16, 22))[0]
    cosine = cosine_similarity(retriever.encode_text([caption]), retriever.encode_images([picture])).item()
    own = next(hit for hit in retriever.search(caption, k=6) if hit.file_name == "16.jpg")
    assert own.score == pytest.approx(cosine, abs=2e-3)
    other = data / "roberta" if text == "clip" else small_open_clip.save_clip(tmp_path / "o.pt", "small-ViT", seed=1)
    with pytest.raises(EncoderError, match=r"is not what .* was made with .*weights differ"):
        xret.load(run, device="cpu", text_weights=str(other)).search("a picture")


def test_positions_are_those_of_a_map_that_is_not_square(data, tmp_path):
    images, rows = FeatureCache.open(str(data / "s.zarr")).image_set("oblong"), np.array([17])
    assert images.grid == (4, 6)
    run = trained(data, tmp_path / "run", "oblong", "roberta", "setdiv", **SLOTS, **{"augment.image": 0.2})
    retriever = xret.load(run, device="cpu", visual_weights=str(data / "oblong"))
    (made,) = retriever.encode_images([data / "tiny" / "images" / "17.jpg"])
    branch = retriever.model.eval().image
    local, pooled = (torch.from_numpy(array).float() for array in (images.local(rows), images.global_(rows)))
    adapted = branch.adapter(torch.tensor([24]), local, pooled, None, uses_local=True)
    with torch.inference_mode():
        right, wrong = (
            branch.aggregator(adapted.local, adapted.length, adapted.global_, grid=grid).embedding[0]
            for grid in ((4, 6), (6, 4))
        )
    np.testing.assert_allclose(normalize(made, dim=-1), normalize(right, dim=-1), atol=2e-3)
    assert (normalize(made, dim=-1) - normalize(wrong, dim=-1)).abs().max() > 5e-3


def test_the_text_encoder_is_put_back_beside_images_on_the_cache(data, tmp_path):
    run = trained(data, tmp_path / "run", "oblong", "roberta")
    words = {"data_root": str(data / "tiny"), "device": "cpu", "settings": {**TUNED, "finetune.text_frozen": 0}}
    xret.finetune(run, out=tmp_path / "tuned", reattach=["text"], text_weights=str(data / "roberta"), **words)
    extract(data, encoder=tmp_path / "tuned")
    assert xret.evaluate(tmp_path / "tuned", device="cpu") is not None
    assert len(FeatureCache.open(str(data / "s.zarr")).set_names("captions")) == 4


@pytest.mark.parametrize("image", ["small-ViT", "small_swin"])
def test_the_image_encoder_is_put_back_and_learns(data, tmp_path, image):
    run, file = trained(data, tmp_path / "run", image, "small-ViT"), data / WEIGHTS[image]
    words = {"data_root": str(data / "tiny"), "device": "cpu", "settings": {**TUNED, "finetune.image_frozen": 0}}
    xret.finetune(run, out=tmp_path / "tuned", visual_weights=str(file), reattach=["image"], **words)
    saved = load_file(tmp_path / "tuned" / "image_backbone.safetensors")
    given = torch.load(file, weights_only=True)
    assert saved.keys() <= given.keys()
    assert max((saved[name] - given[name]).abs().max() for name in saved if saved[name].is_floating_point()) > 1e-6
    extract(data, encoder=tmp_path / "tuned")
    assert xret.evaluate(tmp_path / "tuned", device="cpu") is not None
