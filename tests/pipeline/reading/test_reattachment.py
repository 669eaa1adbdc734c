"""What an encoder saves is read back as itself, and tensors with gradients are what `encode` gives."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_bert import save_bert

from xret.pipeline.data.samples import Caption, ImageSample, Samples
from xret.pipeline.encoders.detectors.butd import ButdGridEncoder
from xret.pipeline.encoders.grid import GridEncoder
from xret.pipeline.encoders.huggingface.bert import BertEncoder
from xret.pipeline.errors import CacheError, EncoderError, ManifestError
from xret.pipeline.reading.origin import extraction_words
from xret.pipeline.reading.reattachment import image_folder, manifest_in, put_back_images
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.layout import open_for_writing

TEXTS = ["a picture of thing 1 2", "", "number 30"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("bert"))


def spoil(encoder):
    """Change all weights, as training does."""
    with torch.no_grad():
        for parameter in encoder.network.parameters():
            parameter.mul_(1.01)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "butd-grid"])
def test_a_saved_image_backbone_is_read_as_any_weights(name, tmp_path):
    def load(weights):
        return ButdGridEncoder(weights, 64, "cpu") if name == "butd-grid" else GridEncoder(name, weights, 64, "cpu")

    encoder, path = load("random:0"), tmp_path / "backbone.safetensors"
    pixels = torch.randint(256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    untouched = encoder.encode(pixels)[0]
    spoil(encoder)
    encoder.save(path)
    again = load(str(path))
    assert again.identity == {**encoder.identity, "weights": encoder.weights_id()}
    assert np.array_equal(again.encode(pixels)[0], encoder.encode(pixels)[0])
    assert not np.allclose(again.encode(pixels)[0], untouched)
    assert extraction_words([again]) == {"visual": name, "text": None, "image_size": 64}


@pytest.mark.parametrize("options", [{}, {"layer": 1, "special_tokens": False, "max_tokens": 6}])
def test_a_saved_text_backbone_is_read_as_any_weights(bert, tmp_path, options):
    encoder = BertEncoder(str(bert), "cpu", **options)
    assert encoder.identity["weights"] == encoder.weights_id()
    spoil(encoder)
    encoder.save(tmp_path / "saved")
    again = BertEncoder(str(tmp_path / "saved"), "cpu", **options)
    assert again.identity == {**encoder.identity, "weights": encoder.weights_id()}
    assert again.identity["weights"] != BertEncoder(str(bert), "cpu", **options).identity["weights"]
    ids = encoder.tokenize(TEXTS)
    assert np.array_equal(again.encode(ids)[0], encoder.encode(ids)[0])
    words = extraction_words([again])
    assert (words["text_layer"], words["special_tokens"]) == (options.get("layer", -1), not options)
    named = {key: words[key] for key in ("special_tokens", "max_tokens")}
    assert BertEncoder(str(bert), "cpu", words["text_layer"], **named).identity["layer"] == again.identity["layer"]


@pytest.mark.parametrize("special_tokens", [True, False])
def test_padded_captions_get_the_states_of_packed_ones(bert, special_tokens):
    encoder = BertEncoder(str(bert), "cpu", special_tokens=special_tokens)
    ids = encoder.tokenize(TEXTS)
    length = torch.tensor([len(caption) for caption in ids])
    token = torch.full((3, int(length.max()) + 2), 7)  # whatever stands there
    for row, caption in enumerate(ids):
        token[row, : len(caption)] = torch.tensor(caption)
    local, global_ = encoder.features(token, length)
    packed, pooled = encoder.encode(ids)
    inside = torch.arange(token.shape[1]) < length[:, None]
    np.testing.assert_allclose(local[inside].numpy(), packed, atol=1e-6)
    np.testing.assert_allclose(global_.numpy(), pooled, atol=1e-6)
    assert not local[~inside].any()


def test_where_images_are(tmp_path):
    def cache_of(dataset):
        image = ImageSample("0", "a/0.jpg", "train", -1, (Caption("a", 0),))
        with open_for_writing(
            str(tmp_path / f"{dataset}.zarr"), Samples(dataset, (image,), {"train": (0, 1)}, "x"), []
        ):
            pass
        return FeatureCache.open(str(tmp_path / f"{dataset}.zarr"))

    own, bundled = cache_of("own"), cache_of("rsicd")
    images = tmp_path / "data" / "images"
    with pytest.raises(CacheError, match=r"no folder was given; give their folder as --data-root DIR"):
        image_folder(own, None)
    with pytest.raises(CacheError, match=r"a/0\.jpg is neither in .* nor in .*images; give"):
        image_folder(own, tmp_path)
    with pytest.raises(ManifestError, match="--data-root"):
        image_folder(bundled, tmp_path)
    (images / "a").mkdir(parents=True)
    (images / "a" / "0.jpg").touch()
    assert image_folder(own, images) == image_folder(own, tmp_path / "data") == images
    folder, elsewhere = tmp_path / "manifests", tmp_path / "else" / "photos"
    folder.mkdir()
    elsewhere.mkdir(parents=True)
    (folder / "c.csv").write_text("file_name,caption\na/0.jpg,a\n")
    (folder / "own.yaml").write_text(f"name: own\nimages: {elsewhere}\ncaptions: c.csv\n")
    (folder / "another.yaml").write_text("name: [")
    with pytest.raises(CacheError, match=rf"nor in .*images, nor in {elsewhere}, which {folder}/own.yaml names; give"):
        image_folder(own, folder)
    some = SimpleNamespace(dataset="own", images=3, file_names=lambda first, end: ["a/9.jpg", "a/8.jpg", "a/0.jpg"])
    assert image_folder(some, images) == images  # single pictures may be missing
    images.rename(elsewhere / "moved")
    (elsewhere / "moved" / "a").rename(elsewhere / "a")
    assert image_folder(own, folder) == elsewhere
    assert manifest_in(folder, "own").images == manifest_in(elsewhere.parent.parent / "manifests", "own").images


@pytest.mark.parametrize(
    ("kind", "identity", "error", "match"),
    [
        ("roi", {"encoder": "butd", "preprocessing": {"shorter": 600}}, CacheError, "holds no grid .*--reattach text"),
        ("grid", {"encoder": "scan", "weights": "x"}, CacheError, "holds no grid that xret extracted"),
        ("grid", {"encoder": "resnet18", "weights": "x", "preprocessing": {"crop": 64}}, EncoderError, "FILE$"),
    ],
)
def test_what_cannot_be_put_back_says_why(kind, identity, error, match, tmp_path):
    features = SimpleNamespace(
        kind=kind,
        identity=identity,
        dtype="float16",
        name="set@1",
        cache=SimpleNamespace(url="s.zarr"),
        attributes={"asked": {"weights": "sha256:1"}},
    )
    with pytest.raises(error, match=match):
        put_back_images(features, np.arange(3), tmp_path, None, "cpu", None)
