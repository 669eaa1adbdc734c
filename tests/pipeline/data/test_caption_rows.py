"""CSV, TSV and JSON lines whose columns have any names, written by Python's own csv and json."""

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_data import PackedData
from small_captions import image, karpathy, manifest, refusal

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.errors import ManifestError

ROWS = [
    ("sub/a.jpg", ['A "quoted", long\ncaption', "Vögel; 鳥"], "train"),
    ("b.jpg", ["one\ttab"], "val"),
    ("c.jpg", ["x", "y", "z"], "test"),
]
KEYS = "image_column: photo\nsplit_column: part\n"


def table(rows, **how):
    """Return rows as a CSV."""
    file = io.StringIO(newline="")
    csv.writer(file, **how).writerows(rows)
    return file.getvalue()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def long_rows(header):
    return [header, *((name, text, split) for name, texts, split in ROWS for text in texts)]


def wide_rows():
    filled = [(*texts, "", "")[:3] for _, texts, _ in ROWS]
    rows = ((n, *texts, split, name) for n, ((name, _, split), texts) in enumerate(zip(ROWS, filled, strict=True)))
    return [("id", "en", "de", "fr", "part", "photo"), *rows]


ONE, WIDE = f"{KEYS}caption_columns: en\n", f"{KEYS}caption_columns: [en, de, fr]\n"
FORMS = {
    "usual names": (".csv", table(long_rows(("file_name", "caption", "split"))), ""),
    "text": (".csv", table(long_rows(("file_name", "text", "split"))), ""),
    "byte order mark": (".csv", "\ufeff" + table(long_rows(("file_name", "text", "split"))), ""),
    "everything quoted": (".csv", table(long_rows(("file_name", "text", "split")), quoting=csv.QUOTE_ALL), ""),
    "other names": (".csv", table(long_rows(("photo", "en", "part"))), ONE),
    "several": (".csv", table(wide_rows()), WIDE),
    "semicolons": (".csv", table(wide_rows(), delimiter=";"), f'{WIDE}separator: ";"\n'),
    "tabs": (".tsv", table(wide_rows(), delimiter="\t"), WIDE),
    "tabs by key": (".csv", table(wide_rows(), delimiter="\t"), f'{WIDE}separator: "\\t"\n'),
    "commas by key": (".tsv", table(wide_rows()), f'{WIDE}separator: ","\n'),
    "a list": (".jsonl", lines({"photo": n, "en": texts, "part": s, "w": 3} for n, texts, s in ROWS), ONE),
    "null": (
        ".jsonl",
        lines({"photo": n, "part": s, "de": None, "en": texts[:1], "fr": texts[1:]} for n, texts, s in ROWS),
        WIDE,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_data_set_in_any_form_has_the_same_samples(tmp_path, form):
    suffix, text, more = FORMS[form]
    samples = read_samples(manifest(tmp_path, text, suffix, more))
    assert [(i.file_name, [c.text for c in i.captions], i.split) for i in samples.images] == ROWS
    plain = manifest(
        tmp_path / "plain", lines({"file_name": n, "caption": t, "split": s} for n, t, s in ROWS), ".jsonl"
    )
    assert samples.digest == read_samples(plain).digest


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=6),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_any_text_comes_back(tmp_path_factory, texts, separator, quoting):
    rows = [("file_name", "caption"), *((f"{n}.jpg", text) for n, text in enumerate(texts))]
    text = table(rows, delimiter=separator, quoting=quoting)
    found = read_samples(
        manifest(tmp_path_factory.mktemp("any"), text, ".csv", f"separator: {json.dumps(separator)}\n")
    )
    assert {i.file_name: i.captions[0].text for i in found.images} == {f"{n}.jpg": t for n, t in enumerate(texts)}


def test_the_metadata_of_an_imagefolder_are_a_captions_file(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rows = [{"file_name": f"{n}.jpg", "text": f"bird {n}", "licence": "free"} for n in range(9)]
    (folder / "metadata.jsonl").write_text(lines(rows))
    (tmp_path / "a.yaml").write_text("name: birds\nimages: images\ncaptions: images/metadata.jsonl\n")
    (tmp_path / "b.yaml").write_text("name: birds\ndataset: images\n")
    one, other = (read_samples(load_manifest(tmp_path / f"{name}.yaml")) for name in "ab")
    assert one == other
    assert {image.file_name: image.captions[0].text for image in one.images} == {
        row["file_name"]: row["text"] for row in rows
    }


def test_texts_are_found_in_tables_as_well(tmp_path):
    from pyarrow import parquet

    data = PackedData(tmp_path)
    whole = data.table(data.rows)
    parquet.write_table(whole.rename_columns(["image", "text", "split"]), tmp_path / "t.parquet")
    parquet.write_table(whole, tmp_path / "named.parquet")
    found = read_samples(load_manifest(data.manifest("t", parquet="t.parquet", split_column="split")))
    keys = {"parquet": "named.parquet", "split_column": "split", "caption_columns": "texts"}
    assert found.digest == read_samples(load_manifest(data.manifest("named", **keys))).digest


def test_validation_is_val_wherever_it_stands(tmp_path, capsys):
    folder = tmp_path / "in" / "validation"
    folder.mkdir(parents=True)
    (folder / "metadata.csv").write_text("file_name,caption\na.jpg,a bird\n")
    (tmp_path / "folders.yaml").write_text("name: birds\ndataset: in\n")
    row = {"file_name": "a.jpg", "caption": "a bird", "split": "validation"}
    found = [
        karpathy(tmp_path / "1", [image(1, "validation")]),
        manifest(tmp_path / "2", table([row, row.values()]), ".csv"),
        manifest(tmp_path / "3", table([row, row.values()], delimiter="\t"), ".tsv"),
        manifest(tmp_path / "4", lines([row]), ".jsonl"),
        load_manifest(tmp_path / "folders.yaml"),
    ]
    data = PackedData(tmp_path / "packed", count=1)
    data.as_tars(files=1)
    data.as_parquet(files=1)
    found.append(load_manifest(data.manifest("t", tar={"validation": "shard-00.tar"})))
    found.append(load_manifest(data.manifest("p", parquet={"validation": "part-0.parquet"}, caption_columns="texts")))
    for one in found:
        assert read_samples(one).splits == {"val": (0, 1)}
    assert capsys.readouterr().err == ""
    other = manifest(tmp_path / "5", lines([row]), ".jsonl", "merge_splits: {validation: test}\n")
    assert read_samples(other).splits == {"test": (0, 1)}


@pytest.mark.parametrize(
    ("suffix", "text", "more", "phrase"),
    [
        (".csv", "photo,en\na,b\n", "", "line 1: there is no column 'file_name'; it has 'photo', 'en': name the right"),
        (".csv", "file_name,en\na,b\n", "", "line 1: there is no column 'caption'; it has 'file_name', 'en': name"),
        (".tsv", "photo\ten\na\tb\n", KEYS, "line 1: there is no column 'caption'; it has 'photo', 'en'"),
        (".tsv", "photo\ttext\na\tb\n", KEYS, "line 1: there is no column 'part'; it has 'photo', 'text': name"),
        (".jsonl", '{"photo": "a", "en": "b"}', WIDE, "line 1: there is no column 'de'; it has 'photo', 'en': name"),
        (
            ".jsonl",
            lines([{"file_name": "a", "text": "b"}, {"text": "c"}]),
            "",
            "line 2: there is no column 'file_name'",
        ),
        (".csv", f"{','.join(f'c{n}' for n in range(99))}\n", "", "'c18', 'c19', and 79 more: name the right ones"),
        (".csv", "file_name,caption,Split\na,b,c\n", "", "line 1: there is no column 'split', and one called 'Split';"),
        (".csv", "file_name,text,text\na,b,c\n", "", "line 1: two columns are called 'text'; rename one"),
        (".csv", "file_name;text\na;b\n", "", "with \",\" between columns there is but one, 'file_name;text'; if it"),
        (".csv", "file_name;text\na;b\n", "", 'if it should be ";", say so as separator in the manifest'),
        (".csv", "file_name\ttext\na\tb\n", "", 'if it should be "\\t", say so as separator'),
        (".tsv", "file_name,text\na,b\n", "", 'with "\\t" between columns there is but one'),
        (".csv", "file_name,text\na,b\n", 'separator: ";"\n', 'if it should be ",", say so as separator'),
        (".csv", "\n\nfile_name,text\n", "", "line 1: it is empty, and the first line names the columns"),
        (".tsv", 'file_name\ttext\na\t"b\nc"\nd\te\tf\n', "", "line 4: 3 fields where the header has 2; quote a text"),
        (".tsv", 'file_name\ttext\na\t"b" c\n', "", "line 2: not valid CSV"),
        (".csv", "photo,en,de,fr,part\na,,x,,train\nb,, ,,train\n", WIDE, "line 3 ('b'): it has no caption; add one"),
        (
            ".jsonl",
            '{"file_name": "a", "text": []}',
            "",
            "line 1 ('a'): it has no caption; add one, or take the row out",
        ),
        (".jsonl", '{"file_name": "a", "text": null}', "", "line 1 ('a'): it has no caption"),
        (".jsonl", '{"file_name": "a", "text": ["b", 3]}', "", "line 1: a caption is no text"),
        (".jsonl", '{"file_name": "a", "text": {"en": "b"}}', "", "line 1: a caption is no text"),
        (".csv", "file_name,text,split\na,b,\n", "", "line 2: the split is empty"),
        (".csv", "photo,text,part\na,b,\n", KEYS, "line 2: the split is empty"),
        (".tsv", "file_name\ttext\n".encode("utf-16"), "", "this is not UTF-8"),
    ],
)
def test_a_wrong_table(tmp_path, suffix, text, more, phrase):
    assert phrase in refusal(manifest(tmp_path, text, suffix, more))


def test_rows_without_captions_are_left_out_where_that_is_asked_for(tmp_path, capsys):
    text = "file_name,en,de\na.jpg,x,\nb.jpg,,\na.jpg,,y\n"
    samples = read_samples(manifest(tmp_path, text, ".csv", "caption_columns: [en, de]\n"), skip=True)
    assert [(i.file_name, [c.text for c in i.captions]) for i in samples.images] == [("a.jpg", ["x", "y"])]
    assert samples.left_out == (f"{tmp_path / 'captions.csv'}: line 3 ('b.jpg'): {REASON}",)
    assert "1 sample left out: " in capsys.readouterr().err


REASON = "it has no caption; add one, or take the row out"


def test_an_empty_caption_of_a_single_column_is_one_without_words(tmp_path):
    samples = read_samples(manifest(tmp_path, "file_name,caption\na.jpg,\n", ".csv"))
    assert [c.text for c in samples.images[0].captions] == [""]


@pytest.mark.parametrize(
    ("suffix", "more", "phrase"),
    [
        (".json", "image_column: a\n", "'image_column' goes not with a .json file"),
        (".json", 'separator: ";"\n', "'separator' goes not with a .json file"),
        (".jsonl", 'separator: ";"\n', "'separator' goes not with a .jsonl file"),
        (".csv", "separator: ';;'\n", """'separator' must be one character, as ";" or "\\t", not ';;'"""),
        (".csv", "separator: '\"'\n", "'separator' must be one character"),
        (".csv", "separator: x\n", "'separator' must be one character"),
        (".csv", "caption_columns: [a, 3]\n", "'caption_columns' must be a text or a list of different texts"),
        (".csv", "caption_columns: [a, a]\n", "'caption_columns' must be a text or a list of different texts"),
    ],
)
def test_keys_that_do_not_fit(tmp_path, suffix, more, phrase):
    with pytest.raises(ManifestError) as caught:
        manifest(tmp_path, "", suffix, more)
    assert phrase in str(caught.value)
