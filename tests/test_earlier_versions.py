"""What earlier versions wrote opens, and goes on as it would have there."""

import json
import shutil
from dataclasses import replace

import pytest
from conftest import GOLDEN
from small_extraction import SMALL, files
from small_runs import NETWORK, make_pictures

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.extraction.extraction import extract

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Copy what version 0.1.0 wrote into the working folder, and make the pictures that it was made of."""
    shutil.copytree(GOLDEN / "version-0.1.0", tmp_path / "written")
    monkeypatch.chdir(tmp_path / "written")
    return load_manifest(make_pictures(tmp_path / "pictures"))


def test_a_finished_store_is_finished_and_sound(written):
    before = files("pictures.zarr")
    summary = extract(written, "pictures.zarr", replace(SMALL, visual=NETWORK))
    assert [(features.shards, features.shards_before) for features in summary.sets] == [(0, 4), (0, 4)]
    assert files("pictures.zarr") == before
    assert verify("pictures.zarr").ok


def test_a_stopped_extraction_goes_on(written):
    before = files("stopped.zarr")
    summary = extract(written, "stopped.zarr", replace(SMALL, visual=NETWORK))
    assert [(features.shards, features.shards_before) for features in summary.sets] == [(2, 2), (2, 2)]
    after = files("stopped.zarr")
    assert {name: after[name] for name in before} == before
    # Features that another processor computed may differ in the last bit, so that only their names are compared.
    assert after.keys() == files("pictures.zarr").keys()
    captions = {name for name in after if name.startswith(("captions/", "samples/"))}
    assert {name: after[name] for name in captions} == {name: files("pictures.zarr")[name] for name in captions}


def test_a_stopped_training_goes_on(written):
    expected = json.loads((GOLDEN / "version-0.1.0" / "expected.json").read_text())
    train("pictures.zarr", Run("stopped-run").recipe, "stopped-run", device="cpu", resume=True)
    for line, want in zip(Run("stopped-run").metrics(), expected["metrics"], strict=True):
        assert line["parts"] == pytest.approx(want.pop("parts"), rel=1e-4)
        assert {key: line[key] for key in want} == pytest.approx(want, rel=1e-4)
    result = evaluate("stopped-run", device="cpu").to_dict()
    for table, want in zip(result["results"], expected["evaluation"]["results"], strict=True):
        for key, value in want.items():
            assert table[key] == (pytest.approx(value, rel=1e-4) if not isinstance(value, str | None) else value), key
