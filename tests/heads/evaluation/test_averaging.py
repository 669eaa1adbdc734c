"""An average of runs is a run: its scores are those computed from the runs' own, and everything reads it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import refused, run
from edited_runs import edited
from plain_evaluation import plain_rsum
from small_runs import make_pictures, make_run, make_store

import xret
from xret import errors
from xret.heads.evaluation.comparison import compare_runs
from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.runs.run import Run

# A set by smooth-Chamfer, a vector of another image set, a Gaussian, a sequence, two sets of features in one head.
HEADS = {
    "set": ("setdiv", "data.image=mobilenet_v3_small"),
    "vector": ("vsepp", "data.image=squeezenet"),
    "gaussian": ("pcme", "data.image=mobilenet_v3_small"),
    "both": ("vsepp", "data.image=[squeezenet, mobilenet_v3_small]"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("average")
    store = make_store(make_pictures(folder / "data", val=6, test=12), folder / "s.zarr")
    make_store(folder / "data" / "pictures.yaml", store, visual="squeezenet1_1", text=None)
    for name, (recipe, *settings) in HEADS.items():
        make_run(store, folder / name, recipe, *settings)
    make_run(store, folder / "vector2", *HEADS["vector"], "optimizer.lr=0.01")
    return folder


def scores(path, split="test"):
    return embed_split(Ranker(path, device="cpu"), split).similarity.numpy()


def rsum(path, split="val"):
    (result,) = xret.evaluate(path, split=split, device="cpu").results
    return result.rsum


@pytest.mark.parametrize("names", [("vector", "vector2", "both"), ("set", "vector", "gaussian", "both")], ids=len)
def test_its_scores_are_the_mean_of_the_runs_own(names, folder, tmp_path):
    found = xret.average([folder / name for name in names], out=tmp_path / "a", device="cpu")
    assert found.weights == {str(folder / name): pytest.approx(1 / len(names)) for name in names}
    expected = np.mean([scores(folder / name) for name in names], axis=0)
    np.testing.assert_allclose(scores(tmp_path / "a"), expected, atol=1e-6)
    together = xret.evaluate([folder / name for name in names], split="val", device="cpu").results[0]
    assert found.val_rsum == pytest.approx(together.rsum)
    assert found.of_each == {str(folder / name): pytest.approx(rsum(folder / name)) for name in names}


def test_validation_weighs_as_a_search_by_hand_does(folder, tmp_path):
    names = ["set", "vector", "vector2", "both"]
    runs = [str(folder / name) for name in names]
    moved = str(shutil.copytree(folder / "s.zarr", tmp_path / "moved.zarr"))
    found = xret.average(runs, out=tmp_path / "a", weights="validation", store=moved, device="cpu")
    assert Run(tmp_path / "a").info.store == moved
    assert found.val_rsum >= max(found.of_each.values())
    split = embed_split(Ranker(runs[0], device="cpu"), "val")
    scaled = {run: (one := scores(run, "val")) / one.std(ddof=1) for run in runs}
    total, taken, reached = np.zeros_like(split.similarity.numpy()), [], []
    for _ in range(25):
        of_each = {run: plain_rsum(total + one, split.caption_image.numpy()) for run, one in scaled.items()}
        taken.append(max(runs, key=of_each.get))
        total += scaled[taken[-1]]
        reached.append(of_each[taken[-1]])
    taken = taken[: 1 + int(np.argmax(reached))]
    shares = {run: taken.count(run) / scores(run, "val").std(ddof=1) for run in {*taken}}
    shares = {run: share / sum(shares.values()) for run, share in shares.items()}
    assert found.weights == pytest.approx(shares, rel=1e-4)
    weighted = sum(weight * scores(name) for name, weight in found.weights.items())
    np.testing.assert_allclose(scores(tmp_path / "a"), weighted, atol=1e-6)
    assert rsum(tmp_path / "a") == pytest.approx(found.val_rsum)


def test_where_all_compare_by_cosine_a_sample_is_one_vector(folder, tmp_path):
    shares = {"vector": 0.8, "both": 0.2}
    xret.average([folder / name for name in shares], out=tmp_path / "a", device="cpu")
    edited(tmp_path / "a", average=shares)
    loaded = xret.load(tmp_path / "a", device="cpu", data_root=folder / "data" / "images")
    (text,) = loaded.encode_text(["a red side and a blue side"])
    assert text.shape == (32,)
    assert float(text.norm()) == pytest.approx(1)
    picture = Path(folder / "data" / "images" / "0.png")
    parts = [
        share**0.5
        * xret.load(folder / name, device="cpu", data_root=folder / "data" / "images").encode_images([picture])
        for name, share in shares.items()
    ]
    torch.testing.assert_close(loaded.encode_images([picture]), torch.cat(parts, 1), atol=1e-6, rtol=0)


def test_everything_that_takes_a_run_takes_it(folder, tmp_path):
    runs = [folder / "vector", folder / "vector2"]
    made = run("average", *runs, "--out", tmp_path / "a", "--device", "cpu")
    assert "their average" in made.output
    found = json.loads(run("--json", "eval", tmp_path / "a", "--hubness", "--device", "cpu").output)
    assert {"results", "hubness"} <= found.keys()
    plain = run("search", tmp_path / "a", "a red side", "-k", "3", "--device", "cpu").output
    run("index", tmp_path / "a", "--out", tmp_path / "i", "--device", "cpu")
    looked_up = run(
        "search", tmp_path / "a", "a red side", "-k", "3", "--index", tmp_path / "i", "--device", "cpu"
    ).output
    assert [line.split()[-1] for line in plain.splitlines()[2:]] == [
        line.split()[-1] for line in looked_up.splitlines()[2:]
    ]
    run("export", tmp_path / "a", "--out", tmp_path / "e", "--device", "cpu")
    images, captions = (np.load(tmp_path / "e" / f"{side}.npy") for side in ("images", "captions"))
    everything = embed_split(Ranker(tmp_path / "a", device="cpu"), "test").similarity.numpy()
    np.testing.assert_allclose(
        (images @ captions.T)[-everything.shape[0] :, -everything.shape[1] :], everything, atol=1e-6
    )
    run("report", tmp_path / "a", folder / "vector", "--out", tmp_path / "r.html", "--device", "cpu")
    assert "the average of 2 runs" in (tmp_path / "r.html").read_text()
    compared = compare_runs(tmp_path / "a", folder / "set", device="cpu")
    assert compared.differences


def test_an_average_of_sets_reports_and_has_no_vector(folder, tmp_path):
    run("average", folder / "set", folder / "gaussian", "--out", tmp_path / "a", "--device", "cpu")
    run("report", tmp_path / "a", "--out", tmp_path / "r.html", "--device", "cpu")
    for command in (["index", "--out", tmp_path / "i"], ["export", "--out", tmp_path / "e"]):
        assert "no single vector" in refused(command[0], tmp_path / "a", *command[1:], "--device", "cpu")
    assert not (tmp_path / "i").exists()
    assert not (tmp_path / "e").exists()


def test_what_cannot_be_averaged_is_refused(folder, tmp_path):
    other = make_run(make_store(make_pictures(tmp_path / "data", train=8), tmp_path / "o.zarr"), tmp_path / "other")
    vector, average = folder / "vector", tmp_path / "a"
    run("average", vector, folder / "vector2", "--out", average, "--device", "cpu")
    for words, what in {
        (vector, "--out", tmp_path / "b"): "two different runs",
        (vector, f"{vector}/", folder / "vector2", "--out", tmp_path / "b"): "name each once",
        (vector, other, "--out", tmp_path / "b"): "other samples",
        (vector, average, "--out", tmp_path / "b"): "is an average",
        (vector, folder / "set", "--out", average): "exists",
    }.items():
        assert what in refused("average", *words, "--device", "cpu")
    without = edited(shutil.copytree(vector, tmp_path / "tokens"), vocabulary=None)
    others = edited(shutil.copytree(vector, tmp_path / "others"), vocabulary=["<unk>", "others"])
    assert "by other words than" in refused("average", without, vector, others, "--out", tmp_path / "b")
    with pytest.raises(errors.RunError, match="weights is 'best', but must be equal or validation"):
        xret.average([vector, other], out=tmp_path / "b", weights="best")
    assert not (tmp_path / "b").exists()
    store = folder / "s.zarr"
    how = ["--recipe", "vsepp", "--device", "cpu"]
    assert "nothing trains" in refused("train-head", store, *how, "--out", average, "--resume")
    assert "no weights of its own" in refused(
        "train-head", store, *how, "--out", tmp_path / "c", "--init-from", average
    )
    shutil.rmtree(average / "members" / "1")
    with pytest.raises(errors.RunError, match="lost its members/1"):
        xret.evaluate(average, device="cpu")
