"""A cache in an object store: the same bytes and the same promises as on a disk, against a real S3 server."""

import itertools
import json
import random
import subprocess
import sys
import threading
from dataclasses import replace

import boto3
import numpy as np
import pytest
from click.testing import CliRunner
from small_extraction import SMALL, files, without_commands

from xret.cli import main
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage import folder, zarr_stores
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.verify import Damage, Verification, verify
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, StoreError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.batches import stored_batches

# Connections that the server closed are collected whenever Python likes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEPT = 16  # connections
DENIED = 403, "AccessDenied", "Access Denied"
IMAGES = replace(SMALL, text=None)


@pytest.fixture
def manifest(tiny_dataset):
    return load_manifest(tiny_dataset(train=10, val=2))  # three shards of eight images


@pytest.fixture
def whole(manifest, tmp_path, environment):
    """Every file of an uninterrupted extraction on the disk."""
    extract(manifest, str(tmp_path / "whole.zarr"), SMALL)
    return files(tmp_path / "whole.zarr")


def images_of(whole):
    """Return the files that are there without the captions' set."""
    return {name: data for name, data in whole.items() if not name.startswith("captions/words")}


@pytest.mark.slow
@pytest.mark.parametrize("options", [IMAGES, SMALL], ids=["images", "all"])
def test_the_bytes_are_those_of_a_local_store(bucket, manifest, whole, options):
    extract(manifest, bucket.url, replace(options, splits=("val",)))
    assert describe(bucket.url)["sets"][0]["done"] == {"train": [0, 2], "val": [1, 1]}
    summary = extract(manifest, bucket.url, options)
    assert [s.shards for s in summary.sets] == [2] * len(summary.sets)
    assert bucket.files() == (whole if options.text else images_of(whole))
    assert [s.shards for s in extract(manifest, bucket.url, options).sets] == [0] * len(summary.sets)


def test_whoever_reads_it_reads_the_same(bucket, whole, tmp_path):
    bucket.fill(whole)
    assert verify(bucket.url) == Verification(6, (), ())
    assert describe(bucket.url)["bytes"] == sum(map(len, whole.values()))
    fields = {"image_fields": {"local", "global"}, "caption_fields": {"token"}}
    epochs = []
    for url in (bucket.url, str(tmp_path / "whole.zarr")):
        cache = FeatureCache.open(url)
        batches = stored_batches(cache.image_set(), cache.caption_set(), "train", **fields)
        epochs.append(list(batches.epoch(unit="image", batch_size=5, seed=0, epoch=0)))
    for there, here in zip(*epochs, strict=True):
        assert np.array_equal(there.images.local, here.images.local)
        assert np.array_equal(there.images.global_, here.images.global_)
        assert np.array_equal(there.captions.token, here.captions.token)


def describe(url):
    result = CliRunner().invoke(main, ["cache", "info", url, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_head_learns_from_it(bucket, tiny_dataset, tmp_path):
    extract(load_manifest(tiny_dataset()), str(tmp_path / "s.zarr"), SMALL)
    bucket.fill(files(tmp_path / "s.zarr"))
    words = ["--set=model.dim=16", "--set=aggregator.image.head_dim=16", "--set=aggregator.text.head_dim=16"]
    words += ["--set=schedule.epochs=1", "--recipe", "setdiv", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(main, ["train-head", bucket.url, *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(main, ["eval", str(tmp_path / "run"), "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["results"][0]["images"] == 6


@pytest.mark.slow
def test_damage_is_found_and_repaired(bucket, manifest, whole):
    bucket.fill(whole)
    dice = random.Random(0)
    names = dice.sample([name for name in whole if "/c/0" in name and not name.startswith("samples")], 3)
    for name in names:
        data = bytearray(whole[name])
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        bucket.put(name, bytes(data))
    lost = next(name for name in whole if "/local/c/2" in name)
    bucket.delete(lost)
    damaged = verify(bucket.url).damaged
    assert {damage.array for damage in damaged} == {name.split("/c/")[0] for name in [*names, lost]}
    assert Damage(lost.split("/c/")[0], 2, (10, 12)) in damaged
    extract(manifest, bucket.url, replace(SMALL, repair=True))
    assert bucket.files() == whole


@pytest.mark.parametrize("lost", ["/local/c/1", "/status/c/1", "/length/c/1", "/start/c/1", "/token/c/1"])
def test_a_lost_object_is_not_read_as_something_else(bucket, whole, lost):
    bucket.fill({name: data for name, data in whole.items() if lost not in name})
    with pytest.raises(CacheError, match=r"(has lost shard 1|is missing); run `xret cache verify`, then .*--repair"):
        cache = FeatureCache.open(bucket.url)
        fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
        batches = stored_batches(cache.image_set(), cache.caption_set(), "train", **fields)
        list(batches.epoch(unit="image", batch_size=5, seed=0, epoch=0))


def test_a_listing_is_never_stale(bucket):
    store = Store(bucket.url)
    assert store.names("images") == []
    for name in ("one", "two"):
        bucket.put(f"images/{name}/zarr.json", b"{}")
        assert store.names("images")[-1] == name
        assert store.exists(f"images/{name}")
    bucket.delete("images/one/zarr.json")
    assert store.names("images") == ["two"]
    assert not store.exists("images/one")


# --- A server that fails


def test_a_bucket_that_is_not_there_is_a_sentence_and_is_not_made(server, environment, manifest):
    buckets = [b["Name"] for b in boto3.client("s3").list_buckets()["Buckets"]]
    with pytest.raises(StoreError, match=r"s3://nobucket/s\.zarr does not answer .*bucket does not exist.* again$"):
        extract(manifest, "s3://nobucket/s.zarr", SMALL)
    assert [b["Name"] for b in boto3.client("s3").list_buckets()["Buckets"]] == buckets
    with pytest.raises(CacheError, match="no feature cache is there"):
        verify("s3://nobucket/s.zarr")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect to the endpoint"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
    ],
)
def test_no_server_and_no_credentials_are_a_sentence_soon(environment, monkeypatch, changes, reason):
    for key, value in changes.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    words = [sys.executable, "-c", "from xret.cli import main; main()", "cache", "info", "s3://bucket/s.zarr"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: s3://bucket/s.zarr does not answer as it should (")
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_server_that_says_nothing_is_not_waited_for_long(bucket, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 1)
    silence = threading.Event()
    with bucket.server.failing(lambda *_: silence.wait(20)), pytest.raises(StoreError, match="no answer in time"):
        FeatureCache.open(bucket.url)
    silence.set()


def test_writes_that_fail_now_and_then_are_tried_again(bucket, manifest, whole):
    puts = itertools.count(1)
    slow_down = 503, "SlowDown", "Please reduce your request rate."
    with bucket.server.failing(lambda method, _: slow_down if method == "PUT" and next(puts) % 9 == 0 else None):
        extract(manifest, bucket.url, IMAGES)
    assert next(puts) > 60
    assert without_commands(bucket.files()) == without_commands(images_of(whole))


@pytest.mark.parametrize(
    "after", [55, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 9, 25, 27, 30, 40, 50))]
)
def test_writes_that_fail_for_good_end_in_a_sentence_and_a_resumed_extraction_is_whole(bucket, manifest, whole, after):
    puts = itertools.count()
    with (
        bucket.server.failing(lambda method, _: DENIED if method == "PUT" and next(puts) >= after else None),
        pytest.raises(StoreError, match=r"does not answer as it should \(Access Denied\); fix that and run the same"),
    ):
        extract(manifest, bucket.url, IMAGES)
    there = bucket.files()
    for mark in [name for name in there if "/done/c/" in name]:
        group, shard = mark.split("/done/c/")
        arrays = [name for name in whole if name.startswith(f"{group}/") and f"/c/{shard}/" in f"{name}/"]
        assert all(there.get(name) == whole[name] for name in arrays)
    extract(manifest, bucket.url, IMAGES)
    assert without_commands(bucket.files()) == without_commands(images_of(whole))


def test_a_server_that_fails_is_no_damage(bucket, manifest, whole):
    bucket.fill(whole)
    repair = replace(SMALL, repair=True)
    for part, attempt in (
        ("/samples/zarr.json", verify),
        ("/local/c/1", verify),
        ("/done/c/2", lambda url: extract(manifest, url, repair)),
    ):
        with (
            bucket.server.failing(lambda _, path, part=part: DENIED if part in path else None),
            pytest.raises(StoreError, match="does not answer"),
        ):
            attempt(bucket.url)
    assert verify(bucket.url).ok


def test_connections_are_not_kept_for_good():
    for number in range(3 * KEPT):
        Store(f"memory://{number}")
    assert zarr_stores.connect.cache_info().currsize <= KEPT
