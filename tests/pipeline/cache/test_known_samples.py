"""A source on an object store, and a store there: looked through once, read where it lies, refused when it changes."""

import boto3
import pytest
from packed_data import PackedData
from small_extraction import SMALL

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import ManifestError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.reattachment import find_pictures


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_pictures_on_an_object_store(bucket, tmp_path, form):
    def put(name, content):
        boto3.client("s3").put_object(Bucket=bucket.name, Key=name, Body=content)

    data = PackedData(tmp_path / "data", count=12)
    columns = {"caption_columns": "texts", "split_column": "split"} if form == "parquet" else {}
    data.as_parquet() if form == "parquet" else data.as_tars()
    for file in sorted(data.folder.glob(f"*.{form}")):
        put(file.name, file.read_bytes())
    manifest = load_manifest(data.manifest("s3", **{form: f"s3://{bucket.name}/*.{form}"}, **columns))
    extract(manifest, bucket.url, SMALL)
    cache = FeatureCache.open(bucket.url)
    assert cache.image_set().complete("train")
    assert all(len(file.stamp.strip('"')) == 32 for file in cache.source.files)  # an ETag is an MD5
    pictures = find_pictures(cache, data.folder)
    assert all(pictures.open(name).getvalue() == content for name, content, *_ in data.rows)
    pictures.close()
    (last,) = cache.source.files[-1:]
    put(last.name.rpartition("/")[2], b"something else")  # by another client, whose writes ours does not see
    with pytest.raises(ManifestError, match="it has changed since it was looked through"):
        extract(manifest, bucket.url, SMALL)
