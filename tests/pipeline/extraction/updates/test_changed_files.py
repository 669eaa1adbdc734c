"""Updates at files that change while nothing else does, at others that write meanwhile, and at parts of a store."""

from dataclasses import replace
from pathlib import Path

import pytest
from changing_data import OPTIONS, Picture, content, pictures, use, write

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.generations import generations, make_current, store_of
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction import extraction
from xret.pipeline.extraction.extraction import extract

SMALL = replace(OPTIONS, text=None)
UPDATE = replace(SMALL, update=True)
DATA = pictures(train=2, val=1, test=1)


class Killed(BaseException):
    """What nobody catches."""


@pytest.fixture
def encoded(monkeypatch):
    return use(monkeypatch)[0]


@pytest.fixture
def url(encoded, tmp_path):
    url = str(tmp_path / "s.zarr")
    extract(write(tmp_path / "data", DATA), url, SMALL)
    encoded.clear()
    return url


def stopped(monkeypatch, manifest, url):
    """Update a store up to the moment before the new generation becomes the current one."""

    def die(_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "finish", die)
        with pytest.raises(Killed):
            extract(manifest, url, UPDATE)


def states(url):
    return [(one.number, one.state) for one in generations(url)]


def other(data, name, number=77):
    return [replace(one, content=number) if one.name == name else one for one in data]


def test_the_current_generation_never_goes_back(url, tmp_path, monkeypatch):
    stopped(monkeypatch, write(tmp_path / "data", DATA[1:]), url)
    place_of = extraction.place_of

    def late(*arguments):
        place = place_of(*arguments)
        assert place.url.endswith("generations/2")
        monkeypatch.setattr(extraction, "place_of", place_of)
        extract(write(tmp_path / "b", DATA[:-1]), url, UPDATE)  # another process, which makes 3 and removes 2
        return place

    monkeypatch.setattr(extraction, "place_of", late)
    with pytest.raises(CacheError, match=r"another process has updated .*s\.zarr meanwhile; run it again"):
        extract(write(tmp_path / "data", DATA[1:]), url, UPDATE)
    assert states(url) == [(1, "old"), (3, "current")]
    assert not Path(url, "generations/2").exists()
    with pytest.raises(CacheError, match="meanwhile"):
        make_current(store_of(url, generation=2))
    assert states(url) == [(1, "old"), (3, "current")]
    extract(write(tmp_path / "data", DATA[1:]), url, UPDATE)
    assert states(url) == [(1, "old"), (3, "old"), (4, "current")]
