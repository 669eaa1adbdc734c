"""The manifest: what it may say, and what is answered to one that is wrong."""

from pathlib import Path

import pytest
import yaml
from small_captions import sentence_of

import xret.data_manifests
from xret.pipeline.data.manifest import bundled_manifests, load_manifest

GOOD = "name: birds\nimages: images\ncaptions: captions.json\n"
LINES = GOOD.replace(".json", ".jsonl")

# Images of the usual splits: Karpathy and Fei-Fei 2015 for the first three (COCO after its restval has joined train),
# for RSICD the file that the manifest's own comment describes; of videos, section 5.1.2 of VSE-infinity and MSR-VTT.
PUBLISHED = {
    "coco": {"train": 113_287, "val": 5_000, "test": 5_000},
    "flickr30k": {"train": 29_000, "val": 1_014, "test": 1_000},
    "flickr8k": {"train": 6_000, "val": 1_000, "test": 1_000},
    "msrvtt": {"train": 6_513, "val": 497, "test": 2_990},
    "rsicd": {"train": 7_734, "val": 1_000, "test": 1_094},
    "vatex": {"train": 25_991, "val": 1_500, "test": 1_500},
}


def write(folder: Path, text: str = GOOD) -> Path:
    """Put a manifest in a folder, with the files that `GOOD` names."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "captions.json").write_text("{}")
    path = folder / "birds.yaml"
    path.write_text(text)
    return path


def refusal(dataset, data_root: Path | None = None) -> str:
    return sentence_of(load_manifest, dataset, data_root)


def test_every_key_arrives(tmp_path):
    more = (
        "merge_splits: {restval: train}\ncaptions_per_image: 5\ncounts: {train: 3, val: 0}\n"
        "protocols: [1k-folds, full]\nlicence: free\nhomepage: https://example.org\n"
    )
    path = write(tmp_path, GOOD + more)
    manifest = load_manifest(path)
    assert (manifest.name, manifest.path) == ("birds", path)
    assert (manifest.images, manifest.captions) == (tmp_path / "images", tmp_path / "captions.json")
    assert manifest.merge_splits == {"restval": "train"}
    assert manifest.captions_per_image == 5
    assert manifest.counts == {"train": 3, "val": 0}
    assert manifest.protocols == ("1k-folds", "full")


def test_relative_paths_begin_at_data_root_if_given_else_at_the_manifest(tmp_path, monkeypatch):
    path, elsewhere = write(tmp_path / "here"), tmp_path / "elsewhere"
    write(elsewhere).unlink()
    monkeypatch.chdir("/")
    assert load_manifest(path).images == tmp_path / "here" / "images"
    manifest = load_manifest(path, elsewhere)
    assert (manifest.images, manifest.captions) == (elsewhere / "images", elsewhere / "captions.json")
    path.write_text(GOOD.replace("images: images", f"images: {tmp_path / 'here' / 'images'}"))
    manifest = load_manifest(path, elsewhere)
    assert (manifest.images, manifest.captions) == (tmp_path / "here" / "images", elsewhere / "captions.json")


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        (GOOD + "license: free\n", "unknown key 'license' (did you mean 'licence'?)"),
        (GOOD + "count: {train: 1}\n", "unknown key 'count' (did you mean 'counts'?)"),
        ("name: birds\nimages: images\n", "'captions' is missing"),
        (GOOD.replace("birds", "My Birds"), "'name' must be a text made of a-z, 0-9, _ and -, not 'My Birds'"),
        (GOOD.replace("birds", '"birds\\n"'), "'name' must be a text"),
        (GOOD.replace("images: images", "images: [a, b]"), "'images' must be a text, not ['a', 'b']"),
        (GOOD.replace(".json", ".txt"), "must be a file that ends in .json, .jsonl, .csv, .tsv, not 'captions.txt'"),
        (GOOD + "captions_per_image: 0\n", "'captions_per_image' must be a whole number of at least 1, not 0"),
        (GOOD + "merge_splits: {restval: training}\n", "to train, val, test, other, not {'restval': 'training'}"),
        (GOOD + "counts: {train: -1}\n", "'counts' must be"),
        (
            GOOD + "protocols: full\n",
            "'protocols' must be a list of different texts, such as [1k-folds, full], not 'full'",
        ),
        (GOOD + "licence: 5\n", "'licence' must be a text"),
        (GOOD + "homepage:\n", "'homepage' must be a text"),
        (GOOD + "image_column: a\n", "'image_column' cannot be combined with '.json'"),
        (LINES + 'separator: ";"\n', "'separator' cannot be combined with '.jsonl'"),
        (LINES + "quoting: none\n", "'quoting' cannot be combined with '.jsonl'"),
        (GOOD + "quoting: all\n", "'quoting' must be none or csv, not 'all'"),
        (LINES + "separator: ';;'\n", """'separator' must be one character, as ";" or "\\t", not ';;'"""),
        (LINES + "separator: '\"'\n", "'separator' must be one character"),
        (LINES + "caption_columns: [a, 3]\n", "'caption_columns' must be a text or a list of different texts"),
        (LINES + "caption_columns: [a, a]\n", "'caption_columns' must be a text or a list of different texts"),
        (GOOD + "tar: a.tar\n", "'images' cannot be combined with 'tar'; 'captions' cannot"),
        ("name: a\ntar: a.tar\nimage_column: s\n", "'image_column' cannot be combined with 'tar'"),
        ("name: a\ntar: {}\n", "'tar' must be a text such as"),
        ("name: a\ntar: a.tar\nparquet: b\n", "'parquet' cannot be combined with 'tar'"),
        ("name: a\nparquet: {train: a}\nsplit_column: s\n", "'split_column' cannot be combined with 'parquet'"),
        ("name: a\nparquet: a\ncaption_columns: []\n", "'caption_columns' must be"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, text, phrase):
    path = write(tmp_path, text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert phrase in message


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "a manifest is a mapping with at least name, images, captions"),
        ("- name\n- images\n", "a manifest is a mapping"),
        ("name: a\nname: b\n", "this is not valid YAML (line 2, column 1: the key 'name' stands twice"),
    ],
)
def test_a_file_that_is_no_manifest(tmp_path, text, phrase):
    path = write(tmp_path, text)
    assert refusal(path).startswith(f"{path}: {phrase}")


def test_absent_images_and_captions_are_named_with_the_way_out(tmp_path):
    path = write(tmp_path)
    (tmp_path / "captions.json").unlink()
    message = refusal(path)
    assert f"the caption file {tmp_path / 'captions.json'} is missing" in message
    assert "`data_root`" in message
    assert "image folder" not in message
    nowhere = tmp_path / "nowhere.yaml"
    nowhere.write_text("name: a\ndataset: images\n")
    assert "there is neither a data set that `save_to_disk` wrote nor an imagefolder" in refusal(nowhere)
    (tmp_path / "images").rmdir()
    (tmp_path / "images").write_text("a file, not a folder")
    assert f"the image folder {tmp_path / 'images'} is missing and the caption file" in refusal(path)
    assert f"the image folder {tmp_path / 'away' / 'images'} is missing" in refusal(path, tmp_path / "away")


def test_a_data_set_that_is_not_known(tmp_path):
    message = refusal("flikr30k")
    assert "no data set or manifest 'flikr30k' (did you mean 'flickr30k'?); name a YAML file or one of" in message
    for path in (tmp_path, tmp_path / "birds.yaml"):
        assert f"There is no data set or manifest '{path}'; name" in refusal(path)


def test_every_bundled_manifest_keeps_its_promise(tmp_path):
    folder = Path(next(iter(xret.data_manifests.__path__)))
    paths = sorted(folder.rglob("*.yaml"))
    assert [path.stem for path in paths] == list(bundled_manifests()) == sorted(PUBLISHED)
    for path in paths:
        values = yaml.safe_load(path.read_text())
        assert values["name"] == path.stem
        assert values["counts"] == PUBLISHED[path.stem]
        assert values["licence"]
        assert values["homepage"].startswith("https://")

        absent = refusal(path.stem, tmp_path)  # syntactically good: only the data is missed
        assert f"the image folder {tmp_path / values['images']} is missing" in absent
        assert f"the caption file {tmp_path / values['captions']} is missing" in absent
        assert "`data_root`" in absent

        (tmp_path / values["images"]).mkdir(parents=True)
        (tmp_path / values["captions"]).write_text("{}")
        assert load_manifest(path.stem, tmp_path).counts == PUBLISHED[path.stem]


def test_coco_is_evaluated_as_the_papers_do(tmp_path):
    (tmp_path / "coco" / "images").mkdir(parents=True)
    (tmp_path / "coco" / "dataset_coco.json").write_text("{}")
    coco = load_manifest("coco", tmp_path)
    assert coco.protocols == ("1k-folds", "full")
    assert coco.merge_splits == {"restval": "train"}
    assert coco.captions_per_image == 5
