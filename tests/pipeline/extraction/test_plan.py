"""A plan against the extraction that it announces."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from packed_data import PackedData
from small_extraction import SMALL

from xret.cli import main
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, EncoderError, ManifestError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.plan import plan


def test_a_plan_names_what_the_extraction_then_writes(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset(train=60, val=8, test=8)), str(tmp_path / "s.zarr")
    options = replace(SMALL, image_size=96)
    announced = plan(manifest, url, options)
    assert not (tmp_path / "s.zarr").exists()
    summary = extract(manifest, url, options)
    store = Store(url)
    for features, made in zip(announced.sets, summary.sets, strict=True):
        assert features.name == made.name
        assert features.samples == made.samples
        assert features.tasks == made.shards
        path = f"{features.modality}/{features.name}"
        chunks = [file for file in store.fs.find(store.path(path)) if "/c/" in file]
        assert features.files == len(chunks)
    assert announced.sets[0].bytes == pytest.approx(store.size(path_of(announced, 0)), rel=0.05)
    assert announced.sets[0].hours * announced.sets[0].per_second * 3600 == pytest.approx(76)


def path_of(announced, number):
    features = announced.sets[number]
    return f"{features.modality}/{features.name}"


def test_a_plan_counts_what_is_done(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    extract(manifest, url, replace(SMALL, splits=("val",)))
    images = plan(manifest, url, SMALL).sets[0]
    assert (images.tasks, images.done) == (5, 1)
    assert images.hours * images.per_second * 3600 == pytest.approx(20 + 6)


def test_a_plan_takes_the_shards_of_the_sets_that_are_there(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    extract(manifest, url, replace(SMALL, shard_images=2, text=None))
    images, words = plan(manifest, url, SMALL).sets
    assert (images.tasks, images.done, images.shard_images, images.hours) == (16, 16, 2, 0)
    assert (words.tasks, words.done, words.shard_images) == (5, 0, 8)
    more, _ = plan(manifest, url, SMALL, images=64).sets
    assert (more.tasks, more.done, more.shard_images) == (9, 0, 8)
    other, images_alone = load_manifest(tiny_dataset("other", train=9)), replace(SMALL, text=None)
    for refusing in (plan, extract):
        with pytest.raises(CacheError, match=r"holds other samples: data set 'tiny', .* not 'other'"):
            refusing(other, url, images_alone)
    assert plan(other, url, images_alone, images=64).images == 64


def test_a_plan_of_an_update_takes_files_that_have_changed(tmp_path):
    data, url = PackedData(tmp_path / "data", count=6), str(tmp_path / "s.zarr")
    manifest, options = load_manifest(data.as_tars(files=1)), replace(SMALL, text=None)
    extract(manifest, url, options)
    data.rows.pop()
    data.as_tars(files=1)
    with pytest.raises(ManifestError, match="it has changed since"):
        plan(manifest, url, options)
    (images,) = plan(manifest, url, replace(options, update=True)).sets
    assert (images.samples, images.tasks, images.done, images.found, images.hours) == (5, 3, 0, 5, 0)


def test_a_plan_for_a_billion_images(tiny_dataset, tmp_path):
    path = tiny_dataset()
    arguments = ["extract", str(path), "--store", str(tmp_path / "s"), "--visual", "resnet18", "--text", "words"]
    arguments += ["--visual-weights", "random:0", "--image-size", "64"]
    result = CliRunner().invoke(main, [*arguments, "--plan", "1e9", "--json"])
    assert result.exit_code == 0
    made = json.loads(result.stdout)
    assert made["images"] == 1_000_000_000
    assert made["captions"] == 2_500_000_000
    images, captions = made["sets"]
    # 62.5% of the images are train; a split begins a new task
    assert images["tasks"] == captions["tasks"] == -(-625_000_000 // 512) + 2 * -(-187_500_000 // 512)
    # 4 cells and their mean of 512 float16 values, and 29 bytes of length, size, status and digest
    assert images["bytes"] == images["tasks"] * 512 * (5 * 512 * 2 + 29)
    for absurd in ("many", "1e16", "inf"):
        assert CliRunner().invoke(main, [*arguments, "--plan", absurd]).exit_code == 2
    assert CliRunner().invoke(main, [*arguments, "--plan", "1e13", "--shard-images", "1"]).exit_code == 0
    many = CliRunner().invoke(main, [*arguments, "--shard-images", str(10**15)])
    assert many.exit_code == 1
    assert "a shard holds from 1 to 65536 images, not 1000000000000000; give another --shard-images" in many.output
    table = CliRunner().invoke(main, [*arguments, "--plan"]).output
    assert "5 tasks of 8 images, 0 of them done; 206.0 kB in 40 files; " in table
    assert " seconds left at " in table
    assert list(tmp_path.glob("s*")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"regions": (36, 36)}, "--regions is for butd"), ({"visual": "butd", "frames": 3}, "--frames takes the pooled")],
)
def test_options_of_other_encoders_are_refused(options, message, tiny_dataset, tmp_path):
    with pytest.raises(EncoderError, match=message):
        extract(load_manifest(tiny_dataset()), str(tmp_path / "s.zarr"), replace(SMALL, **options))
    assert not (tmp_path / "s.zarr").exists()
