"""A set with EXIF orientations is another than one of an earlier version, which goes on as it was begun."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from oriented import save, shown
from PIL import Image
from small_extraction import SMALL, files
from small_runs import NETWORK, make_pictures
from torchvision.transforms.functional import pil_to_tensor

from xret.cli import main
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.sources import FolderReader
from xret.pipeline.encoders import load_visual, turns_upright
from xret.pipeline.encoders.detectors.butd import ButdEncoder
from xret.pipeline.encoders.detectors.torchvision_detector import DetectorEncoder
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options, with_backbones
from xret.pipeline.extraction.plan import plan
from xret.pipeline.reading.end_to_end import read_window
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = replace(SMALL, visual=NETWORK)
OLD = replace(OPTIONS, upright=False)
TURNED = (3, 17)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """Make pictures, two of which have an orientation."""
    path = make_pictures(tmp_path_factory.mktemp("oriented") / "pictures")
    for number in TURNED:
        file = path.parent / "images" / f"{number}.png"
        save(file, np.asarray(Image.open(file)), 6)
    return load_manifest(path)


def images(url, generation=None):
    return FeatureCache.open(str(url), generation=generation).image_set()


def test_only_features_of_oriented_pictures_differ(manifest, tmp_path):
    for name, options in (("old", OLD), ("new", OPTIONS)):
        extract(manifest, str(tmp_path / name), replace(options, text=None))
    old, new = images(tmp_path / "old"), images(tmp_path / "new")
    assert old.fingerprint != new.fingerprint
    assert (turns_upright(old.identity), turns_upright(new.identity)) == (False, True)
    for number in range(22):
        same = [np.array_equal(getattr(one, kind)([number]), getattr(other, kind)([number]))
                for one, other, kind in ((old, new, "local"), (old, new, "global_"))]  # fmt: skip
        assert same == [number not in TURNED] * 2
    sizes = [features.array("size", np.array(TURNED)).tolist() for features in (old, new)]
    assert sizes == [[[48, 40]] * 2, [[40, 48]] * 2]
    told = {name: CliRunner().invoke(main, ["cache", "ls", str(tmp_path / name)]).stdout for name in ("old", "new")}
    assert told["old"].splitlines()[0].endswith("100% done  64 pixels, EXIF orientation not applied")
    assert told["new"].splitlines()[0].endswith("100% done  64 pixels, EXIF orientation applied")
    assert (
        "  64 pixels, EXIF orientation not applied\n"
        in CliRunner().invoke(main, ["cache", "info", str(tmp_path / "old")]).stdout
    )


def test_a_set_of_an_earlier_version_goes_on_as_it_was_begun(manifest, tmp_path, capsys):
    url = str(tmp_path / "s.zarr")
    extract(manifest, url, replace(OLD, splits=("val", "test")))
    before, capsys_before = files(url), capsys.readouterr()
    assert "EXIF" not in capsys_before.err
    name = images(url).name
    (planned,) = (one for one in plan(manifest, url, OPTIONS).sets if one.modality == "images")
    assert (planned.name, planned.done) == (name, 2)
    assert files(url) == before
    summary = extract(manifest, url, OPTIONS)
    assert (
        f"Note: an earlier version made '{name}' without applying EXIF orientations, and it" in capsys.readouterr().err
    )
    assert (summary.sets[0].name, summary.sets[0].shards_before) == (name, 2)
    extract(manifest, str(tmp_path / "whole.zarr"), replace(OLD, text=None))
    np.testing.assert_array_equal(
        images(url).global_(np.arange(22)), images(tmp_path / "whole.zarr").global_(np.arange(22))
    )
    finished = files(url)
    assert [one.shards for one in extract(manifest, url, OPTIONS).sets] == [0, 0]
    assert files(url) == finished


def test_an_update_goes_on_with_the_set_of_an_earlier_version(tmp_path):
    url, path = str(tmp_path / "s.zarr"), make_pictures(tmp_path / "pictures")
    extract(load_manifest(path), url, replace(OLD, text=None))
    save(path.parent / "images/17.png", np.asarray(Image.open(path.parent / "images/16.png")), 3)
    (planned,) = plan(load_manifest(path), url, replace(OPTIONS, text=None, update=True)).sets
    assert (planned.name, planned.found) == (images(url).name, 21)
    summary = extract(load_manifest(path), url, replace(OPTIONS, text=None, update=True))
    assert summary.sets[0].found == 21
    old, new = images(url, 1), images(url)
    assert (new.cache.generation, new.name) == (2, old.name)
    np.testing.assert_array_equal(new.global_([17]), new.global_([16]))


def test_sets_of_other_weights_in_an_old_store_are_upright(manifest, tmp_path):
    url, small = str(tmp_path / "s.zarr"), {"text": None, "splits": ("val",)}
    extract(manifest, url, replace(OLD, **small))
    extract(manifest, url, replace(OPTIONS, visual_weights="random:1", **small))
    cache = FeatureCache.open(url)
    assert sorted(turns_upright(cache.image_set(name).identity) for name in cache.set_names("images")) == [False, True]


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": (1, 2)}, {"views": 2, "augment": "crop-flip"}, {"frames": 2}],
    ids=["grid", "pooled", "views", "frames"],
)
def test_whatever_wraps_an_encoder_turns_pictures_as_it_does(tmp_path, options):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    for folder, orientation in (("turned", 8), ("plain", 1)):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "a.png", pixels if orientation == 8 else pixels.swapaxes(0, 1)[::-1], orientation)
    for upright in (True, False):
        encoder = load_visual(NETWORK, "random:0", 64, "cpu", upright=upright, **options)
        paths = [tmp_path / name / ("" if "frames" in options else "a.png") for name in ("turned", "plain")]
        decoded = [encoder.decode_views(path, "k") if "views" in options else encoder.decode(path) for path in paths]
        assert decoded[1][1] == (60, 90)
        assert decoded[0][1] == ((60, 90) if upright else (90, 60))
        assert np.array_equal(decoded[0][0], decoded[1][0]) == upright


def test_runs_of_earlier_versions_with_backbones_of_their_own_do_not_turn_pictures():
    words = {"visual": "resnet18", "text": None}
    assert not Options(**with_backbones(words, None, None)).upright
    assert Options(**with_backbones({**words, "upright": True}, None, None)).upright


@pytest.mark.parametrize("upright", [True, False])
def test_detectors_and_windows_of_a_fine_tuning_turn_pictures_likewise(tmp_path, upright):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    save(tmp_path / "turned.png", pixels, 8)
    save(tmp_path / "plain.png", shown(pixels, 8) if upright else pixels, 1)
    identity = {"preprocessing": {"orientation": "exif"} if upright else {}}
    encoder = SimpleNamespace(identity=identity, _scale=lambda _: 1.0, prepare=pil_to_tensor)
    for kind in (ButdEncoder, DetectorEncoder):
        turned, plain = (kind.decode(encoder, tmp_path / name) for name in ("turned.png", "plain.png"))
        assert turned[1] == plain[1] == ((60, 90) if upright else (90, 60))
        assert str(turned[0]) == str(plain[0])
    reader = FolderReader(tmp_path)
    windows = [read_window(encoder, reader, name, np.random.default_rng(0)) for name in ("turned.png", "plain.png")]
    assert torch.equal(*windows)
