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

from xret.heads.evaluation.scoring import embed_split, open_run
from xret.heads.modules.embedding import Sequence
from xret.heads.modules.similarity import CrossAttention
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report import write_report
from xret.heads.report.attention import attention_of_run, word_attention, words_of
from xret.heads.report.examples import PageRun
from xret.heads.report.pictures import COVER, Pictures
from xret.heads.training.train import train

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
    return embed_split(
        open_run(run_of("t-i", ("grid", "words"), "adapter.words.word_dim=8")), "test", torch.device("cpu")
    )


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
    weights = word_attention(view, image, caption)
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
    tokens = embed_split(open_run(run_of("tokens", ("grid", "tokens"))), "test", torch.device("cpu"))
    count = len(tokens.scores.texts[4].split())
    assert words_of(tokens, 4) == [f"token {number}" for number in range(1, count + 1)]


def test_ends_of_captions_are_words_too(run_of, folder):
    run = run_of("ends", ("grid", "words"), "adapter.words.word_dim=8", "adapter.words.ends=true")
    view = embed_split(open_run(run), "test", torch.device("cpu"))
    assert words_of(view, 0) == ["<start>", *view.scores.texts[0].split(), "<end>"]
    assert word_attention(view, 0, 0).shape[1] == len(words_of(view, 0))
    assert attention_of_run(page_run(view, folder), 1, 0)[1]


def test_a_word_without_a_vector_is_said_to_be_unknown(view, run_of, tmp_path):
    other = make_store(tmp_path / "other.zarr", words="zebra")
    other = embed_split(open_run(run_of("t-i", ("grid", "words")), other), "test", torch.device("cpu"))
    assert words_of(other, 0) == ["(unknown word)", *other.scores.texts[0].split()[1:]]
    assert other.scores.texts[0].startswith("zebra ")


def page_run(view, folder):
    return PageRun("scan", view, Pictures(view.ranker.cache, folder))


def test_maps_show_the_weights_of_the_closest_own_caption_and_of_the_first_result(view, folder):
    what, images, reason = attention_of_run(page_run(view, folder), 3, 0)
    assert (what[:9], reason) == ("Each word", "")
    titles = [image.title for image in images]
    for name in dict.fromkeys(title.split(":")[0] for title in titles):
        row = view.scores.ids.index(name.removeprefix("Image "))
        own = [c for c, owner in enumerate(view.scores.caption_image.tolist()) if owner == row]
        closest = max(own, key=lambda c: view.scores.similarity[row, c].item())
        first = int(view.scores.similarity[row].argmax())
        shown = [image for image in images if image.title.startswith(f"{name}:")]
        expected = [view.scores.texts[c] for c in ([closest] if first in own else [closest, first])]
        assert [one.text.split(" (similarity")[0] for one in shown] == expected
        assert "each weight would be 25.0 %" in shown[0].text
        weights = word_attention(view, row, closest).numpy()
        for column, word in enumerate(shown[0].maps):
            assert word.title == expected[0].split()[column]
            assert float(word.text.removesuffix(" %")) == pytest.approx(100 * weights[:, column].max(), abs=0.06)
            data = re.search('base64,([^"]+)', word.svg)[1]
            warm = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[..., 3] / COVER
            np.testing.assert_allclose(warm.ravel(), weights[:, column] / weights[:, column].max(), atol=0.01)


def test_long_captions_end_with_how_much_is_missing(view, folder, monkeypatch):
    monkeypatch.setattr("xret.heads.report.attention.WORDS", 2)
    _, images, _ = attention_of_run(page_run(view, folder), 2, 0)
    for image in images:
        count = len(image.text.split(" (similarity")[0].split())
        assert len(image.maps) == min(2, count)
        assert image.text.endswith(f", {count - 2} more words are not shown") == (count > 2)


def test_both_directions_have_their_page_and_others_a_reason(run_of, folder):
    runs = [
        run_of("t-i", ("grid", "words"), "adapter.words.word_dim=8"),
        run_of("i-t", ("grid", "words"), "adapter.words.word_dim=8", "similarity.direction=i-t"),
    ]
    write_report(runs, folder / "both.html", data_root=folder, device="cpu")
    text = (folder / "both.html").read_text()
    assert text.count("Each word attends to the places") == text.count("Each place attends to the words") == 1
    assert text.count('class="looks"') >= 4
    for name, reason in (("frames", "its rows are frames of a video"), ("roi", "does not know where its regions are")):
        write_report([run_of(name, (name, "words"))], folder / f"{name}.html", data_root=folder, device="cpu")
        page = (folder / f"{name}.html").read_text()
        assert reason in page
        assert 'class="looks"' not in page
