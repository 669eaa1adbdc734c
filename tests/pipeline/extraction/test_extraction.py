"""Extraction through Dask into Zarr: what it writes, how it stops, and that it goes on."""

import os
import subprocess
import sys
from dataclasses import replace

import dask
import numpy as np
import pytest
import torch
import torchvision
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders import load_visual, registry
from xret.pipeline.encoders.threads import Loaded
from xret.pipeline.errors import CacheError, EncoderError, OutputError, SampleError
from xret.pipeline.extraction import schedule
from xret.pipeline.extraction.extraction import Options, extract
from xret.pipeline.extraction.plan import plan
from xret.pipeline.extraction.tasks import Job, write_image_shard
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.storage.store import Store

read = Store.read_array


@pytest.fixture
def store(tiny_dataset, tmp_path):
    manifest = load_manifest(tiny_dataset())
    summary = extract(manifest, str(tmp_path / "s.zarr"), SMALL)
    return manifest, str(tmp_path / "s.zarr"), summary


def test_features_are_the_encoders_own(store):
    manifest, url, summary = store
    cache = FeatureCache.open(url)
    encoder = load_visual("resnet18", "random:0", 64, "cpu")
    images = cache.image_set("resnet18")
    rows = np.array([0, 7, 8, 19, 20, 31])  # first and last of shards and splits
    pixels = [encoder.decode(manifest.images / name) for name in cache.file_names(0, 32)]
    local, global_ = encoder.encode(torch.stack([pixels[row][0] for row in rows]))
    assert np.allclose(images.local(rows), local, atol=2e-3, rtol=2e-3)
    assert np.allclose(images.global_(rows), global_, atol=2e-3, rtol=2e-3)
    assert images.local(rows).shape == (6, 4, 512)
    assert (images.status == 0).all()
    assert (images.length == 4).all()
    words = cache.caption_set("words")
    vocabulary = words.vocabulary
    for row in (0, 3, cache.captions - 1):
        text = cache.caption_texts(row, row + 1)[0].split()
        expected = [vocabulary.index(word) if word in vocabulary else 0 for word in text]
        assert words.token(np.array([row])).tolist() == expected
    assert {s.name.split("@")[0]: (s.samples, s.failed) for s in summary.sets} == {
        "resnet18": (32, 0),
        "words": (cache.captions, 0),
    }


def test_the_graph_has_one_task_a_missing_shard(tiny_dataset, tmp_path, monkeypatch):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    graphs = []

    def compute(*tasks, **how):
        graphs.append(sorted(dask.base.collections_to_expr(tasks).__dask_graph__()))
        return real(*tasks, **how)

    real = schedule.compute
    monkeypatch.setattr(schedule, "compute", compute)
    extract(manifest, url, Options(**{**vars(SMALL), "splits": ("val",)}))
    extract(manifest, url, SMALL)
    image, words = FeatureCache.open(url).image_set().name, FeatureCache.open(url).caption_set().name
    # shards 0-2 hold train, 3 val, 4 test
    expected = [
        [f"{name}-shard-{shard}" for shard in shards] for shards in ([3], [0, 1, 2, 4]) for name in (image, words)
    ]
    assert graphs == expected


def test_any_number_of_workers_writes_the_same_bytes(store, tmp_path):
    manifest, url, _ = store
    for workers in (1, 4):
        other = str(tmp_path / f"{workers}.zarr")
        extract(manifest, other, Options(**{**vars(SMALL), "workers": workers}))
        assert files(other) == files(url)


def test_a_second_run_computes_nothing_and_another_encoder_stands_beside(store):
    manifest, url, _ = store
    before = files(url)
    again = extract(manifest, url, SMALL)
    assert [s.samples for s in again.sets] == [0, 0]
    assert files(url) == before
    extract(manifest, url, Options(**{**vars(SMALL), "visual_weights": "random:1", "text": None}))
    assert len(FeatureCache.open(url).set_names("images")) == 2
    assert before.items() <= files(url).items()
    with pytest.raises(CacheError, match=r"several feature sets fit 'resnet18': .*; name one of them with data\.image"):
        FeatureCache.open(url).image_set("resnet18")


def test_what_is_finished_needs_no_place_to_write(store, monkeypatch):
    manifest, url, _ = store
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root, everything may be written
    assert all(features.samples == 0 for features in extract(manifest, url, SMALL).sets)
    with pytest.raises(OutputError, match="you may not write to"):
        extract(manifest, url, replace(SMALL, image_size=96))


def test_splits_are_computed_when_asked_for(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    extract(manifest, url, Options(**{**vars(SMALL), "splits": ("val",)}))
    cache = FeatureCache.open(url)
    images, captions = cache.image_set(), cache.caption_set()
    assert [images.complete(split) for split in ("train", "val", "test")] == [False, True, False]
    fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
    assert stored_batches(images, captions, "val", **fields).images == 6
    with pytest.raises(CacheError, match=r"split 'train' of 'resnet18@\w+' lacks 3 of 3 shards"):
        stored_batches(images, captions, "train", **fields)
    extract(manifest, url, SMALL)
    assert FeatureCache.open(url).image_set().complete("train")
    with pytest.raises(CacheError, match="has no image in split other; it has train, val, test"):
        extract(manifest, url, Options(**{**vars(SMALL), "splits": ("train", "other")}))
    alone, images = str(tmp_path / "images.zarr"), Options(**{**vars(SMALL), "text": None})
    extract(manifest, alone, images)
    with pytest.raises(
        CacheError, match="has no features of captions; run `xret extract` on it with --visual none, to"
    ):
        FeatureCache.open(alone).caption_set()


def test_a_broken_image_stops_or_is_recorded(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    (manifest.images / "5.jpg").write_bytes((manifest.images / "5.jpg").read_bytes()[:300])
    (manifest.images / "21.jpg").write_bytes(b"")
    with pytest.raises(SampleError, match=r"5\.jpg|21\.jpg"):
        extract(manifest, url, SMALL)
    summary = extract(manifest, url, Options(**{**vars(SMALL), "on_error": "skip"}))
    assert summary.sets[0].failed == 2
    images = FeatureCache.open(url).image_set()
    assert np.flatnonzero(images.status).tolist() == [5, 21]
    assert set(images.failed) == {"5", "21"}
    assert "5.jpg" in images.failed["5"]
    assert np.isnan(images.local(np.array([5, 21]))).all()
    cache = FeatureCache.open(url)
    train = stored_batches(images, cache.caption_set(), "train", image_fields={"global"}, caption_fields={"token"})
    assert (train.images, train.skipped) == (19, 1)
    assert 5 not in train.image_rows


def test_a_split_of_broken_images_is_an_error(tiny_dataset, tmp_path):
    manifest = load_manifest(tiny_dataset(train=9, val=2))
    for name in ("9.jpg", "10.jpg"):
        (manifest.images / name).write_bytes(b"no image")
    with pytest.raises(CacheError, match=r"no image of split 'val' could be read; for example (9|10)\.jpg"):
        extract(manifest, str(tmp_path / "s.zarr"), Options(**{**vars(SMALL), "on_error": "skip"}))
    for name in ("9.jpg", "10.jpg"):  # as when the folder was not mounted: once it is there, all is well
        (manifest.images / name).write_bytes((manifest.images / "0.jpg").read_bytes())
    summary = extract(manifest, str(tmp_path / "s.zarr"), SMALL)
    assert summary.sets[0].failed == 0
    assert FeatureCache.open(str(tmp_path / "s.zarr")).image_set().failed == {}


def test_a_repaired_image_is_no_longer_listed(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    whole = (manifest.images / "5.jpg").read_bytes()
    (manifest.images / "5.jpg").write_bytes(b"")
    extract(manifest, url, Options(**{**vars(SMALL), "on_error": "skip"}))
    (manifest.images / "5.jpg").write_bytes(whole)
    assert extract(manifest, url, SMALL).sets[0].failed == 1  # what is done is done
    summary = extract(manifest, url, Options(**{**vars(SMALL), "repair": True}))
    assert (summary.sets[0].shards, summary.sets[0].failed) == (1, 0)
    assert FeatureCache.open(url).image_set().failed == {}


def test_a_repair_of_one_split_leaves_the_others_finished(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    (manifest.images / "5.jpg").write_bytes(b"")
    skipping = replace(SMALL, on_error="skip")
    extract(manifest, url, skipping)
    before = files(url)
    extract(manifest, url, replace(skipping, splits=("test",), repair=True))
    assert files(url) == before
    assert FeatureCache.open(url).image_set().complete("train")


def test_a_killed_repair_is_healed_by_the_same_command_without_it(store):
    manifest, url, _ = store
    before = files(url)
    Store(url).start_group("samples")  # where a kill left it
    with pytest.raises(CacheError, match="'samples' was never finished; run the same `xret extract` again"):
        FeatureCache.open(url)
    assert [s.done for s in plan(manifest, url, SMALL).sets] == [0, 0]
    assert [s.shards_before for s in extract(manifest, url, SMALL).sets] == [5, 5]
    assert files(url) == before


def test_a_folder_that_is_named_imagenet_is_not_taken_for_the_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = Options().asked("images")
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "0.jpg").write_bytes(b"picture")
    assert Options().asked("images") == before
    assert before["weights"] == "imagenet"


def test_words_are_the_same_set_whatever_the_dtype(store):
    manifest, url, _ = store
    summary = extract(manifest, url, Options(**{**vars(SMALL), "visual": None, "dtype": "float32"}))
    assert summary.sets[0].samples == 0
    assert FeatureCache.open(url).caption_set().dtype == "int32"


def test_a_task_opens_as_many_files_however_many_shards_there_are(tiny_dataset, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(Store, "read_array", lambda self, name, *rows: opened.append(name) or read(self, name, *rows))
    counts = []
    for images in (16, 128):
        manifest, url = load_manifest(tiny_dataset(f"d{images}", train=images)), str(tmp_path / f"{images}.zarr")
        extract(manifest, url, SMALL)
        job = Job(url, "resnet18", str(manifest.images), replace(SMALL, device="cpu"))
        opened.clear()
        write_image_shard(job, 0)
        counts.append(sorted(opened))
    assert counts[0] == counts[1]
    assert not [name for name in counts[0] if "status" in name or "caption" in name]


def test_a_wrong_encoder_leaves_nothing_behind(tiny_dataset, tmp_path):
    manifest = load_manifest(tiny_dataset())
    with pytest.raises(EncoderError, match="resnet18"):
        extract(manifest, str(tmp_path / "s.zarr"), Options(**{**vars(SMALL), "visual": "resnet81"}))
    assert not (tmp_path / "s.zarr").exists()


def test_activations_beyond_float16_stop_and_name_the_sample(tiny_dataset, tmp_path):
    net = torchvision.models.resnet18(weights=None)
    with torch.no_grad():
        net.layer4[1].bn2.bias += 1e5
    torch.save(net.state_dict(), tmp_path / "big.pth")
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    options = {**vars(SMALL), "visual_weights": str(tmp_path / "big.pth")}
    with pytest.raises(CacheError, match=r"'\d+\.jpg': an activation of 1e\+05 is beyond float16.*--dtype float32"):
        extract(manifest, url, Options(**options))
    summary = extract(manifest, url, Options(**{**options, "dtype": "float32"}))
    assert summary.sets[0].samples == 32


def test_captions_without_words_are_one_unknown_token(tiny_dataset, tmp_path):
    path = tiny_dataset()
    captions = path.parent / "captions.json"
    captions.write_text(captions.read_text().replace("a picture of thing 3 number 0", " . "))
    url = str(tmp_path / "s.zarr")
    summary = extract(load_manifest(path), url, Options(**{**vars(SMALL), "visual": None}))
    assert summary.counts.captions_without_words == 1
    cache = FeatureCache.open(url)
    row = np.array([cache.caption_start[3]])
    assert cache.caption_set().length[row].tolist() == [1]
    assert cache.caption_set().token(row).tolist() == [0]


def test_a_failing_task_leaves_the_finished_ones_marked(tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    whole = (manifest.images / "17.jpg").read_bytes()
    (manifest.images / "17.jpg").write_bytes(b"")  # in shard 2 of 5
    with pytest.raises(SampleError, match="--on-error skip"):
        extract(manifest, url, Options(**{**vars(SMALL), "workers": 1}))
    done = FeatureCache.open(url).image_set().done()
    assert done.sum() == 2
    assert not done[2]
    (manifest.images / "17.jpg").write_bytes(whole)
    summary = extract(manifest, url, SMALL).sets[0]
    assert (summary.shards, summary.shards_before) == (3, 2)


def test_nothing_left_is_told_without_torch(tiny_dataset, tmp_path):
    manifest, url = tiny_dataset(), str(tmp_path / "s.zarr")
    weights = tmp_path / "w.pth"
    torch.save(torchvision.models.resnet18().state_dict(), weights)
    options = replace(SMALL, visual_weights=str(weights))
    extract(load_manifest(manifest), url, options)
    code = f"""
import sys
from dataclasses import replace
from xret.pipeline.extraction.extraction import Options, extract
from xret.pipeline.data.manifest import load_manifest
options = {options!r}
summary = extract(load_manifest({str(manifest)!r}), {url!r}, options)
print([(s.samples, s.shards_before) for s in summary.sets], summary.counts.words, "torch" in sys.modules)
other = extract(load_manifest({str(manifest)!r}), {url!r}, replace(options, image_size=96))
print(other.sets[0].samples, "torch" in sys.modules)
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()
    words = len(FeatureCache.open(url).caption_set().vocabulary)
    assert lines == [f"[(0, 5), (0, 5)] {words} False", "32 True"]


def test_other_weights_under_the_same_name_are_extracted(tiny_dataset, tmp_path, monkeypatch):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    weights = tmp_path / "w.pth"
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save(torchvision.models.resnet18().state_dict(), weights)
        monkeypatch.setattr(registry, "_images", Loaded(1))  # as in another process
        assert extract(manifest, url, replace(SMALL, visual_weights=str(weights))).sets[0].samples == 32


def test_a_set_that_could_not_be_filled_is_in_nobodys_way(store):
    manifest, url, _ = store
    for name in manifest.images.iterdir():
        name.write_bytes(b"")
    with pytest.raises(SampleError):
        extract(manifest, url, replace(SMALL, visual_weights="random:1", text=None))
    cache = FeatureCache.open(url)
    assert len(cache.set_names("images")) == 2
    assert cache.image_set().complete("train")
