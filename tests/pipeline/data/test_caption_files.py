"""Caption files: what each form may hold, and what is answered to one that is wrong."""

import json

import pytest
from small_captions import image, karpathy, manifest, refusal

from xret.pipeline.data.samples import Caption, read_samples


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
    images[0]["split"] = "train"
    captions = [(ids[1], 30, "a bird ."), (ids[0], 31, "two birds"), (ids[1], 32, "a beak")]
    annotations = [{"image_id": image, "id": number, "caption": text} for image, number, text in captions]
    found = read_samples(manifest(tmp_path, json.dumps({"info": {}, "images": images, "annotations": annotations})))
    assert [(i.file_name, i.id, i.split) for i in found.images] == [
        ("a.jpg", str(ids[0]), "train"),
        ("b/c.jpg", str(ids[1]), "val"),
    ]
    assert [i.cocoid for i in found.images] == (list(ids) if ids == (7, 9) else [-1, -1])
    assert found.images[0].captions == (Caption("two birds", 31),)
    assert found.images[1].captions == (Caption("a bird .", 30), Caption("a beak", 32))


@pytest.mark.parametrize(
    ("images", "annotations", "said"),
    [
        (
            [{"id": 1, "file_name": "a.jpg"}],
            [{"image_id": 1, "bbox": []}],
            "annotations[0] has no 'caption'; take COCO's",
        ),
        (
            [{"id": 1, "file_name": "a.jpg"}],
            [{"image_id": [1], "caption": "a"}],
            "annotations[0] is of image [1], which",
        ),
        ([{"id": 1, "file_name": "a.jpg"}], [{"image_id": 2, "caption": "a"}], "is of image 2, which is not among"),
        ([{"id": 1, "file_name": "a.jpg"}], [], "images[0] ('a.jpg') has no sentences"),
        ([{"file_name": "a.jpg"}], [], "images[0] has no 'id', by which annotations name it"),
        ([{"id": True, "file_name": "a.jpg"}], [], "images[0]: 'id' is True, not a whole number"),
        ([{"id": 1}], [{"image_id": 1, "caption": "a"}], "images[0]: the file name is missing"),
        ([7], [], "images[0] is not a mapping"),
        (
            [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}],
            [{"image_id": 1, "caption": "a"}],
            "imgid 1",
        ),
    ],
)
def test_a_wrong_file_of_cocos_form(tmp_path, images, annotations, said):
    assert said in refusal(manifest(tmp_path, json.dumps({"images": images, "annotations": annotations})))


def test_annotations_beside_sentences_are_left_alone(tmp_path):
    plain = read_samples(karpathy(tmp_path / "one", [image(1, id=5)]))
    boxes = {"images": [image(1, id=5)], "annotations": [{"image_id": 5, "bbox": [0, 0, 1, 1]}]}
    assert read_samples(manifest(tmp_path / "two", json.dumps(boxes))) == plain
    named = [{"image_id": 5, "id": "u1", "caption": "a"}, {"image_id": 5, "id": "u2", "caption": "b"}]
    coco = {"images": [{"id": 5, "file_name": "5.jpg"}], "annotations": named}
    (found,) = read_samples(manifest(tmp_path / "three", json.dumps(coco))).images
    assert found.captions == (Caption("a", 0), Caption("b", 1))


def test_flickr_style_has_no_folder_and_no_coco_numbers(tmp_path):
    samples = read_samples(karpathy(tmp_path, [image(7), image(8, "val", ["b", "c"])]))
    assert [(i.file_name, i.cocoid) for i in samples.images] == [("7.jpg", -1), ("8.jpg", -1)]


def test_without_ids_the_file_name_and_running_numbers_serve(tmp_path):
    images = [
        {"filename": "b.jpg", "split": "val", "sentences": [{"tokens": ["two", "birds"]}]},
        {"filename": "./a//b/../c.jpg", "split": "train", "sentences": [{"raw": "x"}, {"raw": "y", "sentid": 9}]},
    ]
    samples = read_samples(karpathy(tmp_path, images))
    assert [i.id for i in samples.images] == [i.file_name for i in samples.images] == ["a/c.jpg", "b.jpg"]
    assert samples.images[0].captions == (Caption("x", 1), Caption("y", 2))
    assert samples.images[1].captions == (Caption("two birds", 0),)


def test_regions_and_what_else_an_image_carries_are_left_alone(tmp_path):
    region = {"bbox": [0, 0, 5, 5], "phrase": "a beak", "class": "beak"}
    plain = read_samples(karpathy(tmp_path / "one", [image(1)]))
    assert plain == read_samples(karpathy(tmp_path / "two", [image(1, regions=[region], license=4)]))


def test_csv_and_jsonl_say_the_same(tmp_path):
    rows = [
        ("b.jpg", 'A "quoted", long\ncaption', "test"),
        ("sub/a.jpg", "Vögel · 鳥", "train"),
        ("b.jpg", "", "test"),
        ("c.jpg", ".", "train"),
    ]
    quoted = "\r\n".join(",".join('"' + field.replace('"', '""') + '"' for field in row) for row in rows)
    lines = "\n\n".join(json.dumps(dict(zip(("file_name", "caption", "split"), row, strict=True))) for row in rows)
    one = read_samples(manifest(tmp_path / "csv", f"\ufefffile_name,caption,split\r\n{quoted}\r\n\r\n", ".csv"))
    two = read_samples(manifest(tmp_path / "jsonl", f"\ufeff{lines}\n", ".jsonl"))
    assert one == two
    assert one.splits == {"train": (0, 2), "test": (2, 3)}
    assert [i.id for i in one.images] == ["sub/a.jpg", "c.jpg", "b.jpg"]
    assert one.images[2].captions == (Caption('A "quoted", long\ncaption', 0), Caption("", 1))
    assert one.images[0].captions == (Caption("Vögel · 鳥", 2),)
    assert [i.cocoid for i in one.images] == [-1, -1, -1]


def test_columns_may_stand_in_any_order(tmp_path):
    samples = read_samples(manifest(tmp_path, "split,caption,file_name\nval,a bird,x.jpg\n", ".csv"))
    assert (samples.images[0].file_name, samples.images[0].split) == ("x.jpg", "val")


def without(mapping, *keys):
    return {key: value for key, value in mapping.items() if key not in keys}


NO_SPLIT = without(image(2), "split")
ALIEN = image(1, texts=["a", "b"])
ALIEN["sentences"][1]["imgid"] = 5


@pytest.mark.parametrize(
    ("images", "phrase"),
    [
        ([], "it has no images"),
        ("text", "this is not a Karpathy JSON, it has no list 'images'"),
        (["text"], "images[0] is not a mapping"),
        ([image(1), without(image(2), "filename")], "images[1]: the file name is missing"),
        ([image(1, filename=" ")], "images[0]: the file name is missing"),
        ([image(1, filename=3)], "images[0]: the file name is missing"),
        ([image(1, filepath=3)], "images[0]: 'filepath' is not a text"),
        ([image(1, filename="../1.jpg")], "images[0]: '../1.jpg' leaves the image folder"),
        ([image(1, filename="a/../../1.jpg")], "'../1.jpg' leaves the image folder"),
        ([image(1, filename="/etc/1.jpg")], "'/etc/1.jpg' leaves the image folder"),
        ([image(1, filename="/etc/1.jpg", filepath="val2014")], "'/etc/1.jpg' leaves the image folder"),
        ([image(1, filename="//etc/1.jpg")], "leaves the image folder"),
        ([image(1, filepath="/etc")], "'/etc/1.jpg' leaves the image folder"),
        ([image(1, filepath="a/../..")], "'../1.jpg' leaves the image folder"),
        ([image(1, filepath="a", filename="../../x/1.jpg")], "'../x/1.jpg' leaves the image folder"),
        ([image(1, filename="..")], "'..' leaves the image folder"),
        ([image(1, filename="a/..")], "'.' leaves the image folder"),
        ([image(1, filename="a\\1.jpg")], "is not a path with forward slashes"),
        ([image(1, filename="a\0.jpg")], "is not a path with forward slashes"),
        ([image(1), image(2, filename="1.jpg")], "images[1]: images[0] has the file '1.jpg' already"),
        ([image(1), image(2, filename="x/../1.jpg")], "images[1]: images[0] has the file '1.jpg' already"),
        ([image(1), image(1, filename="2.jpg")], "images[1]: images[0] has the imgid 1 already"),
        ([image(1, sentences=[])], "images[0] ('1.jpg') has no sentences"),
        ([without(image(1), "sentences")], "images[0] ('1.jpg') has no sentences"),
        ([image(1, sentences=["a bird"])], "sentences[0] has neither 'raw' nor 'tokens'"),
        ([image(1, sentences=[{"raw": None, "tokens": [3]}])], "sentences[0] has neither 'raw' nor 'tokens'"),
        ([ALIEN], "sentences[1] is of imgid 5, not 1"),
        ([image(1, sentences=[{"raw": "a", "sentid": "x"}])], "'sentid' is 'x', not a whole number"),
        ([image(1, cocoid=2**63)], "'cocoid' is 9223372036854775808, not a whole number of 64 bits"),
        ([image(1, cocoid=True)], "'cocoid' is True, not a whole number"),
        ([image(1, imgid=1.5, sentences=[{"raw": "a"}])], "'imgid' is neither a whole number nor a text"),
        ([image(1, imgid="", sentences=[{"raw": "a"}])], "'imgid' is neither a whole number nor a text"),
        ([image(1, split="")], "images[0] ('1.jpg'): the split is empty or not a text"),
        ([image(1, split=None)], "the split is empty or not a text"),
        ([image(1), NO_SPLIT], "some images have a split and some, such as '2.jpg', have none"),
        ([image(1, texts=["\ud800"])], "image '1.jpg' has half of a character pair"),
    ],
)
def test_a_wrong_karpathy_file(tmp_path, images, phrase):
    assert phrase in refusal(karpathy(tmp_path, images))


@pytest.mark.parametrize(
    ("suffix", "text", "phrase"),
    [
        (".json", "", "this is not valid JSON"),
        (".json", '{"images": [', "this is not valid JSON (Expecting value: line 1 column 13"),
        (".json", b"\xff\xff\xff", "this is not valid JSON"),
        (".json", "[" * 100_000, "this is not valid JSON"),
        (".json", '{"images": 1, "images": []}', "this is not valid JSON (the key 'images' stands twice in a mapping)"),
        (".json", "[]", "this is not a Karpathy JSON, it has no list 'images'; convert it"),
        (".jsonl", "", "it has no images"),
        (".jsonl", '{"file_name": "a", "caption": "b"}\n{', "line 2: not valid JSON"),
        (".jsonl", "3\n", "line 1: not a mapping of columns to values"),
        (".jsonl", b'{"file_name": "\xff"}', "this is not UTF-8"),
        (
            ".jsonl",
            '{"filename": "a.jpg", "caption": "b"}',
            "line 1: there is no column 'file_name'; it has 'filename', 'caption': name the right ones as image_column",
        ),
        (".jsonl", '{"file_name": "a.jpg"}', "line 1: there is no column 'caption'; it has 'file_name'"),
        (".jsonl", '{"file_name": "a.jpg", "caption": 3}', "line 1: a caption is no text"),
        (".jsonl", '{"file_name": 3, "caption": "a bird"}', "line 1: the file name is missing"),
        (".jsonl", '{"file_name": "a", "caption": "b", "split": 3}', "line 1: the split is empty or not a text"),
        (".csv", "", "line 1: it is empty, and the first line names the columns"),
        (".csv", "file_name,caption,split\n", "it has no images"),
        (".csv", "a.jpg,a bird\n", "line 1: there is no column 'file_name'; it has 'a.jpg', 'a bird'"),
        (".csv", "file_name,caption,splitt\na,b,c\n", "line 1: there is no column 'split', and one called 'splitt'"),
        (".csv", "file_name,caption,caption\na,b,c\n", "line 1: two columns are called 'caption'"),
        (".csv", "file_name,caption\na.jpg,a bird, flying\n", "line 2: 3 fields where the header has 2; quote"),
        (".csv", "file_name,caption\na.jpg\n", "line 2: 1 fields where the header has 2"),
        (".csv", 'file_name,caption\na.jpg,"a "bird"\n', "line 2: not valid CSV"),
        (".csv", 'file_name,caption\na.jpg,"open\n', "not valid CSV"),
        (".csv", b"file_name,caption\na.jpg,\xe4\n", "this is not UTF-8"),
        (".csv", "file_name,caption\n,a bird\n", "line 2: the file name is missing"),
        (".csv", "file_name,caption\n../a.jpg,a bird\n", "line 2: '../a.jpg' leaves the image folder"),
        (".csv", "file_name,caption\n/a.jpg,a bird\n", "line 2: '/a.jpg' leaves the image folder"),
        (".csv", "file_name,caption,split\na.jpg,b,\n", "line 2: the split is empty"),
        (
            ".csv",
            "file_name,caption,split\na.jpg,b,train\nb.jpg,b,val\na.jpg,c,test\n",
            "line 4: the split of 'a.jpg' is 'test' here and 'train' before; give it one split",
        ),
        (
            ".jsonl",
            '{"file_name": "a", "caption": "b", "split": "val"}\n{"file_name": "a", "caption": "b"}',
            "line 2: the split of 'a' is 'none' here and 'val' before",
        ),
        (
            ".jsonl",
            '{"file_name": "a", "caption": "b", "split": "val"}\n{"file_name": "b", "caption": "b"}',
            "some images have a split and some, such as 'b', have none",
        ),
    ],
)
def test_a_wrong_caption_file(tmp_path, suffix, text, phrase):
    assert phrase in refusal(manifest(tmp_path, text, suffix))


def test_a_caption_file_that_vanished(tmp_path):
    for suffix in (".json", ".csv"):
        gone = manifest(tmp_path, "", suffix)
        gone.captions.unlink()
        assert "the caption file cannot be read (No such file or directory)" in refusal(gone)
