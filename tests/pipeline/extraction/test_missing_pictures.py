"""Pictures that are missing are told before anything is computed; what is done needs none of them."""

from dataclasses import replace

import pytest
import small_encoder
from command_line import refused
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import ManifestError
from xret.pipeline.extraction import extraction, options
from xret.pipeline.extraction.extraction import extract

IMAGES = replace(SMALL, text=None)


@pytest.fixture
def manifest(tiny_dataset, monkeypatch):
    small_encoder.use(monkeypatch)
    return load_manifest(tiny_dataset())  # 20, 6 and 6 pictures in shards of at most 8


def lose(manifest, *numbers):
    for number in numbers:
        (manifest.images / f"{number}.jpg").rename(manifest.images / f"{number}.lost")


def refusal(manifest, url, options):
    with pytest.raises(ManifestError) as caught:
        extract(manifest, str(url), options)
    return str(caught.value)


def test_all_are_counted_and_the_first_named_before_a_store_is_there(tiny_dataset, tmp_path):
    path = tiny_dataset()
    for number in (1, 3, 20, 30, 31):
        (path.parent / "images" / f"{number}.jpg").unlink()
    words = ["extract", path, "--store", tmp_path / "s", "--visual", "resnet18"]
    words += ["--visual-weights", "random:0", "--text", "none"]
    said = refused(*words)
    folder = path.parent
    assert said == (
        f"{folder / 'images'}: 5 pictures of 32 are missing (1.jpg, 3.jpg, 20.jpg, and 2 more); put them there,"
        f" correct {folder / 'captions.json'}, or go on with --on-error skip."
    )
    assert "1 picture of 6 is missing (20.jpg);" in refused(*words, "--splits", "val")
    assert not (tmp_path / "s").exists()


def test_a_finished_set_of_another_version_needs_no_pictures(manifest, tmp_path, monkeypatch):
    url = str(tmp_path / "s")
    extract(manifest, url, IMAGES)
    lose(manifest, *range(32))
    monkeypatch.setattr(options, "version", lambda _name: "0.0.9")
    assert [one.samples for one in extract(manifest, url, SMALL).sets] == [0, 80]


def test_captions_alone_need_no_pictures(manifest, tmp_path):
    lose(manifest, *range(32))
    assert extract(manifest, str(tmp_path / "s"), replace(SMALL, visual=None)).sets[0].samples == 80


def test_skipped_ones_are_recorded(manifest, tmp_path):
    lose(manifest, 2, 25)
    (found,) = extract(manifest, str(tmp_path / "s"), replace(IMAGES, on_error="skip")).sets
    assert found.reasons == ("2.jpg: there is no such file", "25.jpg: there is no such file")


def test_pictures_of_finished_shards_are_not_needed(manifest, tmp_path):
    url = tmp_path / "s"
    lose(manifest, 2)
    extract(manifest, str(url), replace(IMAGES, on_error="skip", splits=("train",)))
    lose(manifest, 5, 21, 27)
    before = files(url)
    assert "2 pictures of 12 are missing (21.jpg, 27.jpg)" in refusal(manifest, url, IMAGES)
    assert files(url) == before
    assert "4 pictures of 32 are missing" in refusal(manifest, url, replace(IMAGES, dtype="float32"))
    for number in (21, 27):
        (manifest.images / f"{number}.lost").rename(manifest.images / f"{number}.jpg")
    assert extract(manifest, str(url), IMAGES).sets[0].samples == 12


def test_what_is_finished_is_not_looked_for(manifest, tmp_path, monkeypatch):
    url = str(tmp_path / "s")
    extract(manifest, url, SMALL)
    monkeypatch.setattr(extraction, "missing_from", None)
    for how in (SMALL, replace(SMALL, update=True), replace(SMALL, repair=True)):
        assert [one.samples for one in extract(manifest, url, how).sets] == [0, 0]


@pytest.mark.parametrize("on_error", ["skip", "fail"])
def test_a_repair_needs_the_pictures_of_good_features(manifest, tmp_path, on_error):
    url = tmp_path / "s"
    lose(manifest, 2)
    extract(manifest, str(url), replace(IMAGES, on_error="skip"))
    lose(manifest, 1)  # of the same shard
    before, how = files(url), replace(IMAGES, on_error=on_error, repair=True)
    assert "1 picture of the shards to repair is missing (1.jpg), whose features" in refusal(manifest, url, how)
    assert files(url) == before
    for number in (1, 2):
        (manifest.images / f"{number}.lost").rename(manifest.images / f"{number}.jpg")
    assert extract(manifest, str(url), how).sets[0].failed == 0


def test_an_update_tells_as_well_and_leaves_the_store_as_it_was(manifest, tmp_path):
    url = tmp_path / "s"
    extract(manifest, str(url), IMAGES)
    captions = manifest.captions
    captions.write_text(captions.read_text().replace('"31.jpg"', '"new.jpg"'))
    before = files(url)
    said = refusal(manifest, url, replace(IMAGES, update=True))
    assert "1 picture of 32 is missing (new.jpg)" in said
    assert files(url) == before
