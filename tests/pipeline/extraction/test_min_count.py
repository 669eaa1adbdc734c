"""How often a word has to occur to be in a vocabulary: by option, by the store, or by the size of the data."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from command_line import refused, run
from PIL import Image

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.data.manifest import bundled_manifests, load_manifest
from xret.pipeline.documents import read_yaml
from xret.pipeline.encoders.words import UNK, min_count_for
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options
from xret.pipeline.extraction.plan import plan

WORDS = Options(visual=None, text="words")
TEXTS = ["rare red bird", "red bird", "bird", "grey bird", "red red grey"]  # bird 4, red 4, grey 2, rare 1


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a data set of so many training captions, and gives its manifest's path."""

    def make(count=5, more=()):
        (tmp_path / "images").mkdir(exist_ok=True)
        texts = [TEXTS[number % len(TEXTS)] for number in range(count)] + list(more)
        rows = [{"file_name": f"{n // 5}.jpg", "caption": text, "split": "train"} for n, text in enumerate(texts)]
        rows += [{"file_name": "val.jpg", "caption": "a blue val", "split": "val"}]
        (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "data.yaml").write_text("name: data\nimages: images\ncaptions: captions.jsonl\n")
        return tmp_path / "data.yaml"

    return make


def vocabulary(url, name="words"):
    return FeatureCache.open(str(url)).caption_set(name).vocabulary


def expected(count, texts=TEXTS):
    counts = Counter(word for text in texts for word in text.split())
    return (UNK, *sorted((word for word in counts if counts[word] >= count), key=lambda w: (-counts[w], w)))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_option(write, tmp_path, count):
    url = tmp_path / "s"
    run("extract", write(), "--store", url, "--visual", "none", "--text", "words", "--min-count", count)
    assert vocabulary(url) == expected(count)
    features = FeatureCache.open(str(url)).caption_set()
    command = features.attributes["command"]
    assert command[command.index("--min-count") + 1] == str(count)


@pytest.mark.parametrize(("captions", "count"), [(29, 1), (30, 4)])
def test_the_default_follows_the_number_of_training_captions(write, tmp_path, monkeypatch, captions, count):
    assert (min_count_for(9_999), min_count_for(10_000)) == (1, 4)
    monkeypatch.setattr("xret.pipeline.encoders.words.FEW_CAPTIONS", 30)
    path = write(captions - 1, ["seldom bird"])
    extract(load_manifest(path), str(tmp_path / "s"), WORDS)
    assert ("seldom" in vocabulary(tmp_path / "s")) == (count == 1)
    assert FeatureCache.open(str(tmp_path / "s")).caption_set().attributes["asked"]["min_count"] == count


def test_bundled_data_sets_keep_their_words():
    """Fewest captions: five of each of the training images that their manifests promise."""
    counts = [read_yaml(path)["counts"]["train"] for path in bundled_manifests().values()]
    assert [min_count_for(5 * count) for count in counts] == [4] * 4


def test_a_store_goes_on_with_the_words_that_it_has(write, tmp_path):
    manifest, url = load_manifest(write()), str(tmp_path / "s")
    extract(manifest, url, replace(WORDS, min_count=4, splits=("train",)))
    (name,) = FeatureCache.open(url).set_names("captions")
    (planned,) = plan(manifest, url, WORDS).sets
    assert (planned.name, planned.done) == (name, 1)
    (found,) = extract(manifest, url, WORDS).sets
    assert (found.name, found.shards, found.shards_before) == (name, 1, 1)
    (found,) = extract(manifest, url, WORDS).sets
    assert (found.name, found.shards) == (name, 0)


def test_an_update_keeps_the_count(write, tmp_path):
    url = str(tmp_path / "s")
    extract(load_manifest(write()), url, replace(WORDS, min_count=2))
    extract(load_manifest(write(more=["rare grey dog"])), url, replace(WORDS, update=True))
    assert FeatureCache.open(url).generation == 2
    assert vocabulary(url) == expected(2, [*TEXTS, "rare grey dog"])


def test_a_generation_without_words_keeps_the_count_of_the_one_before(write, tmp_path):
    url = str(tmp_path / "s")
    extract(load_manifest(write()), url, replace(WORDS, min_count=2))
    pictures = Options(visual="resnet18", visual_weights="random:0", text=None, image_size=64, update=True)
    later = load_manifest(write(more=["rare grey dog"]))
    for name in ("0", "1", "val"):
        Image.new("RGB", (40, 40)).save(later.images / f"{name}.jpg")
    extract(later, url, pictures)
    extract(later, url, WORDS)
    assert FeatureCache.open(url).generation == 2
    assert vocabulary(url) == expected(2, [*TEXTS, "rare grey dog"])


def test_of_several_the_size_decides_and_the_option_chooses(write, tmp_path):
    manifest, url = load_manifest(write()), str(tmp_path / "s")
    for count in (2, 4):
        extract(manifest, url, replace(WORDS, min_count=count))
    (found,) = extract(manifest, url, WORDS).sets
    assert vocabulary(url, found.name) == expected(1)
    (found,) = extract(manifest, url, replace(WORDS, min_count=2)).sets
    assert (vocabulary(url, found.name), found.shards) == (expected(2), 0)


def test_what_makes_no_sense(write, tmp_path):
    words = ["extract", write(), "--store", tmp_path / "s", "--visual", "none", "--min-count"]
    assert refused(*words, 3, code=2) == "--min-count has no effect on --text bert; leave it out"
    assert "0 is not in the range x>=1" in refused(*words, 0, "--text", "words", code=2)
    with pytest.raises(CacheError, match="a word occurs at least once, not 0 times"):
        Options(min_count=0)
