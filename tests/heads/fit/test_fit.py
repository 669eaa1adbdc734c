"""One outcome in one call: against the commands that it stands for, stopped at any point, and of hopeless data."""

import csv
import json
import logging
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from killed import failing_at
from PIL import Image
from small_checkpoints import save_text_model
from small_reports import require_sound
from small_store import make_store

from xret import fit
from xret.heads.evaluation.comparison import compare_runs
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.fit import data
from xret.heads.fit.curve import FALLS, RANGE
from xret.heads.runs.run import EMBEDDINGS, Run
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError, EncoderError, ManifestError, RunError, SampleError
from xret.pipeline.reading.split import Split


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("fit") / "s.zarr", train=60, text="tokens", space="one")


@pytest.fixture(scope="module")
def fitted(store, tmp_path_factory):
    return fit(store, out=tmp_path_factory.mktemp("fitted") / "out", device="cpu")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return f"hf:{save_text_model(tmp_path_factory.mktemp('clip'), 'clip')}"


def photos(folder, count, captions=None, pixels=None):
    """Write pictures and a CSV of their captions; return both."""
    (folder / "my photos").mkdir(parents=True)
    rng = np.random.default_rng(0)
    with (folder / "captions.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file_name", "caption"])
        for number in range(count):
            shown = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8) if pixels is None else pixels
            Image.fromarray(shown).save(folder / "my photos" / f"{number}.png")
            rows.writerow([f"{number}.png", captions or f"a picture of thing number {number % 30}"])
    return folder / "my photos", folder / "captions.csv"


def mean_recall(run, **how):
    return evaluate(run, device="cpu", **how).results[0].mean_recall


def test_rows_are_what_the_commands_give_and_validation_chooses(store, fitted):
    rows = {row.name: row for row in fitted.rows}
    assert list(rows) == ["frozen", "cca", "linear", "mlp"]
    assert rows["frozen"].test == pytest.approx(mean_recall(store))
    for row in rows.values():
        assert row.test == pytest.approx(mean_recall(row.run))
        assert row.val == pytest.approx(mean_recall(row.run, split="val"), abs=1e-4)
        corrected = [one.mean_recall for one, hubs in evaluate(row.run, hubness=True, device="cpu").tables if hubs]
        assert row.corrected == pytest.approx((corrected or [row.test])[0])
    sure = compare_runs(rows["frozen"].run, rows["cca"].run, split="val", device="cpu").differences[-1].low > 0
    choice = [row for name, row in rows.items() if name != "cca" or sure]
    assert fitted.chosen == max(choice, key=lambda row: row.val).name  # of equal ones the first
    floor = max(rows["frozen"].val, rows["cca"].val if sure else 0)
    assert min(rows["linear"].val, rows["mlp"].val) >= floor
    difference = rows[fitted.chosen].test - rows["frozen"].test
    assert fitted.gain[0] == pytest.approx(difference) and fitted.gain[1] <= difference <= fitted.gain[2]
    assert fitted.images == {"train": 60, "val": 12, "test": 12}
    assert fitted.leaks


def test_the_folder_is_a_run_that_may_move(fitted, tmp_path):
    chosen = next(row for row in fitted.rows if row.name == fitted.chosen)
    moved = shutil.copytree(fitted.run, tmp_path / "moved")
    assert mean_recall(moved) == pytest.approx(chosen.test)
    assert Run(moved).recipe == Run(chosen.run).recipe
    page = (moved / "report.html").read_text()
    assert all(sentence in require_sound(page).text for sentence in fitted.sentences)
    assert re.findall(r'<h2 id="([a-z]+)">', page)[0] == "opening"


def test_the_curve_is_that_of_trainings_on_a_part(store, fitted, tmp_path):
    curve, rows = fitted.curve, {row.name: row for row in fitted.rows}
    assert curve.name in ("linear", "mlp") or curve.name == fitted.chosen
    recipe = Path(rows[curve.name].run, "recipe.yaml")
    train(store, recipe, tmp_path / "half", settings={"data.share": 0.5}, device="cpu")
    images, recalls = zip(*curve.points, strict=True)
    assert images == (15, 30, 60)
    assert recalls[1:] == pytest.approx((mean_recall(tmp_path / "half"), rows[curve.name].test))
    odds = [math.log(recall / (100 - recall)) for recall in recalls]
    low, gain, high = (
        100 / (1 + math.exp(-odds[2] - falls * (odds[2] - odds[0]) / 2)) - recalls[2]
        for falls in (RANGE[0], FALLS, RANGE[1])
    )
    assert curve.gain == pytest.approx(gain)
    assert curve.low < low < high < curve.high  # of so few pictures


def test_test_is_not_asked_before_validation_has_chosen(store, tmp_path, monkeypatch):
    asked, split_of = [], Split.of
    monkeypatch.setattr("xret.heads.fit.fit.evaluate", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(Split, "of", lambda *both: asked.append(both[2:]) or split_of(*both))
    with pytest.raises(ZeroDivisionError):
        fit(store, out=tmp_path / "out", device="cpu", minutes=0)
    assert {split for splits in asked for split in splits} == {"train", "val"}


def test_captions_as_words_have_heads_alone(tmp_path):
    store = make_store(tmp_path / "s.zarr", train=24, text="words")
    found = fit(store, out=tmp_path / "out", device="cpu", minutes=0)
    assert [row.name for row in found.rows] == ["linear", "mlp"]
    assert not any(row.complete for row in found.rows)
    assert found.curve is None and "was stopped by the time that was given" in str(found)
    assert found.chosen == max(found.rows, key=lambda row: row.val).name


def test_of_several_sets_two_are_chosen(tmp_path, monkeypatch):
    def evaluated(*run, **how):
        found = evaluate(*run, **how)
        (result,) = found.hubness.results
        return replace(found, hubness=replace(found.hubness, results=(replace(result, mean_recall=77.7),)))

    monkeypatch.setattr("xret.heads.fit.fit.evaluate", evaluated)
    store = make_store(tmp_path / "s.zarr", train=24, image=("grid", "roi"), text=("tokens", "words"))
    with pytest.raises(CacheError, match="choose one with `features=IMAGE,TEXT`"):
        fit(store, out=tmp_path / "out", device="cpu")
    found = fit(store, out=tmp_path / "out", features="roi,states", device="cpu", minutes=0)
    assert [(row.name, row.corrected) for row in found.rows] == [("cca", 77.7), ("linear", 77.7), ("mlp", 77.7)]
    assert str(found).count(" 77.7 ") == 3
    assert Run(found.run).info.names("image")[0].startswith("roi@")


STOPS = {
    "xret.pipeline.extraction.filler.Filler.fill": 2,
    "xret.heads.training.trainer.recalls": 4,
    "xret.heads.evaluation.evaluation.recall_table": 2,
    "xret.heads.fit.curve.next_gain": 1,
    "xret.heads.fit.fit.evaluate": 2,
    "xret.heads.fit.fit.write_report": 1,
    "xret.heads.fit.fit.shutil.copyfile": 2,
}


def test_it_goes_on_where_it_was_stopped_to_the_same_outcome(clip, tmp_path):
    pictures, captions = photos(tmp_path, 60)
    out = tmp_path / "stopped"

    def run(folder):
        found = fit(pictures, captions, out=folder, encoder=clip, device="cpu").to_dict()
        text = json.dumps(found, default=str).replace(str(folder), "")
        return text, (folder / "model.safetensors").read_bytes()

    for name, call in STOPS.items():
        with failing_at(name, call), pytest.raises(RuntimeError, match="stopped"):
            run(out)
    for candidate in (out / "candidates").iterdir():
        (candidate / EMBEDDINGS).mkdir()  # as a search of pictures leaves it
    assert run(out) == run(tmp_path / "whole") == run(out)


def test_another_fit_is_refused(store, fitted, clip, tmp_path):
    with pytest.raises(RunError, match="belongs to another fit: seed is 0 there and 1 now"):
        fit(store, out=fitted.run, seed=1)
    with pytest.raises(RunError, match="is not empty and holds no fit"):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "text").write_text("mine")
        fit(*photos(tmp_path, 1), out=tmp_path / "mine")  # before the pictures are looked at


def test_what_tells_nothing_is_refused_before_anything_is_encoded(clip, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "extract", None)
    same, grey = "a picture", np.full((40, 40, 3), 128, np.uint8)
    for number, (count, captions, pixels, sentence) in enumerate(
        (
            (60, same, None, "all 60 captions are 'a picture'"),
            (60, None, grey, "leave none for val and test"),
            (2, None, None, "leave none for val"),
            (1, None, None, "leave none for val and test"),
        )
    ):
        pictures, file = photos(tmp_path / str(number), count, captions, pixels)
        with pytest.raises(ManifestError, match=sentence):
            fit(pictures, file, out=tmp_path / str(number) / "out", encoder=clip)


def test_what_is_no_data_is_refused_with_what_to_name(store, fitted, clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures, file = photos(tmp_path, 1)
    Path("flickr8k").mkdir()  # a bundled data set is meant
    for arguments, options, sentence in (
        ([pictures], {}, "name the file of captions"),
        ([file], {}, "name the folder of their pictures before it"),
        ([fitted.run], {}, "is a run; name the store or the pictures"),
        (["s.zar"], {}, "there is no store, manifest or data set 's.zar'"),
        (["flickr8k"], {"data_root": tmp_path}, "the image folder"),
        ([pictures, tmp_path / "none.csv"], {}, "there is no file"),
        ([file, file], {}, "or a manifest alone"),
        ([store, file], {}, "leave captions out"),
        ([pictures, file], {"data_root": tmp_path}, "`data_root` is for the paths of a manifest"),
        ([store], {"encoder": clip}, "leave `encoder` out"),
    ):
        with pytest.raises((ManifestError, RunError), match=sentence):
            fit(*arguments, out="out", **options)
    assert not Path("out").exists()


def test_pictures_that_are_all_one_file_are_refused_also_with_splits(clip, tmp_path):
    pictures, file = photos(tmp_path, 60, pixels=np.full((40, 40, 3), 128, np.uint8))
    lines = file.read_text().splitlines()
    splits = ["split", *(["val", "test", *["train"] * 8] * 6)]
    file.write_text("\n".join(f"{line},{split}" for line, split in zip(lines, splits, strict=True)))
    with pytest.raises(ManifestError, match="all 60 pictures are the same file"):
        fit(pictures, file, out=tmp_path / "out", encoder=clip, device="cpu")


def test_a_picture_that_cannot_be_read_may_be_skipped(clip, tmp_path):
    pictures, file = photos(tmp_path, 60)
    (pictures / "7.png").write_bytes(b"no picture")
    with pytest.raises(SampleError, match=r"7\.png"):
        fit(pictures, file, out=tmp_path / "out", encoder=clip, device="cpu")
    found = fit(pictures, file, out=tmp_path / "out", encoder=clip, device="cpu", on_error="skip", minutes=0)
    assert len(found.rows) == 4


def test_few_pictures_are_fitted_with_a_word_of_what_they_cannot_tell(clip, tmp_path, caplog):
    found = fit(*photos(tmp_path, 12), out=tmp_path / "out", encoder=clip, device="cpu")
    assert "12 pictures, 2 of them to judge by, can show that all works" in caplog.text
    assert caplog.text.count("names no splits") == 1
    assert [row.name for row in found.rows] == ["frozen", "cca", "linear", "mlp"]
    least = fit(*photos(tmp_path / "least", 6), out=tmp_path / "of six", encoder=clip, device="cpu")
    assert (least.images["train"], least.curve) == (4, None)
    assert "a learning curve takes 6 training pictures" in least.sentences


def test_without_a_network_it_says_what_to_give(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(data, "ENCODER", "hf:nobody/has-this")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        EncoderError, match="without a network give `encoder=hf:DIR`, a folder with the files of a CLIP"
    ):
        fit(*photos(tmp_path, 60), out=tmp_path / "out", device="cpu")


def test_many_pictures_are_encoded_after_an_estimate(clip, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "xret")
    monkeypatch.setattr(data, "_SMALL", 50)
    fit(*photos(tmp_path, 60), out=tmp_path / "out", encoder=clip, device="cpu", minutes=0)
    assert "seconds for the other pictures" in caplog.text
