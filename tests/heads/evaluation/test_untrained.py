"""What frozen encoders reach without a head, against ranks that are counted here, one query after another."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import tiny_dataset
from PIL import Image
from scores import score
from small_checkpoints import save_text_model
from small_store import make_store
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

import xret
from xret.cli.ablate import ablate
from xret.cli.eval import eval_
from xret.cli.report import report
from xret.cli.train_head import train_head
from xret.heads.evaluation.evaluation import evaluate
from xret.pipeline.errors import RunError
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")

SPACE = "of one model"
SMALL = ["--set", "model.dim=16", "--set", "data.batch_size=16", "--set", "schedule.epochs=1", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("untrained")


@pytest.fixture(scope="module")
def store(folder):
    return make_store(folder / "joint.zarr", text="tokens", space=SPACE, views=2)


@pytest.fixture(scope="module")
def run(store, folder):
    words = [store, "--recipe", "linear", *SMALL, "--out", str(folder / "run")]
    done = CliRunner().invoke(train_head, words)
    assert done.exit_code == 0, done.output
    return folder / "run", done.stdout


def globals_of(store, split, view=0):
    """Read the unit global features of a split, and the image of each caption."""
    cache = FeatureCache.open(store)
    first, last = cache.splits[split]
    start, stop = cache.captions_of(first, last)
    images = cache.image_set().global_(np.arange(first, last), view)
    captions = cache.caption_set().global_(np.arange(start, stop))
    unit = [rows.astype(np.float64) for rows in (images, captions)]
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in unit]
    return *unit, cache.caption_image[start:stop] - first


def recalls_of(scores, owner):
    """Count both ways the share of queries whose first own item stands among the first k; equal items go before it."""
    found = {}
    for way, table, own in (
        ("image_to_text", scores, [np.flatnonzero(owner == image) for image in range(len(scores))]),
        ("text_to_image", scores.T, [[image] for image in owner]),
    ):
        ranks = []
        for row, mine in zip(table, own, strict=True):
            others = np.delete(row, mine)
            ranks.append(1 + int((others >= max(row[item] for item in mine) - 1e-6).sum()))
        found[way] = {f"R@{k}": 100 * np.mean(np.array(ranks) <= k) for k in (1, 5, 10)}
    return found


def test_it_is_the_cosine_of_the_cached_global_features(store):
    images, captions, owner = globals_of(store, "test")
    np.testing.assert_allclose(score(store, device="cpu").similarity, images @ captions.T, atol=1e-5)
    (result,) = evaluate(store, device="cpu").results
    for way, expected in recalls_of(images @ captions.T, owner).items():
        for name, value in expected.items():
            assert getattr(result, way)[name] == pytest.approx(value), (way, name)
    assert result.paper_rsum is None


@torch.no_grad()
def test_it_equals_what_the_library_alone_gives(tmp_path):
    """The ten lines of transformers' documentation of CLIP, on the files of a data set."""
    tiny_dataset.__wrapped__(tmp_path)(folder=tmp_path / "tiny", train=2, val=2, test=6)
    clip = save_text_model(tmp_path / "clip", "clip")
    words = {"encoder": f"hf:{clip}", "dtype": "float32", "device": "cpu"}
    xret.extract(tmp_path / "tiny" / "tiny.yaml", tmp_path / "s.zarr", **words)
    found = score(tmp_path / "s.zarr", device="cpu")

    model = CLIPModel.from_pretrained(clip).eval()
    processor, tokenizer = CLIPImageProcessor.from_pretrained(clip), AutoTokenizer.from_pretrained(clip)
    pictures = [Image.open(tmp_path / "tiny" / "images" / name).convert("RGB") for name in found.file_names]
    inputs = tokenizer(found.texts, padding=True, return_tensors="pt")
    given = model(**inputs, pixel_values=processor(pictures, return_tensors="pt").pixel_values)
    expected = given.image_embeds @ given.text_embeds.T
    torch.testing.assert_close(found.similarity, expected, rtol=0, atol=1e-5)
    table = recalls_of(expected.numpy(), found.caption_image.numpy())
    (result,) = xret.evaluate(tmp_path / "s.zarr", device="cpu").results
    assert result.rsum == pytest.approx(sum(sum(way.values()) for way in table.values()))


def test_over_all_views_it_is_the_mean(store):
    (first, captions, owner), (second, _, _) = globals_of(store, "test"), globals_of(store, "test", 1)
    found = evaluate(store, device="cpu", views=True)
    expected = recalls_of((first + second) / 2 @ captions.T, owner)
    assert found.views == (2,)
    assert found.results[0].rsum == pytest.approx(sum(sum(way.values()) for way in expected.values()))


def test_the_command_takes_a_store_in_the_place_of_a_run(store, run):
    told = json.loads(CliRunner().invoke(eval_, [store, "--device", "cpu", "--json"]).stdout)
    assert told["run"].startswith("untrained grid@")
    assert told["store"] == store
    assert told["results"][0]["rsum"] == evaluate(store, device="cpu").results[0].rsum
    both = CliRunner().invoke(eval_, [store, str(run[0]), "--device", "cpu"])
    assert "untrained grid@" in both.stdout.splitlines()[0]
    assert str(run[0]) in both.stdout.splitlines()[0]


def test_a_training_says_what_it_has_to_beat(store, run):
    frozen = evaluate(store, device="cpu", split="val").results[0].rsum
    assert run[1].strip().endswith(f"the frozen encoders alone: {frozen:.1f}")


def test_an_ablation_has_a_row_of_it(store, folder):
    words = [store, "--recipe", "linear", *SMALL, "--vary", "optimizer.lr=0.001,0.01", "--out", str(folder / "ablated")]
    done = CliRunner().invoke(ablate, words)
    assert done.exit_code == 0, done.output
    frozen = evaluate(store, device="cpu").results[0].rsum
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("untrained grid@")]
    assert f"{frozen:.2f}" in row


def test_a_report_has_a_row_of_it(run, folder):
    page = folder / "report.html"
    done = CliRunner().invoke(report, [str(run[0]), "--out", str(page), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "untrained grid@" in page.read_text()


def test_without_a_common_space_there_is_nothing_to_compare(folder):
    store = make_store(folder / "apart.zarr", text="tokens")
    with pytest.raises(RunError, match=r"has no image and caption features in one space, which cosine could compare"):
        evaluate(store, device="cpu")
    done = CliRunner().invoke(train_head, [store, "--recipe", "linear", *SMALL, "--out", str(folder / "apart")])
    assert done.exit_code == 0, done.output
    assert "frozen" not in done.stdout


def test_of_several_pairs_one_is_chosen(folder):
    store = make_store(folder / "several.zarr", text="tokens", space=SPACE)
    make_store(store, text="tokens", space=SPACE, weights="b")
    names = FeatureCache.open(store).set_names("images")
    with pytest.raises(RunError, match=r"several image and caption sets in one space.*choose by --features IMAGE,TEXT"):
        evaluate(store, device="cpu")
    for name in names:
        assert evaluate(store, features=name, device="cpu").runs[0].startswith(f"untrained {name} and ")


def test_diagnostics_are_of_a_run(store):
    done = CliRunner().invoke(eval_, [store, "--diagnostics"])
    assert done.exit_code == 2
    assert "--diagnostics takes one run, and no store" in done.stderr


def test_what_is_neither_a_run_nor_a_store_is_said_to_be_no_run(tmp_path):
    with pytest.raises(RunError, match=r"is no run: it has no run.json"):
        evaluate(tmp_path / "nothing")
