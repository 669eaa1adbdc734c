"""A store read by others has the numbers that xret reads."""

import re
from itertools import pairwise

import h5py
import numpy as np
import pytest
from documents import block
from foreign import needed, node, of_others
from small_bert import save_bert
from small_runs import make_store

from xret import FeatureCache

pytestmark = of_others


def tensorstore(url, name):
    spec = {"driver": "zarr3", "kvstore": f"file://{url}/{name}"}
    return needed("tensorstore").open(spec).result().read().result()


def xarray(url, name):
    group, _, array = name.rpartition("/")
    return needed("xarray").open_zarr(url, group=group, consolidated=False)[array].to_numpy()


def dask(url, name):
    return needed("dask.array").from_zarr(url, component=name).compute()


ZARRITA = """
import * as zarr from "zarrita";
import FileSystemStore from "@zarrita/storage/fs";
const [url, name] = process.argv.slice(2);
const array = await zarr.open.v3(zarr.root(new FileSystemStore(url)).resolve(name), {kind: "array"});
const {data, shape} = await zarr.get(array);
console.log(JSON.stringify({shape, data: Array.from(data, String)}));
"""


def zarrita(url, name):
    found = node(ZARRITA, url, name)
    kind = int if re.fullmatch(r"-?\d+", found["data"][-1]) else float
    return np.array([*map(kind, found["data"])]).reshape(found["shape"])


@pytest.fixture(scope="module", params=["float16", "float32"])
def url(request, made):
    weights = str(save_bert(made.folder / "bert"))
    how = {"text": "bert", "text_weights": weights, "dtype": request.param}
    return make_store(made.manifest, made.folder / f"{request.param}.zarr", **how)


@pytest.mark.parametrize("read", [tensorstore, xarray, dask, zarrita])
def test_arrays_are_those_that_xret_reads(url, read):
    if read is zarrita and "float16" in url:
        pytest.skip("zarrita reads float16 where JavaScript has Float16Array: Node 24")
    cache = FeatureCache.open(url)
    images, captions, samples = cache.image_set(), cache.caption_set(), np.arange(cache.images)
    expected = {name: images.array(name, samples) for name in images.array_names} | {"length": images.length}
    for name, values in expected.items():
        np.testing.assert_array_equal(read(url, f"{images.path}/{name}"), values)
    start, length, local = (read(url, f"{captions.path}/{name}").astype(float) for name in ("start", "length", "local"))
    for row, (first, count) in enumerate(zip(start.astype(int), length.astype(int), strict=True)):
        np.testing.assert_array_equal(local[first : first + count], captions.local(np.array([row])))
    ends = np.append(0, read(url, "samples/caption_offset")).astype(int)
    texts = bytes(read(url, "samples/caption").astype(np.uint8).tolist())
    assert [texts[a:b].decode() for a, b in pairwise(ends)][-33:] == cache.caption_texts(0, 33)


@pytest.mark.parametrize("package", ["netCDF4", "h5netcdf"])
def test_a_split_in_hdf5_is_read_by_tools_of_netcdf(url, tmp_path, monkeypatch, package):
    if "float16" in url:
        pytest.skip("netCDF has no float16")
    monkeypatch.chdir(tmp_path)
    exec(block("docs/how-to/import.md", "to_hdf5").replace("holiday.zarr", url), {})
    module = needed(package)
    opened = module.File("test.h5", phony_dims="sort") if package == "h5netcdf" else module.Dataset("test.h5")
    with h5py.File("test.h5") as file, opened as other:
        for path in ("images/local", "images/length", "captions/local", "captions/length", "captions/image"):
            np.testing.assert_array_equal(other[path][:], file[path][:])
