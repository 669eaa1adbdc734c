"""Heads on features of transformers: trained, searched with new pictures and texts, their text encoder tuned."""

import json

import numpy as np
import pytest
import torch
from small_checkpoints import save_image_model, save_text_model

import xret
from xret.pipeline.errors import EncoderError
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"model.dim": 16, "schedule.epochs": 1, "data.batch_size": 8}
SLOTS = {"aggregator.image.head_dim": 8, "aggregator.text.head_dim": 8, "aggregator.image.positions": "grid"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a data set, checkpoints, and a store with two sets of each modality; return their folder."""
    from conftest import tiny_dataset

    folder = tmp_path_factory.mktemp("data")
    tiny_dataset.__wrapped__(folder)(folder=folder / "tiny", train=12, val=4, test=6)
    save_text_model(folder / "clip", "clip")
    save_text_model(folder / "roberta", "roberta")
    save_image_model(folder / "oblong", "dinov2")
    file = folder / "oblong" / "preprocessor_config.json"
    sizes = {"crop_size": {"height": 32, "width": 48}, "size": {"shortest_edge": 64}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    for visual, text in (("clip", "clip"), ("oblong", "roberta")):
        names = {"visual": f"hf:{folder / visual}", "text": f"hf:{folder / text}"}
        xret.extract(folder / "tiny" / "tiny.yaml", folder / "s.zarr", **names, device="cpu")
    return folder


def trained(data, out, image, text, recipe="vsepp", **settings):
    chosen = {**SETTINGS, "data.image": image, "data.text": text, **settings}
    xret.train(str(data / "s.zarr"), recipe=recipe, out=out, settings=chosen, device="cpu")
    return out


def test_new_pictures_and_texts_are_encoded_like_those_of_the_store(data, tmp_path):
    run = trained(data, tmp_path / "run", "clip", "clip")
    assert xret.load(run, device="cpu").search("a picture")  # the folder is where it was
    folder = str(data / "clip")
    for weights in (folder, f"hf:{folder}"):
        retriever = xret.load(run, device="cpu", visual_weights=weights, text_weights=weights)
        caption = retriever.cache.caption_texts(*retriever.cache.captions_of(16, 22))[0]
        (expected,) = retriever.encode_text([caption])
        picture = data / "tiny" / "images" / "16.jpg"
        (image,) = retriever.encode_images([picture])
        assert retriever.search(picture, k=3)[0].rank == 1
        hits = retriever.search(caption, k=6)
        own = next(hit for hit in hits if hit.file_name == "16.jpg")
        cosine = torch.nn.functional.cosine_similarity(expected, image, dim=0)
        assert own.score == pytest.approx(cosine.item(), abs=2e-3)
    with pytest.raises(EncoderError, match=r"is not what .* was made with .*weights differ"):
        xret.load(run, device="cpu", text_weights=str(data / "roberta")).search("a picture")


def test_positions_are_those_of_a_map_that_is_not_square(data, tmp_path):
    cache = FeatureCache.open(str(data / "s.zarr"))
    assert cache.image_set("oblong").grid == (4, 6)
    settings = {**SLOTS, "augment.image": 0.2}
    run = trained(data, tmp_path / "run", "oblong", "roberta", "setdiv", **settings)
    retriever = xret.load(run, device="cpu", visual_weights=str(data / "oblong"))
    rows = np.array([17])
    (made,) = retriever.encode_images([data / "tiny" / "images" / "17.jpg"])
    head = retriever.model.eval()
    local = torch.from_numpy(cache.image_set("oblong").local(rows)).float()
    adapted = head.image.adapter(
        torch.tensor([24]), local, torch.from_numpy(cache.image_set("oblong").global_(rows)).float(), None,
        uses_local=True,
    )  # fmt: skip
    across, down = np.meshgrid(np.arange(1, 7) / (6 + 1e-6), np.arange(1, 5) / (4 + 1e-6))
    place = torch.from_numpy(np.stack([down.ravel(), across.ravel()], 1))[None]
    with torch.inference_mode():
        expected = head.image.aggregator(adapted.local, adapted.length, adapted.global_, place=place).embedding
        wrong = head.image.aggregator(adapted.local, adapted.length, adapted.global_, place=place.flip(2)).embedding
    normalised = torch.nn.functional.normalize(expected[0], dim=-1)
    made = torch.nn.functional.normalize(made, dim=-1)
    np.testing.assert_allclose(made, normalised, atol=2e-3)
    assert (made - torch.nn.functional.normalize(wrong[0], dim=-1)).abs().max() > 5e-3


def test_the_text_encoder_is_put_back_beside_images_on_the_cache(data, tmp_path):
    run = trained(data, tmp_path / "run", "oblong", "roberta")
    words = {"data_root": str(data / "tiny"), "device": "cpu", "settings": {"schedule.epochs": 2}}
    own = {"text_weights": str(data / "roberta")}
    words["settings"] |= {"finetune.text_frozen": 0, "data.unit": "image", "data.captions": 1}
    xret.finetune(run, out=tmp_path / "tuned", reattach=["text"], **words, **own)
    xret.extract(data / "tiny" / "tiny.yaml", data / "s.zarr", encoder=tmp_path / "tuned", device="cpu")
    metrics = xret.evaluate(tmp_path / "tuned", device="cpu")
    assert metrics is not None
    assert len(FeatureCache.open(str(data / "s.zarr")).set_names("captions")) == 3
