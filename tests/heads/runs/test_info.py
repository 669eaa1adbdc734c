"""What run.json says is a dataclass, and the file keeps its keys."""

import pytest

from xret.heads.runs.info import RunInfo

LEAST = {"store": "s.zarr", "image_set": "a@1", "text_set": "b@2", "fingerprints": {"image": "1", "text": "2"}}
HEAD = {"format": "xret-run", "version": 1, **LEAST}


def test_what_is_written_is_read_and_what_a_later_version_wrote_is_kept():
    told = {"seed": 3, "shuffled": "as a whole", "best_epoch": 2, "best_rsum": 431.5, "also": None, "later": [1]}
    info = RunInfo.from_json(HEAD | told)
    assert (info.seed, info.best_rsum, info.more) == (3, 431.5, {"later": [1]})
    assert info.to_json() == HEAD | told


def test_a_run_of_little_says_what_is_not_known_yet():
    assert RunInfo.from_json(HEAD).to_json() == HEAD | {
        "seed": 0,
        "shuffled": "as a whole",
        "also": None,
        "best_epoch": None,
        "best_rsum": None,
    }


@pytest.mark.parametrize("key", ["store", "image_set", "text_set", "fingerprints"])
def test_what_every_run_has_must_be_there_as_text(key):
    with pytest.raises(TypeError):
        RunInfo.from_json({name: value for name, value in HEAD.items() if name != key})
    with pytest.raises((TypeError, AttributeError)):
        RunInfo.from_json(HEAD | {key: 3})


def test_of_several_feature_sets_there_are_lists():
    several = LEAST | {"text_set": ["b@2", "c@3"], "fingerprints": {"image": "1", "text": ["2", "3"]}}
    info = RunInfo.from_json(HEAD | several)
    assert (info.names("image"), info.names("text"), info.prints("text")) == (("a@1",), ("b@2", "c@3"), ("2", "3"))
    assert info.to_json()["text_set"] == ["b@2", "c@3"]
    for damage in ({"text_set": []}, {"text_set": ["b@2"]}, {"text_set": ["b@2", 3]}):
        with pytest.raises(TypeError):
            RunInfo.from_json(HEAD | several | damage)


def test_a_fine_tuning_agrees_on_its_head_and_a_training_on_its_feature_sets():
    assert set(RunInfo(**LEAST).facts) == {"manifest_sha256", "seed", "image_set", "text_set", "fingerprints", "also"}
    tuned = RunInfo(**LEAST, finetuned={"epoch": 2}, backbones={"visual": "resnet18", "text": None})
    assert set(tuned.facts) == {"manifest_sha256", "seed", "finetuned"}
    assert tuned.tuned("image") and not tuned.tuned("text")
    assert "also" not in tuned.to_json() and "also" in RunInfo(**LEAST).to_json()
