"""``xret finetune`` and ``xret extract --encoder RUN``, as a user types them."""

import json

import pytest
from command_line import run as call


@pytest.fixture
def run(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "words"]
    call("extract", str(tiny_dataset()), "--store", "s.zarr", *words, "--device", "cpu")
    settings = ["model.dim=8", "adapter.words.word_dim=8", "schedule.epochs=1"]
    call("train-head", "s.zarr", "--recipe", "vsepp", *sets(*settings), "--out", "head", "--device", "cpu")
    return tmp_path


def sets(*settings):
    return [word for setting in settings for word in ("--set", setting)]


def test_a_head_is_tuned_extracted_again_and_evaluated(run):
    more = ["--reattach", "image", "--data-root", "tiny", "--device", "cpu"]
    more += sets("schedule.name=linear", "schedule.epochs=2")
    summary = json.loads(call("finetune", "head", *more, "--out", "tuned", "--json").stdout)
    assert (summary["run"], summary["epochs"], summary["trained"], summary["best_epoch"]) == ("tuned", 2, 1, 2)
    again = call("finetune", "head", *more, "--out", "tuned", "--resume")
    assert "it was complete already" in again.stdout
    assert "nothing to resume" not in again.stderr
    longer = call("finetune", "head", *more[:-1], "schedule.epochs=3", "--out", "tuned", "--resume", code=1).stderr
    assert "; begin another run with `xret finetune tuned --out …`" in longer
    assert "exists; take another --out" in call("finetune", "head", *more, "--out", "tuned", code=1).stderr
    assert "--encoder tuned" in call("eval", "tuned", code=1).stderr
    extract = ["extract", "tiny/tiny.yaml", "--store", "s.zarr", "--encoder", "tuned", "--device", "cpu"]
    for other in (("--visual", "resnet18"), ("--dtype", "float32")):
        assert "decides the encoders" in call(*extract, *other, code=1).stderr
    made = json.loads(call(*extract, "--json").stdout)["sets"]
    assert [features["name"].split("@")[0] for features in made] == ["resnet18"]  # words are as they were
    evaluated = json.loads(call("eval", "tuned", "--split", "val", "--json").stdout)["results"][0]
    assert evaluated["rsum"] == pytest.approx(summary["best_rsum"], abs=20)  # float16 may turn a rank of few images


def test_mistakes_end_in_one_sentence(run):
    for words, sentence in (
        (["finetune", "nowhere", "--out", "x"], "nowhere is no run"),
        (["finetune", "head", "--out", "x", "--reattach", "image"], "to the end of its schedule, epoch 1; say"),
        (["extract", "tiny/tiny.yaml", "--store", "s.zarr", "--encoder", "head"], "has no backbones of its own"),
        (["extract", "tiny/tiny.yaml", "--store", "s.zarr", "--encoder", "nowhere"], "the folder of a fine-tuned run"),
    ):
        *_, last = call(*words, code=1).stderr.strip().splitlines()  # behind a note on the rate
        assert last.startswith("Error: ") and sentence in last
    mistyped = call("finetune", "head", "--out", "tunde", "--resume", "--reattach", "image", code=1).stderr
    assert mistyped.startswith("--resume: there is nothing to resume in tunde, a new run is begun\n")
