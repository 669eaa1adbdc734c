"""What is wrong with a source is one sentence that says where."""

import os
import subprocess
import tarfile

import fsspec
import pyarrow as pa
import pytest
from packed_data import PackedData, members_of, pictures_of, write_tar
from pyarrow import parquet

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.errors import ManifestError, SampleError


@pytest.fixture
def data(tmp_path):
    return PackedData(tmp_path / "data", count=6)


def refused(path, match, skip=False):
    with pytest.raises(ManifestError, match=match) as caught:
        read_samples(load_manifest(path), skip)
    assert "\n" not in str(caught.value)


def test_a_tar_that_is_cut_off_anywhere(data):
    path = data.as_tars(files=1)
    file = data.folder / "shard-00.tar"
    whole = file.read_bytes()
    with tarfile.open(file) as archive:
        last = archive.getmembers()[-1]
    end = last.offset_data + -(-last.size // 512) * 512
    for length in [0, 100, *range(512, end + 512, 512), last.offset_data + last.size - 1, end - 1, end + 511]:
        file.write_bytes(whole[: min(length, end + 511)])
        refused(path, r"shard-00\.tar: (this cannot be read|the archive is cut off)")
    file.write_bytes(whole[: end + 512])
    assert len(read_samples(load_manifest(path)).images) == 6


def test_a_tar_that_is_none_or_goes_on(data):
    path = data.as_tars(files=1)
    file = data.folder / "shard-00.tar"
    whole = file.read_bytes()
    for zeros in (0, 1 << 20):
        file.write_bytes(whole + bytes(zeros) + whole)
        refused(path, "goes on after its end")
    write_tar(file, {"a.png": "x"}, "w:gz")
    refused(path, "this cannot be read")
    file.unlink()
    refused(path, r"shard-00\.tar: there is no such file; .*`data_root`")
    file.mkdir()
    refused(path, "this is not a file")


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"k.png": "x", "k.jpg": "x", "k.txt": "t"}, r"a\.tar: the key 'k' has k\.jpg and k\.png; remove one"),
        ([("k.png", b"x"), ("k.txt", b""), ("k.txt", b"t")], r"the key 'k' has k\.txt and k\.txt"),
        ([("k.png", b"x"), ("k.json", b"{}"), ("./k.json", b"{}")], r"the key 'k' has k\.json and k\.json"),
        ([("k.png", b"x"), ("o.txt", b"t")], r"a\.tar: k\.png: it has no captions; add k\.txt or k\.json"),
        (
            [("k.png", b"x"), ("k.json", b'{"caption": 3}')],
            r"a\.tar: k\.json \('k\.png'\): the caption is no text \(3\)",
        ),
        ([("k.png", b"x"), ("k.json", b"[1]")], r"k\.json is not a mapping"),
        ([("k.png", b"x"), ("k.json", b"{")], r"k\.json is not UTF-8 or not valid JSON"),
        ([("k.png", b"x"), ("k.txt", b"\xff")], r"k\.txt is not UTF-8"),
        ([("../k.png", b"x"), ("../k.txt", b"t")], "leaves the image folder"),
        ([("k.png", b"x"), ("k.txt", b"t"), ("d/o.json", b"{}")], r"a\.tar: d/o: these captions have no picture"),
        ([("I.2024.png", b"x"), ("I.2024.txt", b"t")], r"a\.tar: I\.2024\.png: its key ends .* 'I' has no picture"),
        ([("k.dat", b"t"), (".k.png", b"x"), ("__k.png", b"x")], r"tar\.yaml: it has no images with captions"),
        ([], "no images with captions"),
    ],
)
def test_members_at_fault(data, members, match):
    write_tar(data.folder / "a.tar", members)
    refused(data.manifest("tar", tar={"test": "a.tar"}), match)


def test_links_are_left_out(data, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, content, captions, _ in data.rows:
        (folder / name).write_bytes(content)
        (folder / f"{name[:-4]}.txt").write_text(captions[0])
    os.link(folder / "000000.png", folder / "000100.png")
    (folder / "000101.png").symlink_to("000001.png")
    for number in (100, 101):
        (folder / f"000{number}.txt").write_text("a link")
    subprocess.run(["tar", "cf", data.folder / "a.tar", "-C", folder, "--sort=name", "."], check=True)
    path = data.manifest("tar", tar={"test": "a.tar"})
    refused(path, r"a\.tar: 000100\.png: it is a link, or sparse; .*--hard-dereference` does, or go on with `on_error`")
    samples = read_samples(load_manifest(path), skip=True)
    assert [image.file_name for image in samples.images] == [name for name, *_ in data.rows]
    assert [one.split(": ")[1] for one in samples.left_out] == ["000100.png", "000101.png"]


def test_a_name_that_two_tars_have(data):
    path = data.as_tars(files=2)
    write_tar(data.folder / "shard-01.tar", members_of(data.rows[:1]))
    refused(path, r"shard-01\.tar: the file '000000\.png' is in .*shard-00\.tar already")


def table(data, name="part-0.parquet", **columns):
    parquet.write_table(pa.table(columns), data.folder / name)
    keys = {"split_column": "split"} if "split" in columns else {}
    return data.manifest("p", parquet="part-*.parquet", **keys)


GOOD = pa.array([b"x", b"y"], pa.binary())


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"image": ["a", "b"], "caption": ["c", "d"]}, r"part-0\.parquet: the column 'image' is string, and pictures"),
        ({"image": [{"path": "p"}] * 2, "caption": ["c", "d"]}, "the column 'image' is struct"),
        ({"image": GOOD, "caption": [1, 2]}, r"part-0\.parquet: row 0: the caption is no text"),
        ({"image": GOOD, "caption": ["c", "d"], "split": [0, 1]}, "row 0: the split 'split' is empty or no text"),
        ({"image": GOOD, "caption": ["c", "d"], "split": ["train", None]}, "row 1: the split 'split' is empty"),
        ({"image": GOOD, "de": ["c", "d"]}, "there is no column 'caption'; it has 'image', 'de': name"),
        ({"image": GOOD, "caption": ["c", None]}, r"part-0\.parquet: row 1: it has no caption; .*`on_error` skip"),
        ({"image": GOOD[:0], "caption": pa.array([], pa.string())}, "no images with captions"),
    ],
)
def test_columns_and_rows_at_fault(data, columns, match):
    refused(table(data, **columns), match)


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_files_that_are_damaged(data, form):
    path = getattr(data, f"as_{form}")()
    file = next(iter(sorted([*data.folder.glob("part-1.parquet"), *data.folder.glob("saved/*1-of*.arrow")])))
    whole = file.read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"no table"):
        file.write_bytes(content)
        refused(path, rf"{file.name}: this cannot be read")


def test_a_row_without_bytes_says_which(data):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    path = table(data, image=pa.array([{"bytes": None, "path": "/far/away.png"}], kind), caption=["c"])
    manifest = load_manifest(path)
    samples = read_samples(manifest)
    with pytest.raises(SampleError, match=r"part-0\.parquet: row 0: it holds no bytes, perhaps a path alone"):
        pictures_of(samples, manifest).open("00000000")


@pytest.mark.parametrize("form", ["tars", "parquet", "saved"])
def test_a_file_that_changes_after_it_was_looked_through(data, form):
    manifest = load_manifest(getattr(data, f"as_{form}")())
    samples = read_samples(manifest)
    file = data.folder / samples.source.files[samples.images[0].place[0]].name
    os.utime(file, ns=(1, 1))
    with pytest.raises(ManifestError, match=r"it has changed since it was read \(.* then, .* now\)"):
        pictures_of(samples, manifest).open(samples.images[0].file_name)
    file.unlink()
    with pytest.raises(ManifestError, match="there is no such file"):
        pictures_of(samples, manifest).open(samples.images[0].file_name)


def test_patterns_that_name_nothing(data):
    refused(data.manifest("m", tar="*.tar"), "no file fits this")
    refused(data.manifest("m", tar="{000..001}.tar"), r"000\.tar: there is no such file")
    data.as_tars(files=1)
    refused(data.manifest("m", tar={"train": "*.tar", "test": "shard-00.tar"}), "is named twice")


def test_a_saved_data_set_that_is_damaged(data):
    path = data.as_saved()
    first, *_ = sorted((data.folder / "saved").glob("*.arrow"))
    whole = first.read_bytes()
    first.write_bytes(whole + whole)
    refused(path, "something stands after the end of the stream")
    (data.folder / "saved" / "state.json").write_text("{}")
    refused(path, "this is not what `save_to_disk` writes")
    (data.folder / "saved" / "state.json").write_text('{"_data_files": []}')
    data.as_imagefolder()  # beside it, and not meant
    refused(path, "no images with captions")


def test_urls(data):
    data.as_tars()
    data.as_parquet()
    memory = fsspec.filesystem("memory")
    for file in [*data.folder.glob("*.tar"), *data.folder.glob("*.parquet")]:
        memory.pipe_file(f"/sources/{file.name}", file.read_bytes())
    try:
        columns = {"caption_columns": ["texts"], "split_column": "split"}
        for keys in (
            {"tar": "memory://sources/shard-{00..02}.tar"},
            {"tar": "memory://sources/*.tar"},
            {"parquet": "memory://sources/part-?.parquet", **columns},
        ):
            manifest = load_manifest(data.manifest("url", **keys))
            samples = read_samples(manifest)
            pictures = pictures_of(samples, manifest)
            found = {image.file_name: pictures.open(image.file_name).getvalue() for image in samples.images}
            assert found == {name: content for name, content, *_ in data.rows}
        memory.pipe_file("/sources/shard-00.tar", memory.cat_file("/sources/shard-00.tar"))
        memory.pipe_file("/sources/part-0.parquet", memory.cat_file("/sources/part-0.parquet"))
        places = (image for image in samples.images if image.place[0] == 0)
        with pytest.raises(ManifestError, match="it has changed"):
            pictures_of(samples, manifest).open(next(places).file_name)
        refused(data.manifest("url", tar="memory://sources/none.tar"), "there is no such file")
        refused(data.manifest("url", tar="nosuch://a/b.tar"), "this cannot be read")
    finally:
        memory.rm("/sources", recursive=True)
