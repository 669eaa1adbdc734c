"""Caption files: what each form may hold, written by Python's own csv and json, and the refusal of a wrong one."""

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_data import PackedData
from small_captions import image, karpathy, manifest, refusal

from xret.pipeline.data.image_columns import Caption
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.errors import ManifestError


def test_coco_style(tmp_path):
    def coco(number, folder, split, texts):
        return image(number, split, texts, filepath=folder, cocoid=1000 + number)

    images = [
        coco(0, "val2014", "test", ["A bird.", "Two birds"]),
        coco(1, "train2014", "train", ["b"]),
        coco(2, "val2014", "restval", ["c", "d", "e"]),
        coco(3, "val2014", "val", ["f"]),
        coco(4, "train2014", "train", ["g"]),
    ]
    counts = "merge_splits: {restval: train}\ncounts: {train: 3, val: 1, test: 1}\n"
    samples = read_samples(karpathy(tmp_path, images, counts))
    assert samples.dataset == "birds"
    assert samples.splits == {"train": (0, 3), "val": (3, 4), "test": (4, 5)}
    names = ["train2014/1.jpg", "val2014/2.jpg", "train2014/4.jpg", "val2014/3.jpg", "val2014/0.jpg"]
    assert [i.file_name for i in samples.images] == names
    assert [i.id for i in samples.images] == ["1", "2", "4", "3", "0"]
    assert [i.cocoid for i in samples.images] == [1001, 1002, 1004, 1003, 1000]
    assert [i.split for i in samples.images] == ["train", "train", "train", "val", "test"]
    assert samples.images[-1].captions == (Caption("A bird.", 0), Caption("Two birds", 1))
    assert [caption.sentid for caption in samples.images[1].captions] == [20, 21, 22]


@pytest.mark.parametrize("ids", [(7, 9), ("seven", "nine")])
def test_what_coco_itself_writes_is_read_like_karpathys_form(tmp_path, ids):
    images = [{"id": ids[0], "file_name": "a.jpg", "height": 9}, {"id": ids[1], "file_name": "b/c.jpg", "split": "val"}]
    images[0]["split"], images[1]["cocoid"] = "train", 90  # of a number `id` is that of COCO
    captions = [(ids[1], 30, "a bird ."), (ids[0], 31, "two birds"), (ids[1], 32, "a beak")]
    annotations = [{"image_id": image, "id": number, "caption": text} for image, number, text in captions]
    document = {"info": {}, "images": images, "annotations": annotations}
    found = read_samples(manifest(tmp_path, json.dumps(document)))
    turned = dict(reversed(document.items()))
    assert found.digest == read_samples(manifest(tmp_path / "turned", json.dumps(turned))).digest
    assert [(i.file_name, i.id, i.split) for i in found.images] == [
        ("a.jpg", str(ids[0]), "train"),
        ("b/c.jpg", str(ids[1]), "val"),
    ]
    assert [i.cocoid for i in found.images] == (list(ids) if ids == (7, 9) else [-1, 90])
    assert found.images[0].captions == (Caption("two birds", 31),)
    assert found.images[1].captions == (Caption("a bird .", 30), Caption("a beak", 32))


def test_what_is_wrong_in_cocos_form_is_left_out_alone(tmp_path):
    images = [{"id": n, "file_name": f"{n}.jpg", **({} if n == 1 else {"split": "val"})} for n in range(4)]
    texts = [(3, "c"), (0, "a"), (9, "x"), (3, "d"), (2, "b")]
    annotations = [{"image_id": of, "caption": text} for of, text in texts] + [{"image_id": 0}]
    found = read_samples(manifest(tmp_path, json.dumps({"images": images, "annotations": annotations})), skip=True)
    captions = [(image.file_name, [*image.captions]) for image in found.images]
    assert captions == [("0.jpg", [("a", 0)]), ("2.jpg", [("b", 1)]), ("3.jpg", [("c", 2), ("d", 3)])]
    assert len(found.left_out) == 3


def test_rows_that_spell_a_name_in_both_normal_forms_are_of_one_image(tmp_path):
    rows = "file_name,caption,split\ncaf\u00e9.jpg,one,val\ncafe\u0301.jpg,two,val\n"
    (image,) = read_samples(manifest(tmp_path, rows, ".csv")).images
    assert (image.file_name, [caption.text for caption in image.captions]) == ("caf\u00e9.jpg", ["one", "two"])


def test_annotations_and_what_else_stands_beside_sentences_are_left_alone(tmp_path):
    plain = read_samples(karpathy(tmp_path / "one", [image(1, id=5)]))
    carried = {"regions": [{"bbox": [0, 0, 5, 5], "phrase": "a beak", "class": "beak"}], "license": 4}
    boxes = {"images": [image(1, id=5, **carried)], "annotations": [{"image_id": 5, "bbox": [0, 0, 1, 1]}]}
    assert read_samples(manifest(tmp_path / "two", json.dumps(boxes))).digest == plain.digest
    named = [{"image_id": 5, "id": "u1", "caption": "a"}, {"image_id": 5, "id": "u2", "caption": "b"}]
    coco = {"images": [{"id": 5, "file_name": "5.jpg"}], "annotations": named}
    (found,) = read_samples(manifest(tmp_path / "three", json.dumps(coco))).images
    assert found.captions == (Caption("a", 0), Caption("b", 1))


def test_without_ids_the_file_name_and_running_numbers_serve(tmp_path):
    images = [
        {"filename": "b.jpg", "split": "val", "sentences": [{"tokens": ["two", "birds"]}]},
        {"filename": "./a//b/../c.jpg", "split": "train", "sentences": [{"raw": "x"}, {"raw": "y", "sentid": 9}]},
    ]
    samples = read_samples(karpathy(tmp_path, images))
    assert [i.id for i in samples.images] == [i.file_name for i in samples.images] == ["a/c.jpg", "b.jpg"]
    assert samples.images[0].captions == (Caption("x", 1), Caption("y", 2))
    assert samples.images[1].captions == (Caption("two birds", 0),)


def coco(*annotations, **image):
    return {"images": [{"id": 1, "file_name": "a.jpg", **image}], "annotations": annotations}


def without(mapping, *keys):
    return {key: value for key, value in mapping.items() if key not in keys}


OF_ANOTHER = image(1, texts=["a", "b"])
OF_ANOTHER["sentences"][1]["imgid"] = 5
TWICE = [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}]


@pytest.mark.parametrize(
    ("images", "phrase"),
    [
        ([], "it has no images with captions"),
        ("text", "this is not a Karpathy JSON, it has no list 'images'"),
        (["text"], "images[0] is not a mapping"),
        ([image(1), without(image(2), "filename")], "images[1]: the file name is missing"),
        ([image(1, filename=" ")], "images[0]: the file name is missing"),
        ([image(1, filepath=3)], "images[0] is not a mapping with 'filename', 'sentences' and texts"),
        ([image(1, filename="../1.jpg")], "images[0]: '../1.jpg' leaves the image folder"),
        ([image(1, filename="/etc/1.jpg", filepath="val2014")], "'/etc/1.jpg' leaves the image folder"),
        ([image(1, filepath="/etc")], "'/etc/1.jpg' leaves the image folder"),
        ([image(1, filename="a\\1.jpg")], "is not a path with forward slashes"),
        ([image(1, filename="a\0.jpg")], "is not a path with forward slashes"),
        ([image(1), image(2, filename="x/../1.jpg")], "the file '1.jpg' is that of two images"),
        ([image(1), image(1, filename="2.jpg")], "the imgid '1' is that of two images"),
        ([image(1, sentences=[])], "images[0] ('1.jpg'): it has no caption"),
        ([image(1, sentences=[{"txt": "a"}])], "has no text as 'raw', nor as 'tokens' (it has 'txt')"),
        (
            [image(1, sentences=[{"raw": None, "tokens": [3]}])],
            "one of 'sentences' has no text as 'raw', nor as 'tokens'",
        ),
        ([OF_ANOTHER], "is of imgid 5, not 1"),
        ([image(1, sentences=[{"raw": "a", "sentid": "x"}])], "'sentid' is 'x', not a whole number"),
        ([image(1, cocoid=2**63)], "'cocoid' is 9223372036854775808, not a whole number of 64 bits"),
        ([image(1, imgid=1.5, sentences=[{"raw": "a"}])], "'imgid' is neither a whole number nor a text"),
        ([image(1, split="")], "images[0] ('1.jpg'): the split 'split' is empty or no text"),
        ([image(1), without(image(2), "split")], "some images have a split and some, such as '2.jpg', have none"),
        ([image(1, texts=["\ud800"])], "has half of a character pair"),
        (coco({"image_id": 1, "bbox": []}), "annotations[0] has no 'caption' (it has 'image_id', 'bbox'); take COCO's"),
        (coco({"image_id": [1], "caption": "a"}), "annotations[0] is of image [1], which is not among"),
        (coco({"image_id": 2, "caption": "a"}), "is of image 2, which is not among"),
        (coco(), "'a.jpg': it has no caption; add one"),
        ([{"id": 1, "file_name": "a.jpg"}], "'a.jpg': it has no caption (it has 'id', 'file_name')"),
        (coco(id=None), "images[0] has no 'id', by which annotations name it"),
        (coco({"image_id": 1, "caption": "a"}, id=True), "images[0] has no 'id', by which annotations name it"),
        (coco({"image_id": 1, "caption": "a"}, file_name=None), "images[0]: the file name is missing"),
        ({"images": TWICE, "annotations": [{"image_id": 1, "caption": "a"}]}, "the imgid '1' is that of two images"),
    ],
)
def test_a_wrong_json(tmp_path, images, phrase):
    document = images if isinstance(images, dict) else {"images": images}
    assert phrase in refusal(manifest(tmp_path, json.dumps(document)))


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
    "other names": (".csv", table(long_rows(("photo", "en", "part"))), ONE),
    "several": (".csv", table(wide_rows()), WIDE),
    "semicolons": (".csv", table(wide_rows(), delimiter=";"), f'{WIDE}separator: ";"\n'),
    "tabs": (".tsv", table(wide_rows(), delimiter="\t"), WIDE),
    "a list": (".jsonl", lines({"photo": n, "en": texts, "part": s, "w": 3} for n, texts, s in ROWS), ONE),
    "null": (".jsonl", lines({"photo": n, "part": s, "de": None, "en": t[:1], "fr": t[1:]} for n, t, s in ROWS), WIDE),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_data_set_in_any_form_has_the_same_samples(tmp_path, form):
    suffix, text, more = FORMS[form]
    samples = read_samples(manifest(tmp_path, text, suffix, more))
    assert [(i.file_name, [c.text for c in i.captions], i.split) for i in samples.images] == ROWS
    plain = manifest(tmp_path / "p", lines({"file_name": n, "caption": t, "split": s} for n, t, s in ROWS), ".jsonl")
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


HEADER = "file_name,caption\n"
SWALLOWED = {
    "to a mark at the end": HEADER + 'a.jpg,"to be\nb.heic,or not\nc.jpg,said she"\nd.jpg,x\n',
    "over an empty line": HEADER + 'a.jpg,"to be\n\nc.jpg,said she"\n',
    "to the end of the file": HEADER + 'a.jpg,"to be\nb.jpg,or not\n',
    "to a mark within": HEADER + 'a.jpg,"to be\nb.jpg,or not\nc.jpg,a sign "stop"\n',
    "caption first": 'caption,file_name\n"to be,a.jpg\nor not",b.jpg\n',
    "caption between": 'file_name,caption,split\na.jpg,"to be,train\nb.jpg,or not",val\n',
    "no suffixes": HEADER + 'film 1,"to be\nfilm 2,or not"\n',
    "in the header": 'file_name,"caption\na.jpg,to be\nb.jpg,or not"\n',
}


@pytest.mark.parametrize("case", SWALLOWED)
@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_quotation_mark_swallows_no_rows(tmp_path, case, separator, end):
    text = SWALLOWED[case].replace(",", separator).replace("\n", end)
    found = manifest(tmp_path, text, ".tsv" if separator == "\t" else ".csv")
    refusal(found)
    with pytest.raises(ManifestError):
        read_samples(found, skip=True)  # what is good in these lines is not known
    if case == "in the header":
        return
    plain = manifest(tmp_path, text, found.captions.suffix, "quoting: none\n")
    lines = [line for line in text.split(end)[1:] if line]
    at = text.split(end)[0].split(separator).index("caption")
    captions = [caption.text for i in read_samples(plain).images for caption in i.captions]
    assert sorted(captions) == sorted(line.split(separator)[at] for line in lines)


@pytest.mark.parametrize(
    "text",
    ["a dog, running\nin a field, happily", "x\n\ny", "a\r\nb,c", "x.\nIt is. It runs, fast", "one\ntwo, three.\n"],
)
def test_a_text_of_several_lines_is_one_caption(tmp_path, text):
    found = read_samples(manifest(tmp_path, table([("file_name", "caption"), ("a.jpg", text)]), ".csv"))
    assert [i.captions[0].text for i in found.images] == [text]
    rows = table([("file_name", "caption"), ("film", "like rows\nfilm 2,so")])
    assert "or quoting: csv, by which" in refusal(manifest(tmp_path, rows, ".csv"))
    found = read_samples(manifest(tmp_path, rows, ".csv", "quoting: csv\n"))
    assert [i.captions[0].text for i in found.images] == ["like rows\nfilm 2,so"]


def test_what_begins_with_a_quoted_word_is_said_how_to_write(tmp_path):
    text = 'file_name\tcaption\na.jpg\t"hi" he said\nb.jpg\tx\n'
    message = refusal(manifest(tmp_path, text, ".tsv"))
    assert "line 2: a text begins with a quotation mark and does not end with it" in message
    assert 'as """Hi"" he said", or set quoting: none, ' in message
    samples = read_samples(manifest(tmp_path, text, ".tsv"), skip=True)
    assert ([i.file_name for i in samples.images], len(samples.left_out)) == (["b.jpg"], 1)
    samples = read_samples(manifest(tmp_path, text, ".tsv", "quoting: none\n"))
    assert {i.captions[0].text for i in samples.images} == {'"hi" he said', "x"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n", "\n\n"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_every_line_end_ends_a_row_and_nothing_else_does(tmp_path, suffix, end):
    texts = [f"{n} \u2028a\x85b\x0bc\x0cd\u2029" for n in range(4)]
    rows = [(f"{n}.jpg", text) for n, text in enumerate(texts)]
    separator = "," if suffix == ".csv" else "\t"
    if suffix == ".jsonl":
        written = [json.dumps({"file_name": name, "caption": text}, ensure_ascii=False) for name, text in rows]
    else:
        written = [separator.join(row) for row in [("file_name", "caption"), *rows]]
    for last in ("", end):
        samples = read_samples(manifest(tmp_path, end.join(written) + last, suffix))
        assert sorted(caption.text for i in samples.images for caption in i.captions) == texts


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_other_encodings_are_refused(tmp_path, suffix, encoding):
    text = "file_name,caption\na.jpg,café\n".replace(",", "\t" if suffix == ".tsv" else ",")
    text = json.dumps({"file_name": "a.jpg", "caption": "café"}, ensure_ascii=False) if suffix == ".jsonl" else text
    assert "UTF-8" in refusal(manifest(tmp_path, text.encode(encoding), suffix))


def test_a_row_that_is_wrong_is_left_out_alone(tmp_path):
    text = HEADER + 'a.jpg,a bird\nb.jpg,one, two\nc.jpg\nd.jpg,"x" y\n../e.jpg,a bird\n,a bird\nf.jpg,a fish\n'
    samples = read_samples(manifest(tmp_path, text, ".csv"), skip=True)
    assert sorted(i.file_name for i in samples.images) == ["a.jpg", "f.jpg"]
    assert [int(one.split("line ")[1].split(":")[0]) for one in samples.left_out] == [3, 4, 5, 6, 7]
    text = lines([{"file_name": "a.jpg", "text": "a"}]) + '{"fi\n3\n{"file_name": "b.jpg"}\n{"text": "a"}\n'
    samples = read_samples(manifest(tmp_path, text + '{"file_name": "c.jpg", "text": "c"}', ".jsonl"), skip=True)
    assert sorted(i.file_name for i in samples.images) == ["a.jpg", "c.jpg"]
    assert len(samples.left_out) == 4


def test_validation_is_val_wherever_it_stands(tmp_path, caplog):
    folder = tmp_path / "in" / "validation"
    folder.mkdir(parents=True)
    (folder / "metadata.csv").write_text("file_name,caption\na.jpg,a bird\n")
    (tmp_path / "folders.yaml").write_text("name: birds\ndataset: in\n")
    row = {"file_name": "a.jpg", "caption": "a bird", "split": "validation"}
    valid, dev = ({**row, "split": name} for name in ("valid", "dev"))
    data = PackedData(tmp_path / "packed", count=1)
    data.as_tars(files=1)
    found = [
        karpathy(tmp_path / "1", [image(1, "validation")]),
        manifest(tmp_path / "2", table([row, row.values()]), ".csv"),
        *(manifest(tmp_path / each["split"], lines([each]), ".jsonl") for each in (row, valid, dev)),
        load_manifest(tmp_path / "folders.yaml"),
        load_manifest(data.manifest("t", tar={"validation": "shard-00.tar"})),
    ]
    for one in found:
        assert read_samples(one).splits == {"val": (0, 1)}
    assert "names no splits" not in caplog.text
    other = manifest(tmp_path / "4", lines([row]), ".jsonl", "merge_splits: {validation: test}\n")
    assert read_samples(other).splits == {"test": (0, 1)}


FOUND = '{"file_name": "a", "caption": "b", "split": "val"}\n'


@pytest.mark.parametrize(
    ("suffix", "text", "more", "phrase"),
    [
        (".json", '{"images": [', "", "this is not valid JSON (Expecting value: line 1 column 13"),
        (".json", '{"images": 1, "images": []}', "", "the key 'images' stands twice in a mapping"),
        (".jsonl", "", "", "it has no images"),
        (".jsonl", f"{FOUND}{{", "", "line 2: not valid JSON"),
        (".jsonl", "3\n", "", "line 1: not a mapping of columns to values"),
        (".jsonl", b'{"file_name": "\xff"}', "", "this is not UTF-8"),
        (".jsonl", '{"photo": "a", "en": "b"}', WIDE, "line 1: there is no column 'de'; it has 'photo', 'en': name"),
        (".jsonl", f'{FOUND}{{"text": "c"}}', "", "line 2: there is no column 'file_name'"),
        (".jsonl", '{"file_name": "a", "text": ["b", 3]}', "", "line 1 ('a'): the text is no text (3)"),
        (".jsonl", '{"file_name": "a", "text": []}', "", "line 1 ('a'): it has no caption; add one, or take the"),
        (".jsonl", '{"file_name": "a", "caption": "b", "split": 3}', "", "line 1 ('a'): the split 'split' is empty"),
        (".jsonl", FOUND + '{"file_name": "a", "caption": "b"}', "", "split of 'a' is 'none' here and 'val' before"),
        (".jsonl", FOUND + '{"file_name": "b", "caption": "b"}', "", "some, such as 'b', have none"),
        (".csv", "", "", "line 1: it names no columns"),
        (".csv", "file_name,text,text\na,b,c\n", "", "line 1: it names no columns, or two that are called the same"),
        (".csv", "photo,en\n", "", "line 1: there is no column 'file_name'; it has 'photo', 'en': name the right"),
        (".csv", "file_name;text\na;b\n", "", "it has 'file_name;text': name the right ones, or the separator"),
        (".csv", "file_name,text\na,b\n", 'separator: ";"\n', "it has 'file_name,text': name the right ones, or the"),
        (".csv", f"{','.join(f'c{n}' for n in range(99))}\n", "", "'c19', and 79 more: name the right ones"),
        (".tsv", "photo\ttext\na\tb\n", KEYS, "line 1: there is no column 'part'; it has 'photo', 'text': name"),
        (".csv", "file_name,caption\na.jpg,a bird, flying\n", "", "line 2: 3 fields where the header has 2; quote"),
        (".tsv", 'file_name\ttext\na\t"b\nc"\nd\te\tf\n', "", "line 4: 3 fields where the header has 2; quote a text"),
        (".csv", 'file_name,caption\na.jpg,"a "bird"\n', "", "line 2: a text begins with a quotation mark and does"),
        (".tsv", "file_name\ttext\n".encode("utf-16"), "", "this is not UTF-8"),
        (".csv", "file_name,caption\n,a bird\n", "", "line 2: the file name is missing"),
        (".csv", "photo,en,de,fr,part\na,,x,,train\nb,, ,,train\n", WIDE, "line 3 ('b'): it has no caption; add one"),
        (".csv", "photo,text,part\na,b,\n", KEYS, "line 2 ('a'): the split 'part' is empty"),
        (".csv", "file_name,caption,split\na,b,train\nb,b,val\na,c,test\n", "", "line 4: the split of 'a' is 'test'"),
    ],
)
def test_a_wrong_caption_file(tmp_path, suffix, text, more, phrase):
    assert phrase in refusal(manifest(tmp_path, text, suffix, more))


def test_a_caption_file_that_vanished(tmp_path):
    for suffix in (".json", ".csv"):
        gone = manifest(tmp_path, "", suffix)
        gone.captions.unlink()
        assert "there is no such file" in refusal(gone)


def test_rows_of_an_imagefolder_at_fault(tmp_path):
    data = PackedData(tmp_path / "data", count=6)
    path = data.as_imagefolder()
    file = data.folder / "images" / "val" / "metadata.jsonl"
    for text, phrase in (
        ('{"file_name": "../../a.png", "text": "t"}', "line 1: '../a.png' leaves the image folder"),
        ('{"file_name": "a.png", "text": null}', "line 1 ('val/a.png'): it has no caption"),
        ('{"file_name": "a.png", "text": "t"}\n' * 2, "line 1 already; remove one of them"),
    ):
        file.write_text(text)
        with pytest.raises(ManifestError) as caught:
            read_samples(load_manifest(path))
        assert phrase in str(caught.value)
