"""Attention is that of the model, of slots or of SCAN's words, and lights the picture where it looks."""

import base64
import io
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import small_store
import torch
from PIL import Image
from small_reports import require_sound
from small_store import make_store
from small_trainings import recipe_of

from xret.heads.recipes.recipe import load_recipe
from xret.heads.report import write_report
from xret.heads.report.attention import (
    CELLS,
    Place,
    attention_of_run,
    grid_boxes,
    slot_attention,
    word_attention,
    words_of,
)
from xret.heads.report.pictures import SHADE, shade
from xret.heads.training.train import train
from xret.pipeline.store.create import image_set

OUTLINES = '<rect x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)" class="outline"'


def light(map_):
    """Return how far a map leaves each of its cells as it is, from 0 to 1."""
    return 1 - np.asarray(Image.open(io.BytesIO(base64.b64decode(map_))))[..., 3] / SHADE


def test_attention_is_that_of_the_model(setdiv):
    weights = slot_attention(setdiv.seen, [1, 4])
    assert weights.shape == (2, 4, 4)
    torch.testing.assert_close(weights.sum(1), torch.ones(2, 4))  # slots compete for every row
    torch.testing.assert_close(weights[1:], slot_attention(setdiv.seen, [4]))


def test_the_boxes_of_a_grid_lie_row_by_row():
    assert grid_boxes(1, 2).tolist() == [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]
    assert grid_boxes(2, 3)[4].tolist() == pytest.approx([1 / 3, 1 / 2, 2 / 3, 1])
    windows = grid_boxes(3, 7, (1, 2))  # four in a row, of which the last is cut off
    assert windows.shape == (12, 4)
    assert windows[:4, 0].tolist() == pytest.approx([0, 2 / 7, 4 / 7, 6 / 7])
    assert windows[7].tolist() == pytest.approx([6 / 7, 1 / 3, 1, 2 / 3])


def test_regions_are_lit_where_they_are():
    boxes = np.array([[0.0, 0.0, 0.5, 0.5], [0.25, 0.25, 1.0, 1.0], [0.0, 0.5, 0.25, 1.0]])
    weights = np.array([0.2, 0.4, 0.1])
    place = Place(None, boxes)
    lit = place.lit(np.append(weights, 0.0))  # the last is padding
    for row, column in np.ndindex(lit.shape):
        x, y = (column + 0.5) / CELLS, (row + 0.5) / CELLS
        inside = [w for w, (x1, y1, x2, y2) in zip(weights, boxes, strict=True) if x1 <= x <= x2 and y1 <= y <= y2]
        assert lit[row, column] == pytest.approx(max(inside, default=0) / 0.4)
    found = place.map(np.append(weights, 0.0), "", "", "")
    assert found.boxes == boxes[[1, 0]].tolist()
    assert found.shade == shade(lit)


@pytest.mark.parametrize("size", [(40, 30), (0, 0)])  # (0, 0): imports whose source does not give it
def test_regions_of_a_store_are_drawn(tmp_path, folder, monkeypatch, size):
    write = small_store.write

    def with_places(features, arrays, *rest):
        if "size" in arrays:
            count = len(arrays["size"])
            boxes = np.tile(np.array([4.0, 3.0, 20.0, 15.0], dtype=np.float32), (count, small_store.ROWS, 1))
            arrays = {**arrays, "boxes": boxes, "size": np.tile(np.array(size, dtype=np.int32), (count, 1))}
        write(features, arrays, *rest)

    def with_boxes(cache, facts, most):
        return image_set(cache, replace(facts, arrays=("size", "boxes")), most=most)

    monkeypatch.setattr(small_store, "image_set", with_boxes)
    monkeypatch.setattr(small_store, "write", with_places)
    store = small_store.new_store(tmp_path / "roi.zarr", image="roi")
    train(store, recipe_of("setdiv", 2), tmp_path / "run", device="cpu")
    write_report([tmp_path / "run"], tmp_path / "roi.html", data_root=folder, device="cpu")
    text = (tmp_path / "roi.html").read_text()
    require_sound(text)
    outlines = re.findall(OUTLINES, text)
    if size == (0, 0):
        assert "the store does not know where its rows lie in a picture" in text
        assert outlines == []
        return
    assert len(outlines) == 3 * 4 * 2  # images, slots, regions
    assert set(outlines) == {("4.0", "3.0", "16.0", "12.0")}


def test_images_that_cannot_be_read_are_left_out(tmp_path, setdiv, shown, folder):
    shutil.copytree(folder / "images", tmp_path / "images")
    names = setdiv.seen.file_names
    (tmp_path / "images" / names[0]).write_bytes(b"no picture")
    _, images, reason = attention_of_run(shown("setdiv", tmp_path), len(names), 0)
    assert (len(images), reason) == (len(names) - 1, "")
    for name in names:
        (tmp_path / "images" / name).write_bytes(b"no picture")
    assert attention_of_run(shown("setdiv", tmp_path), len(names), 0) == ("", [], "the pictures cannot be read")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    runs = tmp_path_factory.mktemp("words")

    def run(name, kind, *settings):
        if not (runs / name).exists():
            store = make_store(runs / f"{name}.zarr", image=kind[0], text=kind[1])
            words = [] if kind[1] == "tokens" else ["adapter.words.word_dim=8", "adapter.words.ends=false"]
            recipe = load_recipe("scan", ["model.dim=16", "data.batch_size=16", "schedule.epochs=1", *words, *settings])
            train(store, recipe, runs / name, device="cpu")
        return runs / name

    return run


@pytest.fixture(scope="module")
def scan(run_of, shown, folder):
    return shown(run_of("t-i", ("grid", "words")), folder)


@pytest.mark.parametrize("direction", ["t-i", "i-t"])
def test_weights_are_those_that_the_run_compares_with(run_of, shown, folder, direction):
    settings = ["similarity.direction=i-t"] if direction == "i-t" else []
    seen, image, caption = shown(run_of(direction, ("grid", "words"), *settings), folder).seen, 3, 11
    weights, images, captions = word_attention(seen, image, caption), seen.image.embedding, seen.text.embedding
    regions = torch.nn.functional.normalize(images.rows[image], dim=1)
    words = torch.nn.functional.normalize(captions.rows[caption, : captions.length[caption]], dim=1)
    assert weights.shape == (len(regions), len(words))
    asked, found = (words, weights.T @ regions) if direction == "t-i" else (regions, weights @ words)
    scale = seen.ranker.run.recipe.similarity["lambda_lse"]
    relevance = scale * torch.cosine_similarity(asked, found)
    torch.testing.assert_close(relevance.logsumexp(0) / scale, seen.similarity[image, caption])


def test_words_are_those_that_the_run_reads(scan, run_of, shown, folder, tmp_path):
    for caption, text in enumerate(scan.seen.texts):
        assert words_of(scan.seen, caption) == text.split()
    tokens = shown(run_of("tokens", ("grid", "tokens"))).seen
    assert words_of(tokens, 4) == [f"token {number}" for number in range(1, len(tokens.texts[4].split()) + 1)]
    ends = shown(run_of("ends", ("grid", "words"), "adapter.words.ends=true"), folder)
    assert words_of(ends.seen, 0) == ["<start>", *ends.seen.texts[0].split(), "<end>"]
    assert word_attention(ends.seen, 0, 0).shape[1] == len(words_of(ends.seen, 0))
    assert attention_of_run(ends, 1, 0)[1]
    other = make_store(tmp_path / "other.zarr", words="zebra")
    unknown = shown(run_of("t-i", ("grid", "words")), store=other).seen
    assert words_of(unknown, 0) == ["(unknown word)", *unknown.texts[0].split()[1:]]


def test_maps_show_the_weights_of_the_closest_own_caption_and_of_the_first_result(scan):
    what, images, reason = attention_of_run(scan, 3, 0)
    assert (what[:9], reason) == ("Each word", "")
    scores = scan.seen
    for name in {image.name for image in images}:
        row = scores.ids.index(name)
        own = [c for c, owner in enumerate(scores.caption_image.tolist()) if owner == row]
        closest = max(own, key=lambda c: scores.similarity[row, c].item())
        first = int(scores.similarity[row].argmax())
        drawn = [image for image in images if image.name == name]
        expected = [scores.texts[c] for c in ([closest] if first in own else [closest, first])]
        assert [one.caption for one in drawn] == expected
        assert "each weight would be 25.0 %" in drawn[0].note
        weights = word_attention(scan.seen, row, closest).numpy()
        for column, word in enumerate(drawn[0].maps):
            assert word.title == expected[0].split()[column]
            assert float(word.text.removesuffix(" %")) == pytest.approx(100 * weights[:, column].max(), abs=0.06)
            expected_light = weights[:, column] / weights[:, column].max()
            seen = light(word.shade)[CELLS // 4 :: CELLS // 2, CELLS // 4 :: CELLS // 2]  # amid the four cells
            np.testing.assert_allclose(seen.ravel(), expected_light, atol=0.01)


def test_long_captions_end_with_how_much_is_missing(scan, monkeypatch):
    monkeypatch.setattr("xret.heads.report.attention.WORDS", 2)
    for image in attention_of_run(scan, 2, 0)[1]:
        count = len(image.caption.split())
        assert len(image.maps) == min(2, count)
        assert image.note.endswith(f", {count - 2} more words are not shown") == (count > 2)


def test_both_directions_have_their_page_and_others_a_reason(run_of, folder, tmp_path):
    runs = [run_of("t-i", ("grid", "words")), run_of("i-t", ("grid", "words"), "similarity.direction=i-t")]
    write_report(runs, tmp_path / "both.html", data_root=folder, device="cpu")
    text = (tmp_path / "both.html").read_text()
    assert text.count("Each word attends to the places") == text.count("Each place attends to the words") == 1
    assert text.count('class="looks"') >= 4
    for name in ("frames", "roi"):
        write_report([run_of(name, (name, "words"))], tmp_path / f"{name}.html", data_root=folder, device="cpu")
        page = (tmp_path / f"{name}.html").read_text()
        assert "the store does not know where its rows lie in a picture" in page
        assert 'class="looks"' not in page
