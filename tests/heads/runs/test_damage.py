"""What is damaged or missing in a run is refused in one sentence."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import make_store

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FILES = ("run.json", "config.json", "vocabulary.json", "model.safetensors", "checkpoint.pt", "metrics.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    store = make_store(folder / "small.zarr", train=24)
    train(store, load_recipe("vsepp", {"model.dim": 8, "schedule.epochs": 1}), folder / "run", device="cpu")
    return folder / "run"


def use(folder):
    run = Run(folder)
    run.model(CPU)
    run.load_checkpoint()
    run.metrics()


@pytest.mark.parametrize("name", FILES)
def test_what_is_cut_short_or_lost_is_refused(run, tmp_path, name):
    folder = shutil.copytree(run, tmp_path / "run")
    sound = (run / name).read_bytes()
    (folder / name).write_bytes(sound[: len(sound) // 2])
    with pytest.raises(RunError, match=name):
        use(folder)
    (folder / name).unlink()
    if name in ("run.json", "config.json", "vocabulary.json", "model.safetensors"):  # the others may be left out
        with pytest.raises(RunError, match=name):
            use(folder)


def test_a_run_of_another_version_is_refused(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"version": 1}))
    with pytest.raises(RunError, match="is not of format xret-run, version 2; train it again"):
        Run(folder)


def test_a_folder_without_a_run_names_one_inside(run):
    with pytest.raises(RunError, match=rf"is no run: it has no run\.json; name the folder of a run, such as {run}"):
        Run(run.parent)
    with pytest.raises(RunError, match="make one with `xret train-head"):
        Run(run / "absent")


def places(value, path=()):
    """The paths of all values in nested JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_of_wrong_types_are_a_sentence(run, tmp_path, data):
    folder = tmp_path / "run"
    if not folder.exists():
        shutil.copytree(run, folder)
    forged = json.loads((run / "config.json").read_text())
    *path, last = data.draw(st.sampled_from(places(forged)[1:]))
    block = forged
    for key in path:
        block = block[key]
    block[last] = data.draw(st.sampled_from([None, True, -1, 1e300, "x", [1], {"x": 1}]))
    (folder / "config.json").write_text(json.dumps(forged))
    try:
        Run(folder).model(CPU)
    except RunError as error:
        assert "\n" not in str(error)
