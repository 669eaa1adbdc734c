"""``xret search``, as a user types it."""

import json
import re
import shutil

import pytest
from command_line import refused
from command_line import run as call
from small_runs import make_pictures, make_run, make_store

from xret.heads.retrieval.retriever import Retriever


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    store = make_store(make_pictures(folder / "pictures"), folder / "s.zarr")
    make_run(store, folder / "run")
    make_run(store, folder / "gaussian", "gaussian-vsepp")
    return folder


def test_a_sentence_finds_images(folder):
    found = json.loads(call("search", folder / "run", "red beside blue", "-k", 3, "--json").stdout)
    hits = Retriever(folder / "run", device="cpu").search("red beside blue", 3)
    assert found == [
        {"rank": h.rank, "id": h.id, "score": h.score, "probability": h.probability, "file_name": h.file_name}
        for h in hits
    ]
    lines = call("search", folder / "run", "red beside blue", "-k", 3).stdout.splitlines()
    assert lines[0] == f"{folder}/run on {folder}/s.zarr: 22 images"
    assert lines[1].split() == ["rank", "score", "probability", "id", "file"]
    rows = [[str(hit.rank), f"{hit.score:.4f}", f"{hit.probability:.2f}", hit.id, hit.file_name] for hit in hits]
    assert [line.split() for line in lines[2:]] == rows


def test_words_that_the_run_does_not_know_are_told_beside_the_results(folder):
    known, unknown = (call("search", folder / "run", f"red {word}", "--json") for word in ("beside", "Zeppelin, quux"))
    assert (known.stderr, unknown.stderr) == ("", "not in the vocabulary: zeppelin, quux\n")
    assert len(json.loads(unknown.stdout)) == 10
    error = json.loads(call("search", folder / "run", "zeppelin", "--json", code=1).stderr)["error"]
    assert error.startswith("no word of the query is in the vocabulary of this run (zepp")


def test_a_picture_finds_captions(folder):
    words = ("search", folder / "run", folder / "pictures/images/17.png", "--split", "test")
    found = json.loads(call(*words, "--json").stdout)
    assert [one["rank"] for one in found] == list(range(1, 10))  # all captions of the split are fewer than ten
    assert found[0].keys() == {"rank", "id", "score", "probability", "caption"}
    lines = call(*words, "-k", 1).stdout.splitlines()
    assert lines[0].endswith("split test: 9 captions")
    assert lines[2].endswith(f"  {found[0]['caption']}")


def test_what_is_there_is_no_sentence(folder, tmp_path):
    shutil.copy(folder / "pictures/images/17.png", tmp_path / "17")
    by_suffix = call("search", folder / "run", folder / "pictures/images/17.png").stdout
    assert call("search", folder / "run", tmp_path / "17").stdout == by_suffix
    assert refused("search", folder / "run", f"{tmp_path}/").startswith(str(tmp_path))
    videos = make_store(make_pictures(tmp_path / "videos", frames=3), tmp_path / "v.zarr", frames=2)
    found = call("search", make_run(videos, tmp_path / "run"), tmp_path / "videos/images/17").stdout
    assert found.splitlines()[0].endswith("v.zarr: 33 captions")


def test_gaussians_come_with_their_uncertainty(folder):
    lines = call("search", folder / "gaussian", "red", "-k", 2, "--split", "val").stdout.splitlines()
    assert lines[1].split() == ["rank", "score", "probability", "uncertainty", "id", "file"]
    assert re.fullmatch(r"-?\d+\.\d{2}", lines[2].split()[2])
    assert re.fullmatch(r"the query's uncertainty \(log-determinant\) -?\d+\.\d{2}", lines[-1])


def test_a_folder_of_pictures_is_searched(folder, tmp_path):
    words, photos = ("search", folder / "run", "--images", tmp_path), [f"{number}.png" for number in range(3)]
    for name in photos:
        shutil.copy(folder / "pictures/images" / name, tmp_path)
    (tmp_path / "broken.png").touch()
    found = json.loads(call(*words, "red beside blue", "--json").stdout)
    assert sorted(one["file_name"] for one in found) == photos
    lines = call(*words, "red beside blue").stdout.splitlines()
    assert lines[0] == f"{folder}/run on {tmp_path}: 3 images"
    assert [line.split()[-1] for line in lines[2:]] == [one["file_name"] for one in found]
    like = json.loads(call(*words, tmp_path / "1.png", "--json").stdout)
    assert like[0]["file_name"] == "1.png"


def test_mistakes_end_in_one_sentence(folder, tmp_path):
    run, broken = folder / "run", tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0" + bytes(50))
    for words, code, sentence in (
        ((run,), 2, "Missing argument 'QUERY'"),
        ((run, "red", "and", "blue"), 2, 'A QUERY of several words needs quotes: "red and blue".'),
        ((run, "--", "--json"), 1, "no word of the query is in the vocabulary"),
        ((run, "photo.jpg"), 1, "photo.jpg: there is no such file"),
        ((run, broken), 1, f"{broken}: "),
    ):
        assert sentence in refused("search", *words, code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.jpg"]


def test_only_what_fits_may_be_nothing(folder):
    every = json.loads(call("search", folder / "run", "red beside blue", "--json").stdout)
    bound = (every[0]["probability"] + every[1]["probability"]) / 2
    assert (
        json.loads(call("search", folder / "run", "red beside blue", "--at-least", bound, "--json").stdout) == every[:1]
    )
    nothing = call("search", folder / "run", "red beside blue", "--at-least", 1).stdout.splitlines()
    assert nothing[1] == "nothing here fits with a probability of 1.0 or more"
    assert json.loads(call("search", folder / "run", "red beside blue", "--at-least", 1, "--json").stdout) == []
    assert "no probabilities" in refused("search", folder / "run", "red", "--at-least", 0.5, "--like", "blue")


def test_like_and_not_add_standard_scores(folder):
    retriever = Retriever(folder / "run", device="cpu")
    picture = folder / "pictures/images/17.png"

    def standard(scores):
        return (scores - scores.mean()) / scores.std()

    texts = retriever.encode_text(["red beside blue", "a green side and a grey side"])
    red, green = retriever.similarity(retriever.gallery.images, texts).double().numpy().T
    like = (retriever.encode_images([picture]) @ retriever.gallery.images.T)[0].double().numpy()
    expected = standard(red) + standard(like) - standard(green)
    both = {"like": picture, "unlike": "a green side and a grey side"}  # in Python one may stand alone
    assert retriever.search("a red side", **both) == retriever.search("a red side", **{k: [v] for k, v in both.items()})
    words = ("--like", picture, "--not", "a green side and a grey side", "-k", 30, "--json")
    found = json.loads(call("search", folder / "run", "red beside blue", *words).stdout)
    assert [one["id"] for one in found] == [retriever.gallery.image_ids[row] for row in expected.argsort()[::-1]]
    assert found[0]["score"] == pytest.approx(expected.max(), abs=1e-4)
    assert "leave them out" in refused("search", folder / "run", picture, "--not", "red")
