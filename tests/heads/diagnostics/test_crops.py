"""Crops: triplets against a loop over all choices, selection by hand, and all of it on the generated scenes."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oriented import save, shown
from PIL import Image

import xret
from xret.demo.generate import generate_scenes
from xret.heads.diagnostics import crops as crops_module
from xret.heads.diagnostics import diagnose
from xret.heads.diagnostics.crops import (
    THRESHOLDS,
    Region,
    cut,
    read_picture,
    read_visual_genome,
    regions_in,
    regions_of,
    selection_accuracy,
    triplet,
)
from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.encoders import encode_captions_by_all, encode_images_by_all
from xret.heads.training.train import train
from xret.pipeline.data.sources import FolderReader
from xret.pipeline.errors import CacheError, RunError

SIZE = 100, 50
SMALL = {"model.dim": 16, "data.batch_size": 16, "adapter.words.word_dim": 8, "schedule.epochs": 1}


def at(left, top, right, bottom, phrase="thing"):
    return Region((left, top, right, bottom), phrase)


def test_a_triplet_by_hand():
    a, near, far = at(0, 0, 20, 20, "a dog"), at(10, 0, 30, 19, "a cat"), at(60, 30, 70, 40, "a hat")
    whole = at(0, 0, 100, 50, "a room")
    assert triplet([far, whole, near, a], SIZE, 0.2) == (a, far, at(0, 0, 70, 40, "a dog and a hat"))
    # With a threshold of 7% A itself, 8% of the image, is too large; 1,000 pixels are not below 20% of 5,000.
    assert triplet([far, whole, near, a], SIZE, 0.07) is None
    assert triplet([at(0, 0, 40, 25), at(0, 0, 4, 4), at(6, 0, 9, 4)], SIZE, 0.2)[0] == at(0, 0, 4, 4)
    # Of those that overlap as little, the largest.
    larger = at(40, 0, 50, 10)
    assert triplet([a, at(30, 0, 35, 5), larger], SIZE, 0.5)[1] == larger


def test_only_the_ten_largest_are_looked_at():
    crowd = [at(0, 0, 30 - k, 30) for k in range(10)]
    far = at(90, 40, 95, 45)
    assert triplet([*crowd, far], SIZE, 0.5)[1] == crowd[9]
    assert triplet([*crowd[1:], far], SIZE, 0.5)[1] == far


@settings(max_examples=60, deadline=None)
@given(
    boxes=st.lists(st.tuples(*[st.integers(0, 20)] * 2, *[st.integers(1, 12)] * 2), min_size=2, max_size=14),
    threshold=st.sampled_from(THRESHOLDS),
)
def test_a_triplet_is_what_a_plain_search_finds(boxes, threshold):
    regions = [at(x, y, x + w, y + h) for x, y, w, h in boxes]
    found = triplet(regions, (32, 32), threshold)

    def pixels(region):
        left, top, right, bottom = region.box
        return {(x, y) for x in range(left, right) for y in range(top, bottom)}

    small = [region for region in regions if len(pixels(region)) < threshold * 32 * 32]
    if len(small) < 2:
        assert found is None
        return
    a, b, c = found
    assert len(pixels(a)) == max(len(pixels(region)) for region in small)
    xs, ys = ({corner[axis] for corner in pixels(a) | pixels(b)} for axis in (0, 1))
    assert c.box == (min(xs), min(ys), max(xs) + 1, max(ys) + 1)
    small.remove(a)

    def shared(region):
        return len(pixels(region) & pixels(a)) / len(pixels(region) | pixels(a))

    if len(small) < 10:
        assert shared(b) == min(map(shared, small))


def test_regions_are_cut_off_at_the_edges_and_useless_ones_fall_out():
    listed = [
        {"bbox": [-5, 40, 20, 30], "phrase": " a dog "},
        {"bbox": [120, 0, 20, 20], "phrase": "outside"},
        {"bbox": [0, 0, 20, 20]},
        {"bbox": [0, 0, 20, 0.5], "phrase": "no pixel"},
        {"bbox": [0, 0, 100, 1], "phrase": "too thin"},
    ]
    assert regions_of(listed, SIZE) == [at(0, 40, 15, 50, "a dog")]


@pytest.mark.parametrize(
    "wrong",
    [{"phrase": "x"}, {"bbox": [1, 2, 3]}, {"bbox": ["a", 0, 1, 1]}, {"bbox": [0, 0, 9, 9], "phrase": 5}, [], "dog"],
)
def test_a_region_that_is_none_is_refused(wrong):
    with pytest.raises(CacheError, match=r"must have 'bbox': \[x, y, width, height\]"):
        regions_of([wrong], SIZE)


def test_crops_are_cut_out_of_the_picture_that_the_set_saw(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    save(tmp_path / "a.png", pixels, 6)
    reader = FolderReader(tmp_path)
    for upright, expected in ((False, pixels), (True, shown(pixels, 6))):
        whole = read_picture(reader, "a.png", upright)
        np.testing.assert_array_equal(whole, expected)
        # Rounded to even, 1.5 and 2.5 would be the same edge, and encoders refuse a picture without pixels.
        (crop,) = cut(reader, upright, [("a.png", at(1.5, 0, 2.5, 40))])
        np.testing.assert_array_equal(crop, np.asarray(whole)[:40, 1:3])


def test_the_file_with_the_regions_is_found_and_read(tmp_path):
    scenes = generate_scenes(tmp_path / "scenes", train=2, val=1, test=1)
    (scenes.parent / "broken.yaml").write_text("name: [")
    for root in (scenes.parent, scenes.parent / "images"):
        assert sorted(regions_in("scenes", root)) == [f"scene_{number:05}.jpg" for number in range(4)]
    with pytest.raises(CacheError, match=r"no manifest of 'birds' .*: check `data_root`"):
        regions_in("birds", scenes.parent)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "file_name,caption", "no image in .* has regions"),
        ("a.json", '{"images": [{"filename": "1.jpg"}]}', "no image in .* has regions"),
        ("a.json", '{"images": [{"regions": [1]}]}', "is no Karpathy JSON"),
        ("a.json", '{"images": [{"filename": "1.jpg", "regions": 5}]}', "is no Karpathy JSON"),
        ("a.json", "{", "is no Karpathy JSON"),
    ],
)
def test_a_caption_file_without_regions_is_said_to_have_none(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    (tmp_path / "x.yaml").write_text(f"name: x\nimages: .\ncaptions: {name}\n")
    with pytest.raises(CacheError, match=message):
        regions_in("x", tmp_path)


def test_binary_selection_by_hand():
    # Rows are the crops A and C, columns the captions A and C.
    similarity = torch.tensor([[[3.0, 1.0], [2.0, 4.0]], [[1.0, 2.0], [0.0, 2.0]], [[5.0, 6.0], [7.0, 6.5]]])
    # Crop C: 4 > 2, 2 > 0, 6.5 < 7; caption C: 4 > 1, 2 = 2, 6.5 > 6.
    assert selection_accuracy(similarity, "pessimistic") == pytest.approx([100 / 3, 200 / 3, 200 / 3, 200 / 3])
    assert selection_accuracy(similarity, "mean")[3] == pytest.approx(250 / 3)
    assert selection_accuracy(similarity, "optimistic")[3] == 100


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Return a folder with scenes, their store, and a run with Gaussians and one with vectors."""
    folder = tmp_path_factory.mktemp("crops")
    manifest = generate_scenes(folder / "scenes", train=12, val=3, test=6)
    options = {"visual": "resnet18", "visual_weights": "random:0", "image_size": 64, "text": "words"}
    xret.extract(manifest, folder / "scenes.zarr", **options, device="cpu")
    for name in ("gaussian-vsepp", "vsepp"):
        train(str(folder / "scenes.zarr"), load_recipe(name, SMALL), folder / name, device="cpu")
    return folder


def test_crops_of_the_scenes_are_what_a_plain_loop_makes_of_them(scenes, monkeypatch):
    monkeypatch.setattr(crops_module, "PART", 3)
    run = scenes / "gaussian-vsepp"
    found = diagnose(run, device="cpu", data_root=scenes / "scenes").tables
    seen = embed_split(Ranker(run, device="cpu"), "test")
    image_encoders, text_encoders = map(seen.ranker.encoders, ("image", "text"))
    document = json.loads((scenes / "scenes" / "dataset_scenes.json").read_text())
    images = [image for image in document["images"] if image["split"] == "test"]
    rows, uncertain = (iter(found[name].rows) for name in ("crops", "uncertainty of crops"))
    for threshold in THRESHOLDS:
        scores, sums = [], []
        for image in images:
            one = triplet(regions_of(image["regions"], (224, 224)), (224, 224), threshold)
            if one is None:
                continue
            with Image.open(scenes / "scenes" / "images" / image["filename"]) as picture:
                crops = [picture.crop(tuple(map(int, part.box))) for part in one[::2]]
            (pictures,) = encode_images_by_all(image_encoders, "cpu", crops)
            (texts,) = encode_captions_by_all(text_encoders, "cpu", [part.phrase for part in one[::2]])
            with torch.no_grad():
                pictures, texts = seen.model.image(pictures).embedding, seen.model.text(texts).embedding
                scores.append(seen.model.similarity(pictures, texts))
            sums.append(torch.cat([pictures.log_variance.sum(1), texts.log_variance.sum(1)]))
        if scores:
            accuracies = selection_accuracy(torch.stack(scores), "pessimistic")
            assert next(rows) == [f"{threshold:.0%}", len(scores), *accuracies]
            means = torch.stack(sums).mean(0).tolist()
            assert next(uncertain) == [f"{threshold:.0%}", *(pytest.approx(mean, rel=1e-3) for mean in means)]
    assert (next(rows, None), next(uncertain, None)) == (None, None)


@pytest.fixture
def genome(scenes, tmp_path):
    """Return a folder of the test pictures of the scenes and their regions, as Visual Genome has such."""
    document = json.loads((scenes / "scenes" / "dataset_scenes.json").read_text())
    images = [image for image in document["images"] if image["split"] == "test"]
    data, described = [], []
    for number, image in enumerate(images):
        part = ("VG_100K", "VG_100K_2")[number >= 3]
        (tmp_path / part).mkdir(exist_ok=True)
        shutil.copy(scenes / "scenes" / "images" / image["filename"], tmp_path / part)
        regions = [
            dict(zip(("x", "y", "width", "height"), one["bbox"], strict=True), phrase=one["phrase"], image_id=number)
            for one in image["regions"]
        ]
        described.insert(0, {"regions": regions, "id": number})
        url = f"https://cs.stanford.edu/people/rak248/{part}/{image['filename']}"
        data.append({"image_id": number, "url": url, "width": 224, "height": 224, "coco_id": None})
    data.append({"image_id": 99, "url": "https://x/VG_100K/99.jpg", "width": 5, "height": 5})
    described.append({"regions": [], "id": 99})
    (tmp_path / "image_data.json").write_text(json.dumps(data))
    (tmp_path / "region_descriptions.json").write_text(json.dumps(described))
    return tmp_path


def test_crops_of_visual_genome_need_no_store(scenes, genome, caplog):
    run = scenes / "gaussian-vsepp"
    own = diagnose(run, device="cpu", data_root=scenes / "scenes").tables
    found = diagnose(run, device="cpu", visual_genome=genome)
    assert "crops" not in found.reasons
    for name in ("crops", "uncertainty of crops"):
        assert [row[:2] for row in found.tables[name].rows] == [row[:2] for row in own[name].rows]
        for ours, theirs in zip(found.tables[name].rows, own[name].rows, strict=True):
            assert ours[1:] == pytest.approx(theirs[1:], rel=1e-4)
    data = json.loads((genome / "image_data.json").read_text())
    data[0]["width"] = 448
    (genome / "image_data.json").write_text(json.dumps(data))
    fewer = diagnose(run, device="cpu", visual_genome=genome).tables["crops"].rows
    assert [row[1] for row in fewer] < [row[1] for row in own["crops"].rows]
    assert "1 image left out" in caplog.text
    with pytest.raises(RunError, match="`data_root` and `visual_genome` are two places"):
        diagnose(run, device="cpu", visual_genome=genome, data_root=scenes / "scenes")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("image_data.json", None, r"image_data\.json cannot be read \(No such file"),
        ("region_descriptions.json", "[{", "does not hold image_data"),
        ("region_descriptions.json", '[{"id": 5000, "regions": [1]}]', "does not hold image_data"),
        ("region_descriptions.json", '{"images": []}', "does not hold image_data"),
        ("region_descriptions.json", '[{"id": 1, "regions": [{"phrase": "a dog"}]}]', "does not hold image_data"),
    ],
)
def test_what_is_not_visual_genome(genome, file, text, said):
    (genome / file).unlink() if text is None else (genome / file).write_text(text)
    with pytest.raises(CacheError, match=said):
        read_visual_genome(genome)


def test_vectors_choose_too_and_have_no_uncertainty(scenes):
    found = diagnose(scenes / "vsepp", device="cpu", data_root=scenes / "scenes" / "images").tables
    assert "uncertainty of crops" not in found
    values = [value for row in found["crops"].rows for value in row[2:]]
    assert len(values) == 4 * len(found["crops"].rows) > 0
    assert all(0 <= value <= 100 for value in values)


def test_why_there_are_no_crops_is_said_and_the_rest_is_there(scenes, tmp_path):
    run = scenes / "vsepp"
    found = diagnose(run, device="cpu")
    assert "crops" not in found.tables
    assert found.reasons["crops"].endswith("or Visual Genome's with `visual_genome=DIR`")
    assert found.tables["cost"].rows[0][1] == 16
    assert "check `data_root`" in diagnose(run, device="cpu", data_root=tmp_path).reasons["crops"]
    shutil.copytree(scenes / "scenes", tmp_path / "scenes")
    document = json.loads((scenes / "scenes" / "dataset_scenes.json").read_text())
    for image in document["images"]:
        image["regions"] = image["regions"][:1]
    (tmp_path / "scenes" / "dataset_scenes.json").write_text(json.dumps(document))
    found = diagnose(run, device="cpu", data_root=tmp_path / "scenes")
    assert found.reasons["crops"].startswith("none of the 6 images that have regions has two")
    (tmp_path / "scenes" / "images" / "scene_00015.jpg").write_bytes(b"")
    found = diagnose(run, device="cpu", data_root=tmp_path / "scenes")
    assert "scene_00015.jpg: the file is empty" in found.reasons["crops"]
