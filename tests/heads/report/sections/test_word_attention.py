"""SCAN's cross-attention on the page: the weights against a loop, the words of a caption, and where they are drawn."""

import base64
import io
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image
from small_store import make_store

from xret.heads.modules.embedding import Sequence
from xret.heads.modules.similarity import CrossAttention
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report import write_report
from xret.heads.report.pictures import COVER, Pictures
from xret.heads.report.sections.word_attention import WORDS, word_weights, words_of, words_over_images
from xret.heads.report.views import open_views
from xret.heads.training.training import train

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=16", "schedule.epochs=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for number in range(72):
        pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.jpg")
    return folder


@pytest.fixture(scope="module")
def run_of(folder):
    def run(name, kind, *settings):
        if not (folder / name).exists():
            store = make_store(folder / f"{name}.zarr", image=kind[0], text=kind[1])
            recipe = load_recipe("scan", [*SMALL, *settings])
            train(store, recipe, folder / name, device="cpu")
        return folder / name

    return run


@pytest.fixture(scope="module")
def view(run_of):
    (view,) = open_views([run_of("t-i", ("grid", "words"), "adapter.words.word_dim=8")], None, "test", "cpu")
    return view


def looked_at(queries, context, scale, slope):
    """Evaluate the attention of `queries [T, D]` over `context [M, D]` as SCAN section 3.1 says: M x T."""
    s = [[torch.cosine_similarity(q, v, dim=0).item() for q in queries] for v in context]
    clipped = [[value if value > 0 else slope * value for value in row] for row in s]
    norms = [math.sqrt(sum(value**2 for value in row)) or 1.0 for row in clipped]
    powers = [[math.exp(scale * value / norm) for value in row] for row, norm in zip(clipped, norms, strict=True)]
    return [[row[t] / sum(other[t] for other in powers) for t in range(len(queries))] for row in powers]


@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("direction", ["t-i", "i-t"])
def test_weights_agree_with_a_loop_over_pairs(direction, slope):
    torch.manual_seed(0)
    images = Sequence(torch.randn(3, 5, 6, dtype=torch.float64), torch.tensor([5, 2, 4]))
    captions = Sequence(torch.randn(2, 4, 6, dtype=torch.float64), torch.tensor([3, 4]))
    module = CrossAttention(direction=direction, lambda_softmax=4.0, negative_slope=slope)
    weights = module.weights(images, captions)
    assert weights.shape == (3, 2, 5, 4)
    for i, regions in enumerate(images.length.tolist()):
        for c, words in enumerate(captions.length.tolist()):
            rows, columns = images.rows[i, :regions], captions.rows[c, :words]
            expected = torch.tensor(
                looked_at(columns, rows, 4.0, slope) if direction == "t-i" else looked_at(rows, columns, 4.0, slope),
                dtype=torch.float64,
            )
            found = weights[i, c, :regions, :words]
            torch.testing.assert_close(found, expected if direction == "t-i" else expected.T)


def test_weights_are_those_that_the_run_compares_with(view):
    image, caption = 3, 11
    weights = word_weights(view, image, caption)
    images, captions = view.image.embedding, view.text.embedding
    regions = torch.nn.functional.normalize(images.rows[image], dim=1)
    words = torch.nn.functional.normalize(captions.rows[caption, : captions.length[caption]], dim=1)
    assert weights.shape == (len(regions), len(words))
    relevance = torch.cosine_similarity(words, weights.T @ regions)
    scale = view.run.recipe.similarity["lambda_lse"]
    torch.testing.assert_close((scale * relevance).logsumexp(0) / scale, view.scores.similarity[image, caption])


def test_words_are_those_that_the_run_reads(view, run_of):
    for caption in range(len(view.scores.texts)):
        assert words_of(view, caption) == view.scores.texts[caption].split()
    (tokens,) = open_views([run_of("tokens", ("grid", "tokens"))], None, "test", "cpu")
    count = len(tokens.scores.texts[4].split())
    assert words_of(tokens, 4) == [f"token {number}" for number in range(1, count + 1)]


def test_ends_of_captions_are_words_too(run_of, folder):
    run = run_of("ends", ("grid", "words"), "adapter.words.word_dim=8", "adapter.words.ends=true")
    (view,) = open_views([run], None, "test", "cpu")
    assert words_of(view, 0) == ["<start>", *view.scores.texts[0].split(), "<end>"]
    assert word_weights(view, 0, 0).shape[1] == len(words_of(view, 0))
    assert words_over_images(view, Pictures(view.cache, folder), 1, 0).images


def test_a_word_without_a_vector_is_said_to_be_unknown(view, run_of, tmp_path):
    other = make_store(tmp_path / "other.zarr", words="zebra")
    (other,) = open_views([run_of("t-i", ("grid", "words"))], other, "test", "cpu")
    assert words_of(other, 0) == ["(unknown word)", *other.scores.texts[0].split()[1:]]
    assert other.scores.texts[0].startswith("zebra ")


def test_maps_show_the_weights_of_the_closest_own_caption_and_of_the_first_result(view, folder):
    reading = words_over_images(view, Pictures(view.cache, folder), 3, 0)
    assert (reading.by_word, reading.what, reading.reason, len(reading.images)) == (True, "cells", "", 3)
    for image in reading.images:
        row = view.scores.ids.index(image.name)
        own = [c for c, owner in enumerate(view.scores.caption_image.tolist()) if owner == row]
        closest = max(own, key=lambda c: view.scores.similarity[row, c].item())
        first = int(view.scores.similarity[row].argmax())
        assert [one.text for one in image.captions] == [
            view.scores.texts[c] for c in ([closest] if first in own else [closest, first])
        ]
        shown = image.captions[0]
        weights = word_weights(view, row, closest).numpy()
        for column, word in enumerate(shown.words):
            assert word.text == shown.text.split()[column]
            assert float(word.most) == pytest.approx(100 * weights[:, column].max(), abs=0.06)
            data = re.search('base64,([^"]+)', word.map)[1]
            warm = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[..., 3] / COVER
            np.testing.assert_allclose(warm.ravel(), weights[:, column] / weights[:, column].max(), atol=0.01)
        assert (shown.even, shown.more) == ("25.0", 0)


def test_long_captions_end_with_how_much_is_missing(view, folder, monkeypatch):
    monkeypatch.setattr("xret.heads.report.sections.word_attention.WORDS", 2)
    reading = words_over_images(view, Pictures(view.cache, folder), 2, 0)
    assert len(reading.images) == 2
    for image in reading.images:
        for caption in image.captions:
            assert len(caption.words) + caption.more == len(caption.text.split())
            assert len(caption.words) == 2
    assert WORDS > 2


def test_both_directions_have_their_page_and_vectors_have_none(run_of, folder):
    runs = [
        run_of("t-i", ("grid", "words"), "adapter.words.word_dim=8"),
        run_of("i-t", ("grid", "words"), "adapter.words.word_dim=8", "similarity.direction=i-t"),
    ]
    write_report(runs, folder / "both.html", data_root=folder, device="cpu")
    text = " ".join((folder / "both.html").read_text().split())
    assert text.count("Each word of a caption attends to the cells of the image") == 1
    assert text.count("Each of the cells of the image attends to the words of a caption") == 1
    assert text.count('class="looks"') >= 4
    for name, reason in (("frames", "Its rows are frames of a video"), ("roi", "does not know where its regions are")):
        write_report([run_of(name, (name, "words"))], folder / f"{name}.html", data_root=folder, device="cpu")
        page = (folder / f"{name}.html").read_text()
        assert reason in page
        assert 'class="looks"' not in page
