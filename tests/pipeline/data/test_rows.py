"""What names splits, captions and pictures counts alike in every source, and what is wrong is left out alike."""

import json
import tarfile

import datasets
import numpy as np
import pytest
from any_source import FORMS, write_source
from packed_data import PackedData, manifest_with, pictures_of, write_tar
from small_captions import manifest

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.errors import ManifestError

SPLITS = ["test", "train", "val", "train"]
BY_NAME = {"0.jpg": "test", "1.jpg": "train", "2.jpg": "val", "3.jpg": "train"}


def rows(caption="caption", **more):
    """Return four rows; each value of `more` is a list with one value for each."""
    columns = {"file_name": list(BY_NAME), caption: [f"a dog {number}" for number in range(4)], **more}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def splits(samples):
    return {image.file_name: image.split for image in samples.images}


def texts(samples):
    return sorted((image.file_name, caption.text) for image in samples.images for caption in image.captions)


def refusal(source, skip=False):
    with pytest.raises(ManifestError) as caught:
        read_samples(source, skip)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["split", "Split", " SPLIT "])
def test_a_key_that_is_called_split_counts(tmp_path, form, key, caplog):
    samples = read_samples(write_source(form, tmp_path, rows(**{key: SPLITS})))
    assert splits(samples) == BY_NAME
    assert not caplog.messages


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["subset", "splits", "Datensatz"])
def test_another_key_that_names_splits_has_to_be_named(tmp_path, form, key, caplog):
    read_samples(write_source(form, tmp_path / "one", rows(**{key: SPLITS})))
    (note,) = (one for one in caplog.messages if "nothing reads" in one)
    assert key in note
    assert "file_name" not in note and "caption'" not in note
    source = write_source(form, tmp_path / "two", rows(**{key: SPLITS}), f"split_column: {key}\n")
    assert splits(read_samples(source)) == BY_NAME


@pytest.mark.parametrize("key", ["split", "subset"])
@pytest.mark.parametrize("saved", [True, False])
def test_splits_that_datasets_keeps_as_numbers_of_classes(tmp_path, key, saved, caplog):
    classes = datasets.ClassLabel(names=["val", "test", "train"])
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string"), key: classes})
    pictures = [{"bytes": b"picture", "path": name} for name in BY_NAME]
    columns = {"image": pictures, "caption": ["a dog"] * 4, key: SPLITS}
    data = datasets.Dataset.from_dict(columns, features=features)
    data.save_to_disk(tmp_path / "data")
    data.to_parquet(tmp_path / "data.parquet")
    source = "dataset: data" if saved else "parquet: data.parquet"
    assert splits(read_samples(manifest_with(tmp_path, f"{source}\nsplit_column: {key}"))) == BY_NAME
    found = splits(read_samples(manifest_with(tmp_path, source)))
    assert found == BY_NAME if key == "split" else "nothing reads subset" in caplog.text


@pytest.mark.parametrize("more", [{"meta": {"part": "val"}}, {"is_train": 1}, {"test": False}])
def test_splits_that_stand_deeper_or_in_columns_of_their_own(tmp_path, more, caplog):
    read_samples(manifest(tmp_path, json.dumps({"file_name": "0.jpg", "caption": "a dog", **more}), ".jsonl"))
    assert f"nothing reads {next(iter(more))}" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_a_key_of_other_words_is_none_of_splits(tmp_path, form, caplog):
    words = ["test", "train", "station", "train"]
    samples = read_samples(write_source(form, tmp_path, rows(**{"label": words, "split": SPLITS})))
    assert splits(samples) == BY_NAME
    assert not caplog.messages
    read_samples(write_source(form, tmp_path, rows(**{"label": words})))
    assert "names no splits" in caplog.text


@pytest.mark.parametrize("form", [".jsonl", "karpathy", "tar", "parquet", "saved"])
def test_a_split_column_that_is_not_there(tmp_path, form):
    source = write_source(form, tmp_path, rows(), "split_column: part\n")
    assert "there is no column 'part'; it has " in refusal(source)
    write_tar(tmp_path / "texts.tar", {"0.jpg": "picture", "0.txt": "a dog"})
    assert "'part'" in refusal(manifest_with(tmp_path, "tar: texts.tar\nsplit_column: part"))


@pytest.mark.parametrize("where", ["annotations", "document"])
def test_splits_that_stand_beside_the_images_of_a_json(tmp_path, where, caplog):
    annotation = {"image_id": 1, "caption": "a dog", **({"split": "val"} if where == "annotations" else {})}
    document = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [annotation]}
    read_samples(manifest(tmp_path, json.dumps(document | ({"split": "val"} if where == "document" else {}))))
    assert "nothing reads id, split" in caplog.text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["captions", "caption", "text", "TEXT"])
def test_captions_are_found_under_each_of_their_names(tmp_path, form, key):
    if key == "TEXT" and form in ("karpathy", "coco"):
        assert "'TEXT'" in refusal(write_source(form, tmp_path, rows(key)))
        return
    samples = read_samples(write_source(form, tmp_path, rows(key)))
    assert texts(samples) == [(name, f"a dog {number}") for number, name in enumerate(BY_NAME)]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("karpathy", "coco")])
@pytest.mark.parametrize("other", ["text", "caption_2"])
def test_other_captions_that_are_passed_over_are_named(tmp_path, form, other, caplog):
    source = write_source(form, tmp_path, rows(**{other: ["another"] * 4}))
    assert texts(read_samples(source)) == [(name, f"a dog {number}") for number, name in enumerate(BY_NAME)]
    assert f"those of 'caption', and not of '{other}'" in caplog.text


@pytest.mark.parametrize("form", [".csv", ".tsv", ".jsonl", "imagefolder"])
@pytest.mark.parametrize("key", ["filename", "image", "File_Name"])
def test_pictures_are_found_under_each_of_their_names(tmp_path, form, key):
    renamed = [{key: row["file_name"], "caption": row["caption"]} for row in rows()]
    assert {name for name, _ in texts(read_samples(write_source(form, tmp_path, renamed)))} == set(BY_NAME)


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        *((form, wrong) for form in FORMS[2:-2] for wrong in (None, float("nan"), 3, ["a", 3], "\ud800")),
        *((form, None) for form in ("parquet", "saved")),
    ],
)
def test_exactly_what_is_wrong_is_left_out(tmp_path, form, wrong, caplog):
    data = rows(split=SPLITS)
    data[2]["caption"] = wrong
    source = write_source(form, tmp_path, data)
    assert refusal(source).endswith(", or go on with `on_error` skip.")
    samples = read_samples(source, skip=True)
    expected = [("0.jpg", "a dog 0"), ("1.jpg", "a dog 1"), ("3.jpg", "a dog 3")]
    if wrong == ["a", 3] and form not in ("karpathy", "coco"):  # the good one of a list stays
        expected.insert(2, ("2.jpg", "a"))
    assert texts(samples) == expected
    assert samples.left_out
    assert "left out: " in caplog.text


LISTS = [["a dog", 'it\'s "hers", [here]', "二 café"], ["two\nlines, one"], ["a \\ b", "c", "d (e)"], ["f", "g"]]
WRITTEN = {
    "JSON": json.dumps,
    "lines within texts": lambda texts: repr(texts).replace("\\n", "\n"),
    "JSON of several lines": lambda texts: json.dumps(texts, ensure_ascii=False, indent=1),
    "Python": repr,
    "a tuple": lambda texts: repr(tuple(texts)),
    "numpy": lambda texts: str(np.array(texts)),
    "numpy's texts": lambda texts: repr([np.str_(text) for text in texts]),
    "nothing beside": lambda texts: repr([None, *texts, float("nan")]),
    "Karpathy's sentences": lambda texts: json.dumps([{"raw": text, "tokens": []} for text in texts]),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("form", FORMS)
def test_lists_that_were_written_as_texts_are_captions_each(tmp_path, form, written):
    data = [{**row, "caption": WRITTEN[written](of)} for row, of in zip(rows(split=SPLITS), LISTS, strict=True)]
    found = read_samples(write_source(form, tmp_path, data, "quoting: csv\n" if form in (".csv", ".tsv") else ""))
    expected = dict(zip(BY_NAME, LISTS, strict=True))
    assert {image.file_name: [one.text for one in image.captions] for image in found.images} == expected
    assert len({one.sentid for image in found.images for one in image.captions}) == sum(map(len, LISTS))


@pytest.mark.parametrize("form", FORMS)
def test_a_column_that_is_not_all_lists_is_one_of_captions(tmp_path, form, caplog):
    plain = ["[a dog] runs", "[a dog]", "(['x', 'y'] a cat)", "{'a bird']"]
    data = [{**row, "caption": text} for row, text in zip(rows(split=SPLITS), plain, strict=True)]
    assert [text for _, text in texts(read_samples(write_source(form, tmp_path / "plain", data)))] == plain
    assert not caplog.messages
    data[3]["caption"] = "['a', 'b']"
    assert texts(read_samples(write_source(form, tmp_path / "one", data)))[3] == ("3.jpg", "['a', 'b']")
    assert "'3.jpg'" in caplog.text or "annotations[3]" in caplog.text or "row 3" in caplog.text
    most = [{**row, "caption": text} for row, text in zip(data, ["['a']", "a dog", "['b']", "('c',)"], strict=True)]
    assert "lists" in refusal(write_source(form, tmp_path / "most", most))


@pytest.mark.parametrize(
    "text", ["[1, 2]", "['a', ['b']]", '{"en": "a"}', "['a' ... 'b']", r"['\xg']", "[None]", "[]", "()"]
)
def test_a_list_without_texts_is_refused_or_left_out(tmp_path, text):
    data = [{**row, "caption": one} for row, one in zip(rows(), ["['a']", text, "['b']", "['c', 'd']"], strict=True)]
    source = write_source(".csv", tmp_path, data)
    assert "'1.jpg': " in refusal(source)
    samples = read_samples(source, skip=True)
    good = [(name, one) for name, one in texts(samples) if name != "1.jpg"]
    assert good == [("0.jpg", "a"), ("2.jpg", "b"), ("3.jpg", "c"), ("3.jpg", "d")] and len(samples.left_out) == 1


def test_empty_fields_and_columns_beside_lists(tmp_path):
    rows_ = [("file_name", "en", "de"), ("0.jpg", "['a', 'b']", "x"), ("1.jpg", "", "y"), ("2.jpg", "nan", "z")]
    text = "".join(f'{name},"{en}",{de}\n' for name, en, de in rows_)
    source = manifest(tmp_path, text, ".csv", "caption_columns: [en, de]\n")
    assert texts(read_samples(source)) == [("0.jpg", t) for t in "abx"] + [("1.jpg", "y"), ("2.jpg", "z")]


@pytest.mark.parametrize("form", [".csv", ".jsonl", "parquet", "saved", "imagefolder"])
def test_a_row_without_a_split_is_left_out(tmp_path, form):
    source = write_source(form, tmp_path, rows(split=["test", "train", None, "train"]))
    assert "is empty or no text" in refusal(source)
    assert splits(read_samples(source, skip=True)) == {name: BY_NAME[name] for name in ("0.jpg", "1.jpg", "3.jpg")}


def test_members_of_a_tar_that_are_wrong_are_left_out(tmp_path):
    members = {
        **{"0.jpg": "x", "0.json": '{"caption": NaN}', "0.txt": "good"},  # the JSON goes before the text
        **{"1.jpg": "x", "1.json": "{", "1.txt": "good"},
        **{"2.jpg": "x", "2.txt": b"\xff"},
        **{"3.jpg": "x", "3.png": "x", "3.txt": "good"},
        **{"4.jpg": "x", "4.json": "[]"},
        **{"5.jpg": "x", "5.json": '{"url": "x"}'},
        **{"6.jfif": "x", "6.json": '{"caption": ""}', "6.txt": "good"},
        **{"9.jpg": "x", "9.json": '{"caption": ""}'},  # a caption without words, as in rows
        **{"7.jpg": "x", "7.json": '{"captions": [null, "good"]}', "../8.jpg": "x"},
    }
    write_tar(tmp_path / "a.tar", members)
    samples = read_samples(manifest_with(tmp_path, "tar: a.tar"), skip=True)
    assert texts(samples) == [("6.jfif", "good"), ("7.jpg", "good"), ("9.jpg", "")]
    assert len(samples.left_out) == 7
    assert any("5.json ('5.jpg'): it has no caption (it has 'url')" in one for one in samples.left_out)


def test_nothing_is_left_when_all_is_wrong(tmp_path):
    data = [{**row, "caption": None} for row in rows()]
    message = refusal(write_source(".jsonl", tmp_path, data), skip=True)
    assert "it has no images with captions (" in message
    assert "line 1 ('0.jpg'): it has no caption" in message


@pytest.mark.parametrize("form", ["imagefolder", "saved"])
def test_a_folder_and_a_column_that_contradict_each_other(tmp_path, form):
    columns = rows(split=["train", "train", "test", "train"])
    if form == "saved":
        dataset = write_source("saved", tmp_path, columns)
        one = datasets.load_from_disk(str(dataset.images / "data"))
        datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "both")
    else:
        (tmp_path / "both/train").mkdir(parents=True)
        (tmp_path / "both/train/metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in columns))
    refused = refusal(manifest_with(tmp_path, "dataset: both"))
    assert "'split' is 'test', and its folder 'train'; correct one, or" in refused
    found = read_samples(manifest_with(tmp_path, "dataset: both\nsplit_column: split"))
    assert {split: b - a for split, (a, b) in found.splits.items()} == {"train": 3, "test": 1}


def test_what_the_manifest_says_of_a_file_goes_before_its_own_splits_with_a_note(tmp_path, caplog):
    data = PackedData(tmp_path, count=6)
    data.as_tars(files=1)
    samples = read_samples(load_manifest(data.manifest("all", tar={"test": "shard-00.tar"})))
    assert samples.splits == {"test": (0, 6)}
    assert [one for one in caplog.messages if "'split' is 'train' count as 'test'" in one]


@pytest.mark.parametrize("names", [("train-000.tar", "val-000.tar"), ("x/Train/0.tar", "split=test/0.tar")])
def test_files_that_are_called_as_splits_have_to_be_named_so(tmp_path, names):
    for number, name in enumerate(names):
        write_tar(tmp_path / name, {f"{number}.jpg": "picture", f"{number}.txt": "a dog"})
    assert "files are called [" in refusal(manifest_with(tmp_path, 'tar: "**/*.tar"'))
    each = manifest_with(tmp_path, f"tar: {{train: {names[0]}, test: {names[1]}}}")
    assert read_samples(each).splits == {"train": (0, 1), "test": (1, 2)}


def test_folders_of_pictures_that_are_called_as_splits_are_their_splits(tmp_path, caplog):
    names = {"train/a.jpg": "train", "all/validation/b.jpg": "val", "test/x/c.jpg": "test"}
    text = "file_name,caption\n" + "".join(f"{name},a dog\n" for name in names)
    assert splits(read_samples(manifest(tmp_path, text, ".csv"))) == names
    assert "1 train, 1 val, 1 test by the folders of the pictures" in caplog.text
    only = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(("all", "test")))
    read_samples(manifest(tmp_path, only, ".csv"))
    assert "by SHA-256 of the file name" in caplog.text


def test_ids_are_the_same_as_numbers_and_as_texts(tmp_path):
    karpathy = {"images": [{"filename": "0.jpg", "imgid": "0", "sentences": [{"raw": "a dog", "imgid": 0}]}]}
    coco = {"images": [{"file_name": "0.jpg", "id": "0"}], "annotations": [{"image_id": 0, "caption": "a dog"}]}
    for number, document in enumerate((karpathy, coco)):
        found = read_samples(manifest(tmp_path / str(number), json.dumps(document)))
        assert [(image.id, image.captions[0].text) for image in found.images] == [("0", "a dog")]


def test_sentences_may_be_texts_and_captions_may_stand_in_their_image(tmp_path):
    images = [{"filename": "0.jpg", "sentences": ["a", "b"]}, {"filename": "1.jpg", "captions": ["c", "d"]}]
    samples = read_samples(manifest(tmp_path, json.dumps({"images": [*images, {"filename": "2.jpg", "text": "e"}]})))
    assert [text for _, text in texts(samples)] == list("abcde")


def test_an_imagefolder_with_splits_further_down_and_metadata_of_another_kind(tmp_path, caplog):
    for split in ("train", "validation"):
        (tmp_path / "p/data" / split).mkdir(parents=True)
        (tmp_path / "p/data" / split / "metadata.csv").write_text("file_name,caption\na.jpg,a dog\n")
    (tmp_path / "p/data/metadata.parquet").write_bytes(b"x")
    samples = read_samples(manifest_with(tmp_path, "dataset: p"))
    assert splits(samples) == {"data/train/a.jpg": "train", "data/validation/a.jpg": "val"}
    assert "metadata.parquet is passed over" in caplog.text


@pytest.mark.parametrize("name", ["a::b.tar", "x::y/a.tar", "http::/a.tar"])
def test_colons_in_the_name_of_a_file(tmp_path, name):
    write_tar(tmp_path / name, {"0.jpg": "picture", "0.caption": "a dog"})
    source = manifest_with(tmp_path, f"tar: {{test: '{name}'}}")
    samples = read_samples(source)
    assert texts(samples) == [("0.jpg", "a dog")]
    assert pictures_of(samples, source).open("0.jpg").getvalue() == b"picture"


def test_a_name_that_is_not_utf8_is_left_out(tmp_path):
    members = dict.fromkeys(("café.jpg", "café.txt", "b.jpg", "b.txt"), "a dog")
    write_tar(tmp_path / "a.tar", members, format=tarfile.GNU_FORMAT, encoding="latin-1")
    source = manifest_with(tmp_path, "tar: a.tar")
    assert "bytes that are not UTF-8" in refusal(source)
    assert texts(read_samples(source, skip=True)) == [("b.jpg", "a dog")]
