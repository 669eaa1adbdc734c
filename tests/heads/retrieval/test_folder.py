"""A folder of any pictures is searched: each is embedded once, and again when its file has changed."""

import os
import shutil

import numpy as np
import pytest
from oriented import save, shown
from PIL import Image
from small_runs import make_run

import xret
from xret.heads.retrieval import folder as folder_module
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import EMBEDDINGS
from xret.pipeline.encoders.grid import GridEncoder
from xret.pipeline.errors import QueryError

ALL = ["0.png", "4.png", "5.png", "a/1.png", "a/b/2.webp", "a/turned.png", "z.PNG"]


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made.run(), tmp_path / "run", ignore=shutil.ignore_patterns(EMBEDDINGS))


@pytest.fixture
def photos(made, tmp_path):
    """Return a folder with seven pictures, of which some lie deeper and one has an orientation."""
    folder = tmp_path / "photos"
    (folder / "a/b").mkdir(parents=True)
    for number, name in enumerate(["0.png", "z.PNG", "a/1.png", "a/b/2.webp", "4.png", "5.png"]):
        image = Image.open(made.images / f"{number}.png")
        image.save(folder / name, **({"lossless": True} if name.endswith("webp") else {}))
    save(folder / "a/turned.png", np.asarray(Image.open(made.images / "17.png")), 6)
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """Return the numbers of pictures that each call of an encoder takes from now on."""
    numbers, encode = [], GridEncoder.encode

    def counting(self, pixels):
        if len(pixels) != 1 or pixels.any():  # an encoder tries itself on black
            numbers.append(len(pixels))
        return encode(self, pixels)

    monkeypatch.setattr(GridEncoder, "encode", counting)
    return numbers


def search(run, photos, query="red beside blue"):
    return {hit.file_name: hit for hit in xret.load(run, images=photos, device="cpu").search(query, k=99)}


@pytest.mark.parametrize("recipe", ["vsepp", "setdiv", "gaussian-vsepp", "scan"])
def test_what_is_found_is_what_comparing_each_picture_finds(made, photos, recipe):
    run = made.run(recipe)
    kept = {*(run / EMBEDDINGS).glob("*")}  # of other folders
    retriever = Retriever(run, images=photos, device="cpu")
    hits = retriever.search("red beside blue", 50)
    assert sorted(hit.file_name for hit in hits) == retriever.searched.file_names == ALL
    text = retriever.encode_text(["red beside blue"])
    for hit in hits:  # one by one, and turned by hand
        pixels = np.asarray(Image.open(photos / hit.file_name).convert("RGB"))
        picture = Image.fromarray(np.ascontiguousarray(shown(pixels, 6 if "turned" in hit.file_name else 1)))
        expected = float(retriever.similarity(retriever.encode_images([picture]), text))
        assert hit.score == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert Retriever(run, images=photos, device="cpu").search("red beside blue", 50) == hits  # as it was kept
    assert len({*(run / EMBEDDINGS).iterdir()} - kept) == 1
    assert retriever.search(photos / "4.png")[0].file_name == "4.png"  # a picture finds those like it
    if recipe == "setdiv":
        assert [hits[0].file_name for hits in retriever.search_elements(photos / "4.png", 2)] == ["4.png"] * 4


def test_only_what_is_new_or_has_changed_is_computed(made, run, photos, encoded, monkeypatch):
    before = search(run, photos)
    assert sum(encoded) == 7
    encoded.clear()
    with monkeypatch.context() as patched:
        patched.setattr(folder_module, "read_picture", None)  # unchanged files are not even read
        assert search(run, photos) == before
    Image.new("RGB", (30, 20), "blue").save(photos / "new.bmp")
    for colour in ("red", "blue"):  # another content of the same size and time
        Image.new("RGB", (30, 20), colour).save(photos / "same.bmp")
        os.utime(photos / "same.bmp", (1, 1))
        after = search(run, photos)
    (photos / "a/1.png").unlink()
    encoded.clear()
    last = search(run, photos)
    assert not encoded
    assert last.keys() == before.keys() - {"a/1.png"} | {"new.bmp", "same.bmp"} == after.keys() - {"a/1.png"}
    assert last["same.bmp"].score == pytest.approx(last["new.bmp"].score, abs=2e-3)
    for name in before.keys() & last.keys():
        assert last[name].score == pytest.approx(before[name].score, rel=1e-5)
    other = make_run(made.store(), run.parent / "other", "vsepp", "optimizer.lr=0.01")
    shutil.copytree(run / EMBEDDINGS, other / EMBEDDINGS)
    assert search(other, photos) != last  # other weights have embeddings of their own
    assert sum(encoded) == 8


def test_what_was_computed_before_a_stop_is_kept(run, photos, encoded, monkeypatch):
    monkeypatch.setattr(folder_module, "BATCH", 2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        counted, calls = GridEncoder.encode, []

        def stopped(self, pixels):
            if len(pixels) == 2:
                calls.append(pixels)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return counted(self, pixels)

        patched.setattr(GridEncoder, "encode", stopped)
        search(run, photos)
    encoded.clear()
    assert len(search(run, photos)) == 7
    assert sum(encoded) == 3


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_file_of_embeddings_is_made_again(run, photos, encoded, damage):
    before = search(run, photos)
    (file,) = (run / EMBEDDINGS).iterdir()
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-7], "empty": b"", "other": (run / "model.safetensors").read_bytes()}[damage])
    encoded.clear()
    assert search(run, photos) == before
    assert sum(encoded) == 7


def test_the_names_of_pictures_do_not_fill_the_header(run, photos):
    search(run, photos)
    (file,) = (run / EMBEDDINGS).iterdir()
    size = int.from_bytes(file.read_bytes()[:8], "little")  # safetensors takes a hundred million
    assert b".png" not in file.read_bytes()[: 8 + size]


def test_a_run_that_cannot_be_written_searches_all_the_same(run, photos, caplog):
    (run / EMBEDDINGS).touch()
    assert len(search(run, photos)) == 7
    assert "the embeddings of the pictures are not kept" in caplog.text


def test_what_cannot_be_read_is_named_and_left_out(run, photos, tmp_path, caplog):
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(50))
    (photos / "a/empty.png").touch()
    (photos / "gone.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(photos / "pipe.gif")
    for name in (".hidden.png", "notes.txt"):
        shutil.copy(photos / "0.png", photos / name)
    shutil.copytree(photos / "a", photos / ".thumbnails")
    shutil.copytree(photos / ".thumbnails", tmp_path / "away")
    (photos / "linked").symlink_to(tmp_path / "away")
    (photos / "linked/loop").symlink_to(photos)
    assert sorted(search(run, photos)) == sorted([*ALL, *(f"linked{name[1:]}" for name in ALL if name[:2] == "a/")])
    said = caplog.messages[-1]
    assert said.startswith(f"5 pictures of {photos} cannot be read: a/empty.png (the file is empty), broken.jpg (")
    assert said.endswith("gone.png (no such file or directory), and 2 more")


def test_features_beyond_their_dtype_leave_one_picture_out(run, photos, monkeypatch, caplog):
    before, encode = search(run, photos), GridEncoder.encode

    def spoilt(self, pixels):
        local, pooled = encode(self, pixels)
        if len(pixels) > 2:
            pooled[2] = 1e9
        return local, pooled

    shutil.rmtree(run / EMBEDDINGS)
    monkeypatch.setattr(GridEncoder, "encode", spoilt)
    found = search(run, photos)
    assert found.keys() == before.keys() - {"5.png"}
    assert "5.png (its features are beyond their dtype or no numbers)" in caplog.text
    for name, hit in found.items():
        assert hit.score == pytest.approx(before[name].score, rel=1e-5)


def test_a_folder_that_cannot_be_searched_is_one_sentence(run, photos, tmp_path):
    for name in ("none", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "bad/a.png").write_bytes(b"no picture")
    for folder, sentence in (
        (tmp_path / "none", r"there is no picture that can be read in .*none or below it: pictures end in \.apng, "),
        (tmp_path / "absent", "there is no folder .*absent; give one that holds pictures as `images`"),
        (tmp_path / "bad", r"no picture that can be read in .*bad or below it: a\.png \(this is no JPEG"),
    ):
        with pytest.raises(QueryError, match=sentence):
            search(run, folder)
    for name, given in (("index", tmp_path), ("split", "test")):
        with pytest.raises(QueryError, match=f"a folder of pictures takes no `{name}`"):
            Retriever(run, images=photos, **{name: given}, device="cpu")
