"""A folder of any pictures is searched: each is embedded once, whatever becomes of its name, the search or the disk."""

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from earlier_runs import without_digests
from oriented import save, shown
from PIL import Image
from safetensors.torch import load_file, save_file
from small_runs import make_pictures, make_run, make_store

import xret
from xret.heads.retrieval import kept, picture_folder
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import EMBEDDINGS, Run
from xret.pipeline.data import images
from xret.pipeline.encoders.grid import GridEncoder
from xret.pipeline.errors import OutputError, QueryError, XretError
from xret.pipeline.files import making_file

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make pictures, their store, and its run of a recipe when it is first asked for."""
    folder = tmp_path_factory.mktemp("folder")
    store = make_store(make_pictures(folder / "pictures"), folder / "s.zarr")

    def run(recipe="vsepp"):
        out = folder / recipe
        return out if out.exists() else make_run(store, out, recipe)

    return SimpleNamespace(folder=folder, run=run)


@pytest.fixture
def photos(made, tmp_path):
    """Return a folder with seven pictures, of which two lie deeper and one has an orientation."""
    folder = tmp_path / "photos"
    (folder / "a/b").mkdir(parents=True)
    for number, name in enumerate(["0.png", "z.PNG", "a/1.png", "a/b/2.webp", "4.png", "5.png"]):
        image = Image.open(made.folder / "pictures/images" / f"{number}.png")
        image.save(folder / name, **({"lossless": True} if name.endswith("webp") else {}))
    save(folder / "a/turned.png", np.asarray(Image.open(made.folder / "pictures/images/17.png")), 6)
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


@pytest.fixture
def trusting(monkeypatch):
    """Let files that were just written be as good as old ones."""
    monkeypatch.setattr(kept, "_FRESH", -1)


def search(run, photos, tmp_path, query="red beside blue", **options):
    retriever = xret.load(run, images=photos, image_cache=tmp_path / "kept", device="cpu", **options)
    return retriever.search(query, k=50)


ALL = ["0.png", "4.png", "5.png", "a/1.png", "a/b/2.webp", "a/turned.png", "z.PNG"]


@pytest.mark.parametrize("recipe", ["vsepp", "setdiv", "gaussian-vsepp", "scan"])
def test_what_is_found_is_what_comparing_each_picture_finds(made, photos, recipe):
    run = made.run(recipe)
    retriever = Retriever(run, images=photos, device="cpu")
    hits = retriever.search("red beside blue", 50)
    assert sorted(hit.file_name for hit in hits) == retriever.pictures.file_names == ALL
    assert (run / EMBEDDINGS).is_dir()
    text = retriever.encode_text(["red beside blue"])
    expected = {}
    for name in ALL:  # one by one, and turned by hand
        pixels = np.asarray(Image.open(photos / name).convert("RGB"))
        picture = Image.fromarray(np.ascontiguousarray(shown(pixels, 6 if "turned" in name else 1)))
        expected[name] = float(retriever.similarity(retriever.encode_images([picture]), text))
    for hit in hits:
        assert hit.score == pytest.approx(expected[hit.file_name], rel=2e-3, abs=2e-3)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert retriever.searched("images") == 7
    again = Retriever(run, images=photos, device="cpu")
    assert again.search("red beside blue", 50) == hits


def test_a_picture_finds_those_like_it(made, photos, tmp_path):
    first = search(made.run(), photos, tmp_path, photos / "4.png")[0]
    assert (first.file_name, first.caption) == ("4.png", None)
    assert first.score == pytest.approx(1, abs=2e-3)
    retriever = Retriever(made.run("setdiv"), images=photos, image_cache=tmp_path / "kept", device="cpu")
    for hits in retriever.search_elements(photos / "4.png", 2):
        assert hits[0].file_name == "4.png"


def test_only_what_is_new_is_computed(made, photos, tmp_path, encoded, trusting, monkeypatch):
    before = {hit.file_name: hit for hit in search(made.run(), photos, tmp_path)}
    assert sum(encoded) == 7
    encoded.clear()
    monkeypatch.setattr(picture_folder, "picture_file", None)  # unchanged files are not even read
    assert {hit.file_name: hit for hit in search(made.run(), photos, tmp_path)} == before
    monkeypatch.undo()
    (photos / "4.png").rename(photos / "a/renamed.png")
    shutil.copy(photos / "0.png", photos / "copy.png")
    Image.new("RGB", (30, 20), "red").save(photos / "5.png")
    Image.new("RGB", (30, 20), "blue").save(photos / "new.bmp")
    (photos / "a/1.png").unlink()
    counted = []
    encode = GridEncoder.encode
    monkeypatch.setattr(GridEncoder, "encode", lambda self, p: (counted.append(p.any() * len(p)), encode(self, p))[1])
    after = {hit.file_name: hit for hit in search(made.run(), photos, tmp_path)}
    assert sum(counted) == 2
    assert after.keys() == before.keys() - {"4.png", "a/1.png"} | {"a/renamed.png", "copy.png", "new.bmp"}
    for name, old in (("a/renamed.png", "4.png"), ("copy.png", "0.png"), ("z.PNG", "z.PNG")):
        assert after[name].score == pytest.approx(before[old].score, rel=1e-5)
        assert after[name].id == before[old].id
    assert after["5.png"].id != before["5.png"].id


def test_a_file_that_was_replaced_by_one_of_its_size_and_time_is_seen(made, photos, tmp_path, trusting):
    scores = []
    for colour in ("red", "blue"):
        Image.new("RGB", (30, 20), colour).save(photos / "same.bmp")
        os.utime(photos / "same.bmp", (1, 1))
        found = {hit.file_name: hit.score for hit in search(made.run(), photos, tmp_path, "red")}
        expected = search(made.run(), photos, tmp_path / colour, "red")
        # A network's last digits depend on how many pictures it sees at once.
        assert found["same.bmp"] == pytest.approx({hit.file_name: hit.score for hit in expected}["same.bmp"], abs=2e-3)
        scores.append(found["same.bmp"])
    assert abs(scores[0] - scores[1]) > 0.1


def test_what_was_computed_before_a_stop_is_kept(made, photos, tmp_path, encoded, monkeypatch):
    monkeypatch.setattr(picture_folder, "BATCH", 2)
    add, taken = kept.Kept.add, []

    def stopped(self, keys, embedding):
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(keys)
        add(self, keys, embedding)

    monkeypatch.setattr(kept.Kept, "add", stopped)
    with pytest.raises(KeyboardInterrupt):
        search(made.run(), photos, tmp_path)
    encoded.clear()
    monkeypatch.setattr(kept.Kept, "add", add)
    assert len(search(made.run(), photos, tmp_path)) == 7
    assert sum(encoded) == 3
    assert not list((tmp_path / "kept").rglob("*.partial"))


def test_a_stop_loses_nothing_of_what_is_known_of_files(made, photos, tmp_path, trusting, monkeypatch):
    search(made.run(), photos, tmp_path)
    Image.new("RGB", (30, 20), "red").save(photos / "+first.bmp")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(picture_folder, "BATCH", 1)
        patched.setattr(kept.Kept, "add", stop)
        search(made.run(), photos, tmp_path)
    read, picture_file = [], picture_folder.picture_file
    monkeypatch.setattr(picture_folder, "picture_file", lambda path: (read.append(path.name), picture_file(path))[1])
    assert len(search(made.run(), photos, tmp_path)) == 8
    assert read == ["+first.bmp"]


def stop(*_):
    raise KeyboardInterrupt


def test_embeddings_that_are_damaged_or_half_written_are_computed_again(
    made, photos, tmp_path, encoded, trusting, monkeypatch
):
    monkeypatch.setattr(kept, "PART", 1)  # each in a file of its own
    monkeypatch.setattr(picture_folder, "BATCH", 1)
    before = search(made.run(), photos, tmp_path)
    files = sorted((tmp_path / "kept").rglob("*.safetensors"))
    assert len(files) == 7
    files[0].write_bytes(files[0].read_bytes()[:-7])
    files[1].write_bytes(b"")
    files[2].rename(files[2].with_name(f".{files[2].name}.0a1b2c3d.partial"))
    (listed,) = (tmp_path / "kept").glob("*.json")
    listed.write_text("{")
    encoded.clear()
    assert search(made.run(), photos, tmp_path) == before
    assert sum(encoded) == 3
    # One that is damaged after it was looked at.
    retriever = Retriever(made.run(), images=photos, image_cache=tmp_path / "kept", device="cpu")
    assert retriever.pictures.file_names == ALL
    shutil.copy(made.run() / "config.json", files[3])
    encoded.clear()
    assert retriever.search("red beside blue", 50) == before
    assert sum(encoded) == 1


def test_embeddings_with_other_values_or_fewer_rows_are_damaged(tmp_path):
    rows, keys = torch.arange(12.0).reshape(3, 4), [bytes([number] * 16) for number in range(3)]
    several = kept.Kept(tmp_path)
    several.add(keys, rows)
    several.flush()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert torch.equal(kept.Kept(tmp_path).of(keys[::-1]), rows.flip(0))
    at = whole.index(rows.numpy().tobytes())
    flipped = whole[: at + 5] + bytes([whole[at + 5] ^ 1]) + whole[at + 6 :]
    path.write_bytes(whole)
    tensors = load_file(path)
    save_file(tensors | {"embedding": rows[:2].clone()}, path)
    for damaged in (path.read_bytes(), flipped, whole.replace(rows.numpy().tobytes(), b"\xff" * 48)):
        path.write_bytes(damaged)
        opened = kept.Kept(tmp_path)
        with pytest.raises(KeyError):
            opened.of(keys)
        assert not any(key in opened for key in keys)
        assert not path.exists()


def test_what_killed_searches_were_writing_is_removed_by_the_next_and_not_by_a_training(made, photos, tmp_path):
    run = shutil.copytree(made.run(), tmp_path / "run")
    with making_file(run / EMBEDDINGS / "key/a.safetensors") as living:
        left = [run / ".run.json.0a1b2c3d.partial", run / EMBEDDINGS / "key/.b.safetensors.0a1b2c3d.partial"]
        for path in left:
            path.touch()
        with Run(run).held(created=False):
            assert [path.exists() for path in (*left, living)] == [False, True, True]
        kept.Kept(run / EMBEDDINGS / "key")
        assert [path.exists() for path in (*left, living)] == [False, False, True]


def test_a_file_that_cannot_be_read_for_a_moment_is_left_out_for_that_moment(
    made, photos, tmp_path, capsys, monkeypatch
):
    read, failed = images._read, []

    def failing(path):
        if path.name == "4.png" and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(images, "_read", failing)
    assert {hit.file_name for hit in search(made.run(), photos, tmp_path)} == {*ALL} - {"4.png"}
    assert f"1 picture of {photos} cannot be read: 4.png (input/output error)" in capsys.readouterr().err
    assert sorted(hit.file_name for hit in search(made.run(), photos, tmp_path)) == ALL


def test_what_cannot_be_read_is_named_and_left_out(made, photos, tmp_path, capsys):
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(50))
    (photos / "a/empty.png").touch()
    (photos / "gone.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(photos / "pipe.gif")
    for name in (".hidden.png", "notes.txt"):
        shutil.copy(photos / "0.png", photos / name)
    shutil.copytree(photos / "a", photos / ".thumbnails")
    assert sorted(hit.file_name for hit in search(made.run(), photos, tmp_path)) == ALL
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"Note: 4 pictures of {photos} cannot be read: a/empty.png (the file is empty), broken.jpg ("
    )
    assert said.endswith("gone.png (no such file or directory), and 1 more.")


def test_a_folder_that_cannot_be_searched_is_one_sentence(made, photos, tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.png").write_bytes(b"no picture")
    (tmp_path / "file").touch()
    for folder, sentence in (
        (tmp_path / "none", r"there is no picture in .*none or below it; pictures end in \.jpg, "),
        (tmp_path / "absent", "there is no folder .*absent; give one that holds pictures as --images"),
        (tmp_path / "bad", r"1 picture of .*bad cannot be read: a\.png \(this is no JPEG"),
        (tmp_path / "bad/a.png", "there is no folder"),
    ):
        with pytest.raises(QueryError, match=sentence):
            search(made.run(), folder, tmp_path)
    with monkeypatch.context() as patched, pytest.raises(QueryError, match=r"be read: .*none \(permission denied\)"):
        scandir = os.scandir
        patched.setattr(os, "scandir", lambda path: forbid(path) if Path(path) == tmp_path / "none" else scandir(path))
        search(made.run(), tmp_path / "none", tmp_path)
    with pytest.raises(OutputError, match="file is a file; choose another --image-cache"):
        Retriever(made.run(), images=photos, image_cache=tmp_path / "file", device="cpu").search("red")
    with pytest.raises(QueryError, match="an index is of a split of a store"):
        Retriever(made.run(), images=photos, index=tmp_path, device="cpu")
    monkeypatch.setattr(picture_folder, "facts_of_each", lambda _: [SimpleNamespace(kind="frames")])
    with pytest.raises(XretError, match="searches videos"):
        search(made.run(), photos, tmp_path)


def forbid(path):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_few_pictures_are_decoded_at_a_time(made, photos, tmp_path, monkeypatch):
    for number in range(60):
        Image.new("RGB", (20, 20), (4 * number, 0, 0)).save(photos / f"more{number}.png")
    monkeypatch.setattr(picture_folder, "BATCH", 2)
    lock, held, most, decode = threading.Lock(), [0], [0], GridEncoder.decode
    embed = picture_folder.PictureFolder._embed

    def decoding(self, picture):
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
        return decode(self, picture)

    def embedding(self, new):
        embed(self, new)
        with lock:
            held[0] -= len(new)

    monkeypatch.setattr(GridEncoder, "decode", decoding)
    monkeypatch.setattr(picture_folder.PictureFolder, "_embed", embedding)
    assert len(search(made.run(), photos, tmp_path)) == 50
    assert most[0] <= 4 * 2 and held[0] == 0


def test_other_weights_have_embeddings_of_their_own(made, photos, tmp_path, encoded):
    search(made.run(), photos, tmp_path)
    search(made.run("setdiv"), photos, tmp_path)
    assert sum(encoded) == 14
    search(made.run(), photos, tmp_path)
    assert sum(encoded) == 14


def test_weights_that_are_exchanged_under_a_loaded_run_of_an_earlier_version_stay_apart(made, photos, tmp_path):
    run = without_digests(shutil.copytree(made.run(), tmp_path / "run"))
    retriever = xret.load(run, images=photos, image_cache=tmp_path / "kept", device="cpu")
    old = retriever.model
    weights = load_file(run / "model.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, run / "model.safetensors")
    before = retriever.search("red beside blue", 50)
    after = search(run, photos, tmp_path)
    assert retriever.model is old
    assert after != before
    assert after == search(run, photos, tmp_path / "afresh")


def test_a_longer_schedule_embeds_nothing_again(made, photos, tmp_path, encoded):
    run = shutil.copytree(made.run(), tmp_path / "run")
    before = search(run, photos, tmp_path)
    opened = Run(run)
    opened.lengthen(replace(opened.recipe, schedule=replace(opened.recipe.schedule, epochs=5)))
    assert search(run, photos, tmp_path) == before
    assert sum(encoded) == 7
