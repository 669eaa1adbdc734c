"""Features and trainings are what they were when they were recorded; see `unchanged`, which also compares the bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("timm")  # before `unchanged`, which asks for its version

import unchanged
from unchanged import ANSWERING, ENCODERS, RECORDED, SYSTEMS

BEFORE = json.loads(RECORDED.read_text())
SLOW = {"butd": [pytest.mark.slow]}  # half a minute: the network sees 600 pixels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("unchanged")


@pytest.fixture(scope="module")
def given(folder):
    return unchanged.make_pictures(folder / "data"), unchanged.make_models(folder / "models")


@pytest.fixture(scope="module")
def store(folder, given):
    return unchanged.make_training_store(folder, *given)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, [])) for name in ENCODERS])
def test_features(folder, given, name):
    found, before = unchanged.features(name, folder, *given), BEFORE["features"][name]
    assert found.keys() == before.keys()
    for key, now in found.items():
        assert now["is"] == before[key]["is"], key
        assert now["norm"] == pytest.approx(before[key]["norm"], rel=1e-3), key
        assert now["projected"] == pytest.approx(before[key]["projected"], rel=0, abs=1e-3), key


@pytest.mark.parametrize("system", SYSTEMS)
def test_training(folder, store, system):
    found, before = unchanged.train(store, system, folder / system), BEFORE["training"][system]
    here = unchanged.machine() == BEFORE["machine"]  # another one rounds otherwise, and Adam takes it for more
    near = 1e-4 if here else 3e-3
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in before], rel=near)
    if here:  # two scores may round to the other order
        assert [line["rsum"] for line in found] == pytest.approx([line["rsum"] for line in before], rel=1e-4)


@pytest.mark.parametrize("system", ANSWERING)
def test_answers(folder, store, system):
    if not (folder / system).exists():
        unchanged.train(store, system, folder / system)
    found, before = unchanged.answers(store, system, folder), BEFORE["answers"][system]
    assert found["exports"].keys() == before["exports"].keys()
    for key, now in found["exports"].items():
        assert now["is"] == before["exports"][key]["is"], key
        assert now["projected"] == pytest.approx(before["exports"][key]["projected"], rel=0, abs=3e-3), key
    for text, hits in found["searches"].items():
        assert [score for _, score in hits] == pytest.approx([score for _, score in before["searches"][text]], abs=3e-3)
        if unchanged.machine() == BEFORE["machine"]:  # elsewhere two scores may round to the other order
            assert [name for name, _ in hits] == [name for name, _ in before["searches"][text]]


@pytest.mark.parametrize("how", ["--small", pytest.param("--kills=40", marks=[pytest.mark.slow])])
@pytest.mark.timeout(1800)
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(how):
    tests = Path(__file__).parent
    words = [sys.executable, str(tests / "benchmarks" / "kills.py"), how]
    paths = os.pathsep.join([str(tests / "support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
