"""Embeddings that others computed: every value arrives, every fault is a sentence, stopping loses nothing."""

import json
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest
from embedding_sources import WIDTH, Pairs
from memory import peak_of
from pyarrow import parquet

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, ManifestError, SampleError
from xret.pipeline.exchange.importers.source import ImportOptions, SourceError
from xret.pipeline.exchange.importing import import_features
from xret.pipeline.store import FeatureCache, create
from xret.pipeline.store.inspect import describe, verify


def bring(source, url, manifest=None, encoder=("ViT-B/32",), **options):
    """Import and return summary and cache."""
    manifest = None if manifest is None else load_manifest(manifest)
    summary = import_features(manifest, str(url), ImportOptions("embeddings", source, encoder=encoder, **options))
    return summary, FeatureCache.open(str(url))


def refused(sentence, *source, error=SourceError, **options):
    """Assert that an import is refused."""
    with pytest.raises(error, match=sentence):
        bring(*source, **options)


def assert_holds(cache, names, texts, images, captions):
    """Compare both sets with the pairs: `images` by name, `captions` by text, value by value."""
    assert verify(cache.url).ok
    of_images, of_captions = cache.image_set(), cache.caption_set()
    assert (of_images.kind, of_captions.kind) == ("global", "global")
    assert of_images.array_names == of_captions.array_names == ["global", "status"]
    by_name, by_text = dict(zip(names, images, strict=True)), dict(zip(texts, captions, strict=True))
    expected = np.stack([by_name[name] for name in cache.file_names(0, cache.images)])
    assert np.array_equal(of_images.global_(np.arange(cache.images)), expected.astype(of_images.dtype))
    expected = np.stack([by_text[text] for text in cache.caption_texts(0, cache.captions)])
    assert np.array_equal(of_captions.global_(np.arange(cache.captions)), expected.astype(of_captions.dtype))


def manifest_of(folder, rows):
    """Write a manifest of JSON lines, whose rows are names with captions and splits."""
    lines = [json.dumps(dict(zip(("file_name", "caption", "split"), row, strict=True))) for row in rows]
    (folder / "c.jsonl").write_text("\n".join(lines))
    (folder / "m.yaml").write_text("name: own\nimages: .\ncaptions: c.jsonl\n")
    return folder / "m.yaml"


def in_test(names, texts):
    return zip(names, texts, ["test"] * len(names), strict=True)


@pytest.mark.parametrize("column", ["split", "Split"])
def test_a_split_column_of_clip_retrieval_counts(tmp_path, column):
    pairs = Pairs()
    source = pairs.clip_retrieval(tmp_path / "e", parts=1)
    (path,) = (source / "metadata").glob("*.parquet")
    table = parquet.read_table(path)
    splits = ["train"] * (len(table) - 20) + ["test"] * 20
    parquet.write_table(table.append_column(column, pa.array(splits)), path)
    _, cache = bring(source, tmp_path / "s")
    assert {name: last - first for name, (first, last) in cache.splits.items()} == {
        "train": len(set(pairs.names[:-20])),
        "test": len(set(pairs.names[-20:])),
    }
    parquet.write_table(table.append_column(column, pa.array([None] * len(table), pa.string())), path)
    refused(rf"the split '{column}' is empty or no text", source, tmp_path / "t", error=ManifestError)


def test_numbers_of_parquet_are_names(tmp_path):
    pairs = Pairs()
    source = pairs.clip_retrieval(tmp_path / "e", parts=1)
    (path,) = (source / "metadata").glob("*.parquet")
    parquet.write_table(pa.table({"key": range(120), "caption": pairs.texts}), path)
    assert_holds(bring(source, tmp_path / "s")[1], [*map(str, range(120))], pairs.texts, pairs.images, pairs.captions)


@pytest.mark.parametrize("name", ["{}/0.parquet", "split={}/0.parquet", "{}-00000-of-00001.parquet"])
def test_files_and_folders_that_are_called_as_splits_say_the_split(tmp_path, name):
    pairs, there = Pairs(), {}
    for split, rows in zip(("train", "validation", "test"), np.array_split(np.arange(120), 3), strict=True):
        path = tmp_path / "e" / name.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {"file_name": [pairs.names[k] for k in rows], "caption": [pairs.texts[k] for k in rows]}
        for side, matrix in (("image", pairs.images), ("text", pairs.captions)):
            table[side] = pa.FixedShapeTensorArray.from_numpy_ndarray(matrix[rows])
        parquet.write_table(pa.table(table), path)
        there[split.replace("idation", "")] = table["file_name"]
    _, cache = bring(tmp_path / "e", tmp_path / "s")
    assert {split: cache.file_names(*rows) for split, rows in cache.splits.items()} == there
    assert_holds(cache, pairs.names, pairs.texts, pairs.images, pairs.captions)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("flat", [False, True])
def test_the_folder_of_clip_retrieval(tmp_path, capsys, caplog, dtype, flat):
    pairs = Pairs(dtype=dtype)
    source = pairs.clip_retrieval(tmp_path / "e", parts=11, flat=flat)
    summary, cache = bring(source, tmp_path / "s", dtype=np.dtype(dtype).name)
    assert_holds(cache, pairs.names, pairs.texts, pairs.images, pairs.captions)
    assert [one.samples for one in summary.sets] == [120, 120]
    assert [one.name.split("@")[0] for one in summary.sets] == ["vit-b-32", "vit-b-32"]
    assert cache.image_set().space == cache.caption_set().space == "ViT-B/32"
    assert cache.image_set().identity["encoder"] == "ViT-B/32"
    assert set(cache.image_set().identity["files"]) > (
        {"img_emb_00.npy"} if flat else {"img_emb/img_emb_00.npy", "metadata/metadata_10.parquet"}
    )
    said = capsys.readouterr().err
    assert "names no splits" in caplog.text
    assert all(f"{one.name}: 120/120" in said for one in summary.sets)
    assert [one["shape"] for one in describe(cache.url)["sets"]] == [(WIDTH,), (WIDTH,)]


@pytest.mark.parametrize("root", ["/data/pictures/", "../data/", "./"])
def test_paths_from_elsewhere_become_names_below_the_common_folder(tmp_path, root):
    pairs = Pairs()
    _, cache = bring(pairs.clip_retrieval(tmp_path / "e", root=root), tmp_path / "s")
    assert_holds(cache, pairs.names, pairs.texts, pairs.images, pairs.captions)


@pytest.mark.parametrize("outside", ["../a.jpg", "/a.jpg"])
def test_paths_without_a_common_folder_are_refused(tmp_path, outside):
    pairs = Pairs(30)
    pairs.names[0] = outside
    sentence = f"'{outside}' leads out of the folder of the other pictures"
    refused(sentence, pairs.folder(tmp_path / "e"), tmp_path / "s")


@pytest.mark.parametrize("index", ["csv", "jsonl"])
@pytest.mark.parametrize("by", ["image", "line"])
def test_a_folder_of_two_matrices_and_an_index(tmp_path, index, by):
    pairs = Pairs(40, np.float32)
    owners = np.random.default_rng(1).integers(10, size=40)
    owners[:10] = np.arange(10)[::-1]
    names = [f"{owner}.jpg" for owner in owners]
    of_image = pairs.images[:10]
    in_order = list(dict.fromkeys(names))
    pairs.images = of_image[owners] if by == "line" else np.stack([of_image[int(name[:-4])] for name in in_order])
    splits = [("train", "val", "test")[owner % 3] for owner in owners]
    source = pairs.folder(tmp_path / "e", list(zip(names, pairs.texts, strict=True)), index, splits)
    _, cache = bring(source, tmp_path / "s", dtype="float32")
    assert_holds(cache, [f"{k}.jpg" for k in range(10)], pairs.texts, of_image, pairs.captions)
    assert {name: last - first for name, (first, last) in cache.splits.items()} == {"train": 4, "val": 3, "test": 3}


def test_two_models_have_no_common_space_and_may_differ_in_width(tmp_path):
    pairs = Pairs(splits := 30)
    pairs.captions = pairs.captions[:, :8]
    source = pairs.folder(tmp_path / "e", splits=["train", "test"] * (splits // 2))
    refused(r"are 16 wide and the captions' 8.*`encoder=IMAGES,CAPTIONS`", source, tmp_path / "s")
    _, cache = bring(source, tmp_path / "s", encoder=("dinov2", "minilm"))
    assert cache.image_set("dinov2").space is cache.caption_set("minilm").space is None
    assert cache.caption_set().global_(np.arange(3)).shape == (3, 8)


def test_a_manifest_says_which_samples_count(tmp_path):
    pairs = Pairs(40)
    rows = [(pairs.names[k], pairs.texts[k], "train" if k < 20 else "test") for k in range(30)]
    manifest = manifest_of(tmp_path, rows)
    source = pairs.clip_retrieval(tmp_path / "e")
    summary, cache = bring(source, tmp_path / "s", manifest=manifest)
    assert_holds(cache, pairs.names, pairs.texts, pairs.images, pairs.captions)
    assert (summary.dataset, summary.matched_by, summary.unmatched) == ("own", "id", 10)
    manifest_of(tmp_path, [*rows, (pairs.names[0], "another caption", "train"), ("else.jpg", "none", "test")])
    with pytest.raises(SourceError, match=r"lacks 1 of 11 images of split 'test' of 'own', .*'else.jpg'; `on_error`"):
        bring(source, tmp_path / "t", manifest=manifest)
    summary, cache = bring(source, tmp_path / "t", manifest=manifest, on_error="skip")
    assert [one.failed for one in summary.sets] == [1, 2]
    assert verify(cache.url).ok


def test_nan_stops_or_is_recorded(tmp_path):
    pairs = Pairs(60)
    pairs.images[25, 3] = np.nan
    pairs.captions[7, 0] = np.inf
    source = pairs.clip_retrieval(tmp_path / "e")
    with pytest.raises(SampleError, match=r"00002/000000025.jpg: row 5 of img_emb_01.npy holds NaN or infinity"):
        bring(source, tmp_path / "s")
    summary, cache = bring(source, tmp_path / "s", on_error="skip")
    assert [one.failed for one in summary.sets] == [1, 1]
    assert "caption number 7: row 7 of text_emb_00.npy" in summary.sets[1].reasons[0]
    assert verify(cache.url).ok


def test_captions_that_failed_are_counted_one_by_one(tmp_path):
    pairs = Pairs(16)
    owners = np.repeat(np.arange(8), 2)
    lost = [2, 3, 9]  # both captions of image 1, and the second of image 4
    pairs.captions[lost] = np.nan
    pairs.images = pairs.images[:8]
    lines = [(f"{owner}.jpg", text) for owner, text in zip(owners, pairs.texts, strict=True)]
    source = pairs.folder(tmp_path / "e", lines, splits=["train"] * 12 + ["test"] * 4)
    summary, cache = bring(source, tmp_path / "s", on_error="skip")
    _, captions = summary.sets
    assert (captions.samples, captions.failed, len(captions.reasons)) == (13, 3, 3)
    assert len(verify(cache.url).failed_samples) == 3
    assert describe(cache.url)["sets"][1]["failed"] == 3
    again, _ = bring(source, tmp_path / "s", on_error="skip")
    assert (again.sets[1].failed, len(again.sets[1].reasons)) == (3, 3)
    kept, features = np.delete(np.arange(16), lost), cache.caption_set()
    assert np.flatnonzero(features.status == 0).tolist() == kept.tolist()
    assert np.array_equal(features.global_(kept), pairs.captions[kept])


def keep_other_parts(source):
    for kind, number in (("img_emb", 0), ("text_emb", 1), ("metadata", 1)):
        for path in set(source.glob(f"{kind}/*")) - set(source.glob(f"{kind}/*_{number:02d}.*")):
            path.unlink()


def change(kind, number, edit):
    def fault(source):
        path = next(source.glob(f"{kind}/{kind}_{number:02d}.*"))
        if kind == "metadata":
            parquet.write_table(edit(parquet.read_table(path)), path)
        else:
            np.save(path, edit(np.load(path)))

    return fault


def cut(kind):
    def fault(source):
        path = next(source.glob(f"{kind}/{kind}_00.*"))
        path.write_bytes(path.read_bytes()[:-9])

    return fault


FAULTS = {
    "rows differ": (change("img_emb", 1, lambda m: m[:-1]), r"metadata_01.parquet has 20 rows, .* 19 images and 20"),
    "another width": (change("text_emb", 1, lambda m: m[:, :5]), r"text_emb_01.npy is 5 wide and text_emb_00.npy 16"),
    "whole numbers": (change("img_emb", 0, lambda m: (9 * m).astype(np.int8)), r"is int8 20 x 16, not floats in 2"),
    "one vector": (change("img_emb", 0, lambda m: m[0]), r"is float16 16, not floats in 2"),
    "objects": (change("img_emb", 0, lambda m: m.astype(object)), r"img_emb_00.npy is no array of numbers, or was"),
    "no texts": (lambda s: shutil.rmtree(s / "text_emb"), r"lacks captions or text_emb; complete"),
    "a part is missing": (
        lambda source: (source / "text_emb/text_emb_01.npy").unlink(),
        r"lacks part 1 of captions; complete",
    ),
    "no captions": (
        change("metadata", 0, lambda t: t.drop(["caption"])),
        r"no column 'caption'; it has 'image_path', 'sim",
    ),
    "numbers": (
        change("metadata", 0, lambda t: t.set_column(1, "caption", pa.array(range(20)))),
        r"metadata_00.parquet: row 0 \('00000/000000000.jpg'\): the caption is no text \(0\)",
    ),
    "a null": (
        change("metadata", 1, lambda t: t.set_column(1, "caption", pa.array(["a"] * 19 + [None]))),
        r"metadata_01.parquet: row 19 \('00003/000000039.jpg'\): it has no caption.*or go on with `on_error` skip",
    ),
    "one name": (
        change("metadata", 1, lambda t: t.set_column(0, "image_path", pa.array(["x.jpg"] * 20))),
        r"row 0 of img_emb_01.npy and row 1 of img_emb_01.npy are of 'x.jpg' and differ",
    ),
    "parts of other numbers": (
        keep_other_parts,
        r"lacks part 1 of images, part 0 of captions, part 0 of index; complete",
    ),
    "two files": (
        lambda s: shutil.copy(s / "img_emb/img_emb_01.npy", s / "img_emb/img_emb_1.npy"),
        "are the same part; remove one",
    ),
    "cut npy": (cut("img_emb"), r"img_emb_00.npy is no array of numbers, or was cut off"),
    "cut parquet": (cut("metadata"), r"metadata_00.parquet: this cannot be read \(Parquet magic bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_clip_retrieval(tmp_path, fault):
    make, sentence = FAULTS[fault]
    source = Pairs(60).clip_retrieval(tmp_path / "e")
    make(source)
    refused(sentence, source, tmp_path / "s", error=(SourceError, ManifestError))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("layout", ["npy", "parquet", "parquet_npy", "parquet_npy_beside", "table"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_layouts_of_embedding_reader(tmp_path, layout, dtype):
    pairs = Pairs(dtype=dtype)
    source = pairs.embedding_reader(tmp_path / "e", layout)
    _, cache = bring(source, tmp_path / "s", dtype=np.dtype(dtype).name)
    assert_holds(cache, pairs.names, pairs.texts, pairs.images, pairs.captions)
    assert len(cache.image_set().identity["files"]) == {"npy": 4, "table": 3}.get(layout, 6)


def test_parts_whose_order_is_not_that_of_their_names_need_an_index_in_parts(tmp_path):
    pairs = Pairs(44)
    refused("leading zeros", pairs.embedding_reader(tmp_path / "e", "npy", parts=11), tmp_path / "s")
    _, cache = bring(pairs.embedding_reader(tmp_path / "f", "parquet_npy", parts=11), tmp_path / "s")
    assert_holds(cache, pairs.names, pairs.texts, pairs.images, pairs.captions)


def test_the_shards_of_datacomp(tmp_path, caplog):
    pairs = Pairs()
    pairs.names = [f"{k * 7919:032x}" for k in range(120)]
    source = pairs.datacomp(tmp_path / "e")
    refused("b32_txt.*; name those of images and captions, as `arrays` image=l14_img", source, tmp_path / "s")
    l14, b32 = ({"image": f"{model}_img", "text": f"{model}_txt"} for model in ("l14", "b32"))
    bring(source, tmp_path / "s", arrays=l14, encoder=("ViT-L/14",))
    assert_holds(cache := FeatureCache.open(tmp_path / "s"), pairs.names, pairs.texts, pairs.images, pairs.captions)
    assert "nothing reads clip_l14_similarity_score, face_bboxes" in caplog.text
    bring(source, tmp_path / "s", arrays=b32)
    images = cache.image_set("vit-b-32").global_(np.arange(120))
    assert np.array_equal(images, -cache.image_set("vit-l-14").global_(np.arange(120))[:, :8])


def test_images_and_captions_have_vectors_of_their_own(tmp_path):
    source = Pairs().datacomp(tmp_path / "e")
    refused(
        "'l14_img' cannot be the vectors of images and of", source, tmp_path / "s", arrays=dict(SHARD, text="l14_img")
    )


SHARD = {"image": "l14_img", "text": "l14_txt"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"l14_img": None}, r"0002.npz has the vectors l14_txt, dedup, .*; name those of images and captions"),
        (
            {"l14_img": np.zeros((39, 16), np.float16)},
            r"0002.parquet has 40 rows, .* 39 images and 40 captions; they do",
        ),
        ({"l14_txt": np.zeros((40, 16), np.int8)}, r"0002.npz: 'l14_txt' is int8 40 x 16, not floats in 2 dimensions"),
        ({"l14_txt": np.zeros(40, np.float16)}, r"'l14_txt' is float16 40, not floats in 2 dimensions"),
        ({"l14_txt": np.zeros((40, 8), np.float16)}, r"0002.npz is 8 wide and 0{32}.npz 16"),
        ({"l14_txt": np.array([["a"]], object)}, r"'l14_txt' is object 1 x 1, not floats"),
        (".parquet", r"0{31}1.npz has no 0{31}1.parquet beside it; complete the folder"),
        (".npz", r"0{31}1.parquet has no 0{31}1.npz beside it; complete the folder"),
        ("cut", r"0{31}1.npz: this cannot be read .*; copy it again"),
        ("uid", r"there is no column 'file_name'"),
    ],
)
def test_faults_of_datacomp(tmp_path, changed, sentence):
    source = Pairs().datacomp(tmp_path / "e", **(changed if isinstance(changed, dict) else {}))
    shard = source / f"{1:032x}.npz"
    if changed in (".parquet", ".npz"):
        shard.with_suffix(changed).unlink()
    elif changed == "cut":
        shard.write_bytes(shard.read_bytes()[:-200])
    elif changed == "uid":
        for path in source.glob("*.parquet"):
            parquet.write_table(parquet.read_table(path, columns=["text"]), path)
    refused(sentence, source, tmp_path / "s", arrays=SHARD, error=(SourceError, ManifestError))
    assert not (tmp_path / "s").exists()


def test_vectors_of_parquet_that_are_null_or_of_another_width(tmp_path):
    pairs, row = Pairs(30), np.zeros(16, np.float16)
    source = pairs.embedding_reader(tmp_path / "e", "table", parts=1)
    (path,) = source.glob("*.parquet")
    table = parquet.read_table(path)
    for value, sentence in (
        (None, r"row 20 of part-0.parquet holds NaN"),
        (row[:9], r"has 9 numbers in row 20, and 16"),
    ):
        values = [*table["image_embedding"].to_pylist()]
        values[20] = value if value is None else value.tolist()
        column = pa.array(values, table.schema.field("image_embedding").type)
        parquet.write_table(table.set_column(2, "image_embedding", column), path, row_group_size=7)
        refused(sentence, source, tmp_path / "s", error=(SampleError, SourceError))
        if value is None:
            summary, _ = bring(source, tmp_path / "t", on_error="skip")
            assert [of_side.failed for of_side in summary.sets] == [1, 0]


HEAD = "file_name,caption,split\n"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("index.csv", None, r"lacks index or metadata; complete it: images, captions and index"),
        ("index.jsonl", "", r"are the same part; remove one"),
        ("index.csv", "file,text\na,b\n", r"index.csv: line 1: there is no column 'file_name'"),
        ("index.csv", HEAD, r"index.csv 0 captions of 0 images"),
        ("index.csv", f"{HEAD}a,b,\n", r"line 2 \('a'\): the split 'split' is empty"),
        (
            "index.csv",
            f"""{HEAD}a,"['b', 'c']",val\n""",
            r"index.csv: the captions are lists, and an embedding is of one",
        ),
        ("index.csv", f"{HEAD},b,val\n", r"line 2: the file name is missing"),
        (
            "index.csv",
            f"{HEAD}a,b,val\na,c,test\n" + "b,d,val\n" * 28,
            r"pair 1: the split of 'a' is 'test' here and 'val' before",
        ),
        ("index.csv", f"{HEAD}a,b,val\n", r"captions.npy 30, and .*index.csv 1 captions of 1 images; an image has a r"),
        ("images.npy", None, "lacks images or img_emb"),
    ],
)
def test_faults_of_a_folder(tmp_path, name, text, sentence):
    pairs = Pairs(30)
    pairs.images[:] = 0
    source = pairs.folder(tmp_path / "e")
    (source / name).unlink(missing_ok=True)
    if text is not None:
        (source / name).write_text(text)
    refused(sentence, source, tmp_path / "s", error=(SourceError, ManifestError))
    assert not (tmp_path / "s").exists()


def test_options_that_are_missing_or_of_no_use(tmp_path, monkeypatch):
    source = Pairs(30).clip_retrieval(tmp_path / "e")
    with pytest.raises(SourceError, match="needs the name of the model that made the features, as `encoder` ViT-B/32"):
        bring(source, tmp_path / "s", encoder=())
    refused("`arrays` names arrays of .npz and .parquet", source, tmp_path / "s", arrays={"image": "x"})
    refused("no image in split dev", source, tmp_path / "s", splits=("dev",), error=CacheError)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"needs pyarrow; install with `pip install 'xret\[parquet\]'`", source, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def bring_in_small_chunks(source, store):
    create.GLOBAL_CHUNK_BYTES = 1 << 19
    bring(source, store)


def test_memory_does_not_grow_with_the_matrices(tmp_path):
    def made(width):
        pairs = Pairs(600, np.float32)
        pairs.images = pairs.captions = np.ones((600, width), np.float32)
        return pairs.folder(tmp_path / f"e{width}", splits=["train"] * 600), tmp_path / f"s{width}"

    peak = peak_of(bring_in_small_chunks, made(16), made(8192))
    assert peak < 600 * 8192 * 4  # half of both matrices; a chunk has a twentieth of their rows


def test_an_index_whose_captions_are_of_other_images_is_refused(tmp_path):
    pairs = Pairs(20)
    manifest = manifest_of(tmp_path, in_test(pairs.names, pairs.texts[1:] + pairs.texts[:1]))
    with pytest.raises(SourceError, match=r"'caption number 0', but the image '00000/000000000\.jpg'"):
        bring(pairs.folder(tmp_path / "e"), tmp_path / "s", manifest, on_error="skip")


def test_two_lines_of_one_caption_with_other_embeddings_are_refused(tmp_path):
    pairs = Pairs(20)
    manifest = manifest_of(tmp_path, in_test(pairs.names, pairs.texts))
    lines = list(zip(pairs.names, pairs.texts, strict=True))
    pairs.images, pairs.captions = (np.concatenate([one, one[:1]]) for one in (pairs.images, pairs.captions))
    source = pairs.folder(tmp_path / "e", [*lines, lines[0]])
    bring(source, tmp_path / "s", manifest, splits=("test",))
    pairs.captions[-1] *= -1
    source = pairs.folder(tmp_path / "f", [*lines, lines[0]])
    refused("'caption number 0' more than once", source, tmp_path / "t", manifest, splits=("test",))


@pytest.mark.parametrize("form", ["clip-retrieval", "embeddings"])
def test_rows_without_a_caption_are_left_out_with_their_features(tmp_path, caplog, form):
    pairs = Pairs(120)
    texts = list(pairs.texts)
    pairs.texts[7] = pairs.texts[80] = None
    place = tmp_path / "e"
    source = pairs.clip_retrieval(place) if form == "clip-retrieval" else pairs.folder(place, index="jsonl")
    refused("`on_error` skip", source, tmp_path / "s", error=(SourceError, ManifestError))
    _, cache = bring(source, tmp_path / "s", on_error="skip")
    assert cache.images == cache.captions == 118
    assert_holds(cache, pairs.names, texts, pairs.images, pairs.captions)
    assert len(cache.left_out) == 2
    assert "2 rows left out: row 7 of " in caplog.text


def test_a_line_of_which_a_caption_is_left_out_is_counted_once(tmp_path):
    pairs = Pairs(4)
    lines = list(zip(pairs.names, pairs.texts, strict=True))
    source = pairs.folder(tmp_path / "e", [lines[0], (pairs.names[1], ["a", 5]), *lines[2:]], "jsonl")
    _, cache = bring(source, tmp_path / "s", on_error="skip")
    assert cache.images == cache.captions == 3
    assert_holds(cache, pairs.names, pairs.texts, pairs.images, pairs.captions)


def test_rows_of_images_whose_order_a_line_that_is_left_out_may_decide(tmp_path):
    pairs = Pairs(4)
    pairs.images = pairs.images[:2]  # of a and b, as the first two lines name them
    lines = [("a.jpg", None), *((name, text) for name, text in zip("bab", pairs.texts[1:], strict=True))]
    source = pairs.folder(tmp_path / "e", lines, "jsonl")
    refused("row 0 of captions.npy has no .* order", source, tmp_path / "s", on_error="skip")


def test_small_embeddings_of_one_name_are_told_apart(tmp_path):
    pairs = Pairs(4, np.float32)
    pairs.images *= 1e-3
    source = pairs.folder(tmp_path / "e", [("a.jpg", text) for text in pairs.texts])
    refused("are of 'a.jpg' and differ", source, tmp_path / "s")


def test_urls_are_names(tmp_path):
    pairs = Pairs(30)
    pairs.names = [f"https://x.org/a//{row}.jpg" for row in range(30)]
    _, cache = bring(pairs.folder(tmp_path / "e"), tmp_path / "s")
    assert sorted(cache.file_names(0, 30)) == sorted(pairs.names)


@pytest.mark.parametrize(("scale", "dtype"), [(1e-9, np.float32), (1e-300, np.float64), (1e30, np.float64)])
def test_values_that_float16_would_lose(tmp_path, scale, dtype):
    pairs = Pairs(30, np.float64)
    pairs.images = (pairs.images * scale).astype(dtype)
    source = pairs.folder(tmp_path / "e")
    with pytest.raises((CacheError, SourceError), match="`dtype` float32" if scale == 1e-9 else "no features"):
        bring(source, tmp_path / "s")
