"""Every form of one data set has the same samples and pictures, whatever the number of its files."""

import json
import tarfile
from glob import glob

import pyarrow as pa
import pytest
from packed_data import SPLITS, PackedData, pictures_of, write_tar
from pyarrow import parquet

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.data.sources.files import expand, find_files

FORMS = ("tars", "webdataset", "parquet", "saved", "saved_splits")


def read(path):
    manifest = load_manifest(path)
    return manifest, read_samples(manifest)


def contents(manifest, samples):
    pictures = pictures_of(samples, manifest)
    return [pictures.open(image.file_name).getvalue() for image in samples.images]


@pytest.fixture
def data(tmp_path):
    return PackedData(tmp_path / "data")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_samples_and_bytes_of_the_folder(data, form):
    if form == "saved_splits":  # captions are numbered in the order of the source
        data.rows.sort(key=lambda row: SPLITS.index(row[3]))
    folder, expected = read(data.as_folder())
    manifest, samples = read(getattr(data, f"as_{form}")())
    assert samples.digest == expected.digest
    assert samples.splits == expected.splits
    assert [image.captions for image in samples.images] == [image.captions for image in expected.images]
    assert contents(manifest, samples) == contents(folder, expected)


@pytest.mark.parametrize("form", ["tars", "parquet"])
@pytest.mark.parametrize("files", [1, 2, 7])
def test_the_number_of_files_does_not_matter(data, tmp_path, form, files):
    other = PackedData(tmp_path / "other")
    _, samples = read(getattr(data, f"as_{form}")(files=files))
    _, expected = read(getattr(other, f"as_{form}")())
    assert samples.digest == expected.digest


def test_rows_of_a_large_group_come_in_any_order(tmp_path):
    data = PackedData(tmp_path / "data", count=70)
    manifest, samples = read(data.as_parquet(files=1, group=60))
    pictures, bytes_of = pictures_of(samples, manifest), {name: bytes_ for name, bytes_, *_ in data.rows}
    for first in (*range(0, 70, 3), 0, 69, 16, 15, 17, 40, 33, 32):
        for name in (data.rows[row][0] for row in (first, max(0, first - 1))):
            assert pictures.open(name).getvalue() == bytes_of[name]


def test_an_imagefolder_is_a_folder_with_other_names(data):
    manifest, samples = read(data.as_imagefolder())
    by_name = {f"{split}/{name}": (bytes_, captions) for name, bytes_, captions, split in data.rows}
    assert {image.file_name: image.split for image in samples.images} == {n: n.split("/")[0] for n in by_name}
    for image, found in zip(samples.images, contents(manifest, samples), strict=True):
        assert (found, [caption.text for caption in image.captions]) == by_name[image.file_name]


def move_and_link(folder, away):
    """Put a folder elsewhere with a link in its place, and another link in it to the folder above: a loop."""
    folder.rename(away)
    folder.symlink_to(away)
    (away / "loop").symlink_to(folder.parent.resolve())


def test_folders_that_are_links_are_folders_and_loops_end(data, tmp_path):
    path = data.as_imagefolder()
    expected = read(path)
    for split in SPLITS:
        move_and_link(data.folder / "images" / split, tmp_path / f"the {split}")
    manifest, samples = read(path)
    assert samples.digest == expected[1].digest
    assert contents(manifest, samples) == contents(*expected)


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_a_file_that_links_lead_to_in_several_ways_counts_once(data, tmp_path, form):
    _, expected = read(data.as_parquet() if form == "parquet" else data.as_tars())
    move_and_link(data.folder, tmp_path / "away")
    (data.folder / "again").symlink_to(tmp_path / "away")
    keys = {"image_column": "image", "caption_columns": "texts", "split_column": "split"} if form == "parquet" else {}
    _, samples = read(data.manifest("deep", **{form: f"**/*.{form}"}, **keys))
    assert len(samples.images) == len(expected.images) == 30


@pytest.mark.parametrize("pattern", ["**/*.tar", "a/**", "**/b/*", "a/**/c/?.tar", "**", "**/.d/*", "[ab]/**/1.tar"])
def test_a_pattern_of_any_depth_is_that_of_glob(tmp_path, pattern):
    for name in ("1.tar", "a/1.tar", "a/b/2.tar", "a/b/c/3.tar", "b/1.tar", ".d/4.tar", "a/.e.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [file.name for file in find_files(tmp_path, pattern)]
    expected = glob(pattern, root_dir=tmp_path, recursive=True)  # noqa: PTH207 -- relative to a folder
    assert found == sorted(name for name in expected if (tmp_path / name).is_file())
    assert [file.name for file in find_files("/", f"{tmp_path}/{pattern}")] == [f"{tmp_path}/{name}" for name in found]


def test_splits_of_an_imagefolder_whose_metadata_lie_above_them(data, tmp_path):
    names = {"train/0.png": "train", "validation/1.png": "val", "test/2.png": "test"}
    for name in names:
        (tmp_path / "p" / name).parent.mkdir(parents=True)
        (tmp_path / "p" / name).write_bytes(data.rows[0][1])
    lines = [json.dumps({"file_name": name, "text": "one"}) for name in names]
    (tmp_path / "p" / "metadata.jsonl").write_text("\n".join(lines))
    _, samples = read(data.manifest("above", dataset=str(tmp_path / "p")))
    assert {image.file_name: image.split for image in samples.images} == names


def test_a_column_that_is_called_split_has_the_splits(data):
    _, expected = read(data.as_folder())
    data.as_parquet()
    data.as_saved()
    (data.folder / "photos" / "metadata.jsonl").write_text(
        "\n".join(json.dumps({"file_name": n, "text": texts, "split": split}) for n, _, texts, split in data.rows)
    )
    for keys in ({"parquet": "part-*", "caption_columns": "texts"}, {"dataset": "saved"}, {"dataset": "photos"}):
        assert read(data.manifest("unnamed", **keys))[1].digest == expected.digest


def test_an_empty_one_of_several_caption_columns_is_no_caption(data):
    table = pa.table({"image": [data.rows[0][1]] * 3, "a": ["x", "y", " "], "b": ["", "q", "z"]})
    parquet.write_table(table, data.folder / "t.parquet")
    _, samples = read(data.manifest("t", parquet="t.parquet", image_column="image", caption_columns=["a", "b"]))
    found = sorted([caption.text for caption in image.captions] for image in samples.images)
    assert found == [["x"], ["y", "q"], ["z"]]


def test_a_pattern_in_a_folder_with_brackets(tmp_path):
    _, samples = read(PackedData(tmp_path / "data [2024]").as_parquet())
    assert len(samples.images) == 30


def test_an_imagefolder_may_have_a_csv(data, tmp_path):
    (tmp_path / "p").mkdir()
    name, bytes_, *_ = data.rows[0]
    (tmp_path / "p" / name).write_bytes(bytes_)
    (tmp_path / "p" / "metadata.csv").write_text(f'file_name,a,b,part\n{name},one,"two, three",test\n')
    path = data.manifest("csv", dataset=str(tmp_path / "p"), caption_columns=["a", "b"], split_column="part")
    _, samples = read(path)
    (image,) = samples.images
    assert ([c.text for c in image.captions], image.split) == (["one", "two, three"], "test")


def test_rows_without_distinct_paths_are_numbered(data):
    manifest, samples = read(data.as_parquet(path=False))
    assert sorted(image.id for image in samples.images) == [f"{number:08d}" for number in range(30)]
    assert sorted(contents(manifest, samples)) == sorted(bytes_ for _, bytes_, *_ in data.rows)


def test_rows_of_one_path_count_as_pictures_with_a_note(data, caplog):
    rows = [{"image": {"bytes": data.rows[0][1], "path": "a.png"}, "text": text} for text in ("one", "two")]
    parquet.write_table(pa.Table.from_pylist(rows), data.folder / "t.parquet")
    _, samples = read(data.manifest("t", parquet="t.parquet"))
    assert [image.file_name for image in samples.images] == ["00000000", "00000001"]
    assert "'a.png' is the path of several rows, which count as different pictures" in caplog.text


def test_a_text_file_is_a_caption_and_json_goes_before_it(data, tmp_path, caplog):
    texts = {"d/1.TXT": "one\n", "d/2.txt": "two", "d/2.json": '{"caption": "zwei"}'}
    pictures = {f"d/{number}.jpg": data.rows[number][1] for number in (1, 2)}
    write_tar(tmp_path / "a.tar", texts | pictures | {"d/1.seg.png": "not a picture of the sample"})
    _, samples = read(data.manifest("text", tar=str(tmp_path / "a.tar")))
    assert {i.file_name: i.captions[0].text for i in samples.images} == {"d/1.jpg": "one", "d/2.jpg": "zwei"}
    assert "names no splits" in caplog.text


def test_splits_are_those_that_the_manifest_names(data):
    data.as_tars(files=3)
    tars = {"train": "shard-{00,02}.tar", "validation": "shard-01.tar"}
    path = data.manifest("by", tar=tars, merge_splits={"validation": "val"})
    _, samples = read(path)
    first, second, third = (len(part) for part in data.parts(3))
    assert samples.splits == {"train": (0, first + third), "val": (first + third, first + second + third)}


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_kind_of_tar(data, tmp_path, format_):
    name = "/".join(["folder" * 10] * (2 if format_ == tarfile.USTAR_FORMAT else 5))
    write_tar(tmp_path / "a.tar", {f"{name}/p.png": data.rows[0][1], f"{name}/p.txt": "a dog"}, format=format_)
    manifest, samples = read(data.manifest("long", tar={"test": str(tmp_path / "a.tar")}))
    assert [image.file_name for image in samples.images] == [f"{name}/p.png"]
    assert contents(manifest, samples) == [data.rows[0][1]]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("{8..10}.tar", ["8.tar", "9.tar", "10.tar"]),
        ("{008..010}", ["008", "009", "010"]),
        ("{10..08}", ["10", "09", "08"]),
        ("{x,y}-{0..1}", ["x-0", "x-1", "y-0", "y-1"]),
    ],
)
def test_braces(pattern, names):
    assert expand(pattern) == names
