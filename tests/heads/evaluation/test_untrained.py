"""What frozen encoders reach without a head, against ranks that are counted here, one query after another."""

import json

import command_line
import numpy as np
import pytest
import torch
from conftest import tiny_dataset
from PIL import Image
from plain_evaluation import globals_of, plain_rsum
from scores import score
from small_checkpoints import save_text_model
from small_store import make_store
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

import xret
from xret.heads.evaluation.evaluation import evaluate
from xret.pipeline.errors import RunError
from xret.pipeline.store import FeatureCache

SPACE = "of one model"
SMALL = ["--set", "model.dim=16", "--set", "data.batch_size=16", "--set", "schedule.epochs=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("untrained")


@pytest.fixture(scope="module")
def store(folder):
    return make_store(folder / "joint.zarr", text="tokens", space=SPACE, views=2)


def called(*words):
    return command_line.run(*words, "--device", "cpu").stdout


@pytest.fixture(scope="module")
def run(store, folder):
    return folder / "run", called("train-head", store, "--recipe", "linear", *SMALL, "--out", folder / "run")


def units_of(store, split, view=0):
    """Read the unit global features of a split, and the image of each caption."""
    *sides, owner = globals_of(store, split, view=view)
    return *(rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in sides), owner


@torch.no_grad()
def test_it_equals_what_the_library_alone_gives(tmp_path):
    """The ten lines of transformers' documentation of CLIP, on the files of a data set."""
    tiny_dataset.__wrapped__(tmp_path)(folder=tmp_path / "tiny", train=2, val=2, test=6)
    clip = save_text_model(tmp_path / "clip", "clip")
    words = {"encoder": f"hf:{clip}", "dtype": "float32", "device": "cpu"}
    xret.extract(tmp_path / "tiny" / "tiny.yaml", tmp_path / "s.zarr", **words)
    found = score(tmp_path / "s.zarr")

    model = CLIPModel.from_pretrained(clip).eval()
    processor, tokenizer = CLIPImageProcessor.from_pretrained(clip), AutoTokenizer.from_pretrained(clip)
    pictures = [Image.open(tmp_path / "tiny" / "images" / name).convert("RGB") for name in found.file_names]
    inputs = tokenizer(found.texts, padding=True, return_tensors="pt")
    given = model(**inputs, pixel_values=processor(pictures, return_tensors="pt").pixel_values)
    expected = given.image_embeds @ given.text_embeds.T
    torch.testing.assert_close(found.similarity, expected, rtol=0, atol=1e-5)
    (result,) = xret.evaluate(tmp_path / "s.zarr", device="cpu").results
    assert result.rsum == pytest.approx(plain_rsum(expected, found.caption_image.tolist()))
    assert result.paper_rsum is None


def test_over_all_views_it_is_the_mean(store):
    (first, captions, owner), (second, _, _) = units_of(store, "test"), units_of(store, "test", 1)
    found = evaluate(store, device="cpu", views=True)
    assert found.views == (2,)
    assert found.results[0].rsum == pytest.approx(plain_rsum((first + second) / 2 @ captions.T, owner))


def test_the_command_takes_a_store_in_the_place_of_a_run(store, run):
    told = json.loads(called("eval", store, "--json"))
    assert told["run"].startswith("untrained grid@")
    assert told["store"] == store
    assert told["results"][0]["rsum"] == evaluate(store, device="cpu").results[0].rsum
    both = called("eval", store, run[0]).splitlines()[0]
    assert "untrained grid@" in both
    assert str(run[0]) in both


def test_trainings_ablations_and_reports_show_what_is_to_be_beaten(store, run, folder):
    frozen = evaluate(store, device="cpu", split="val").results[0].rsum
    assert f"the frozen encoders alone: {frozen:.1f}\n" in run[1]
    words = ["--recipe", "linear", *SMALL, "--vary", "optimizer.lr=0.001,0.01", "--out", folder / "ablated"]
    (row,) = [line for line in called("ablate", store, *words).splitlines() if line.startswith("untrained grid@")]
    assert f"{evaluate(store, device='cpu').results[0].rsum:.2f}" in row
    called("report", run[0], "--out", folder / "report.html")
    assert "untrained grid@" in (folder / "report.html").read_text()


def test_without_a_common_space_there_is_nothing_to_compare(folder):
    store = make_store(folder / "apart.zarr", text="tokens")
    with pytest.raises(RunError, match=r"has no image and caption features in one space, which cosine could compare"):
        evaluate(store, device="cpu")
    assert "frozen" not in called("train-head", store, "--recipe", "linear", *SMALL, "--out", folder / "apart")


def test_of_several_pairs_one_is_chosen(folder):
    store = make_store(folder / "several.zarr", text="tokens", space=SPACE)
    make_store(store, text="tokens", space=SPACE, weights="b")
    with pytest.raises(RunError, match=r"several image and caption sets in one space.*choose by `features=IMAGE,TEXT`"):
        evaluate(store, device="cpu")
    for name in FeatureCache.open(store).set_names("images"):
        assert evaluate(store, features=name, device="cpu").runs[0].startswith(f"untrained {name} and ")
