"""``xret search``, as a user types it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from small_runs import make_pictures, make_run, make_store

from xret.cli import main
from xret.heads.retrieval.retriever import Retriever


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("search")
    store = make_store(make_pictures(folder / "pictures"), folder / "s.zarr")
    make_run(store, folder / "run")
    make_run(store, folder / "gaussian", "gaussian-vsepp")
    yield folder
    torch.set_num_threads(threads)


def call(*words, code=0):
    result = CliRunner().invoke(main, ["search", *map(str, words), "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_a_sentence_finds_images(folder):
    found = json.loads(call(folder / "run", "red beside blue", "-k", 3, "--json").stdout)
    hits = Retriever(folder / "run", device="cpu").search("red beside blue", 3)
    assert found == [{"rank": h.rank, "id": h.id, "score": h.score, "file_name": h.file_name} for h in hits]
    lines = call(folder / "run", "red beside blue", "-k", 3).stdout.splitlines()
    assert lines[0] == f"{folder}/run on {folder}/s.zarr, split test: 6 images"
    assert lines[1].split() == ["rank", "score", "id", "file"]
    assert [line.split() for line in lines[2:]] == [
        [str(hit.rank), f"{hit.score:.4f}", hit.id, hit.file_name] for hit in hits
    ]


def test_words_that_the_run_does_not_know_are_told_beside_the_results(folder):
    known, unknown = (call(folder / "run", f"red {word}", "--json") for word in ("beside", "Zeppelin, quux"))
    assert (known.stderr, unknown.stderr) == ("", "not in the vocabulary: zeppelin, quux\n")
    assert len(json.loads(unknown.stdout)) == 6
    refused = call(folder / "run", "zeppelin", "--json", code=1)
    assert json.loads(refused.stderr)["error"].startswith("no word of the query is in the vocabulary of this run (zepp")


def test_a_picture_finds_captions(folder):
    picture = folder / "pictures/images/17.png"
    found = json.loads(call(folder / "run", "--image", picture, "--json").stdout)
    assert [one["rank"] for one in found] == list(range(1, 10))  # all captions of the split are fewer than ten
    assert found[0].keys() == {"rank", "id", "score", "caption"}
    lines = call(folder / "run", "--image", picture, "-k", 1).stdout.splitlines()
    assert lines[0].endswith("split test: 9 captions")
    assert lines[2].endswith(f"  {found[0]['caption']}")


def test_gaussians_come_with_their_uncertainty(folder):
    lines = call(folder / "gaussian", "red", "-k", 2, "--split", "val").stdout.splitlines()
    assert lines[1].split() == ["rank", "score", "uncertainty", "id", "file"]
    assert re.fullmatch(r"-?\d+\.\d{2}", lines[2].split()[2])
    assert re.fullmatch(r"the query's uncertainty \(log-determinant\) -?\d+\.\d{2}", lines[-1])


def test_a_folder_of_pictures_is_searched(folder, tmp_path):
    run, photos = folder / "run", tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        shutil.copy(folder / f"pictures/images/{number}.png", photos)
    (photos / "broken.png").touch()
    words = (run, "--images", photos, "red beside blue")
    found = json.loads(call(*words, "--json").stdout)
    assert sorted(one["file_name"] for one in found) == ["0.png", "1.png", "2.png"]
    assert found[0].keys() == {"rank", "id", "score", "file_name"}
    second = call(*words)
    assert second.stdout.splitlines()[0] == f"{run} on {photos}: 3 images"
    assert [line.split()[-1] for line in second.stdout.splitlines()[2:]] == [one["file_name"] for one in found]
    like = json.loads(call(*words[:-1], "--image", photos / "1.png", "--json").stdout)
    assert like[0]["file_name"] == "1.png"
    assert "an index is of a split of a store" in call(*words, "--index", photos, code=1).stderr
    assert "there is no folder" in call(run, "red", "--images", tmp_path / "none", code=1).stderr


def test_mistakes_end_in_one_sentence(folder, tmp_path):
    run, broken = folder / "run", tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0" + bytes(50))
    for words, code, sentence in (
        ((run,), 2, "Search for a QUERY or for an --image FILE, one of the two."),
        ((run, "red", "--image", broken), 2, "Search for a QUERY or for an --image FILE, one of the two."),
        ((run, "red", "--text-weights", "x"), 1, "takes no text weights; leave out 'x' (option --text-weights,"),
        (
            (run, "photo.jpg"),
            1,
            "'photo.jpg' is a file name and not a text; to search by a picture use --image photo.jpg",
        ),
        ((run, "xyzzy on photo.jpg"), 1, "no word of the query is in the vocabulary of this run"),
        ((run, " "), 1, "the query is empty; describe in a few words what to look for"),
        ((run, "red", "-k", 0), 2, "0 is not in the range x>=1"),
        ((run, "red", "--split", "tset"), 1, "has no split 'tset'; it has train, val, test"),
        ((run, "--image", broken), 1, f"{broken}: "),
        ((run, "--image", tmp_path), 1, f"{tmp_path}: "),
        ((run, "--image", tmp_path / "none.png"), 1, "none.png: "),
        ((run, "red", "and", "blue"), 2, 'A QUERY of several words needs quotes: "red and blue".'),
        ((tmp_path, "red"), 1, "is no run"),
        ((run, "red", "--store", tmp_path), 1, "there is no feature store"),
    ):
        last = call(*words, code=code).stderr.strip().splitlines()[-1]
        assert last.startswith("Error: ") and sentence in last, last
    assert json.loads(call(run, "", "--json", code=1).stderr)["error"].startswith("the query is empty")
    assert [path.name for path in Path(tmp_path).iterdir()] == ["broken.jpg"]
