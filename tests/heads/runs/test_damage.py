"""What is damaged in a run is refused in one sentence, and never read as something else."""

import json
import random
import shutil

import pytest
import torch
from earlier_runs import without_digests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import make_store

from xret.heads.recipes.recipe import load_recipe
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FILES = ("run.json", "config.json", "vocabulary.json", "model.safetensors", "state.pt", "metrics.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    store = make_store(folder / "small.zarr", train=24)
    recipe = load_recipe("vsepp", ["model.dim=8", "adapter.words.word_dim=4", "schedule.epochs=1"])
    train(store, recipe, folder / "run", device="cpu")
    return folder / "run"


def content(folder):
    """All that a run gives to whoever reads it."""
    run = Run(folder)
    info = {key: value for key, value in vars(run.info).items() if key != "more"}  # what no version knows
    weights = {name: tensor.tolist() for name, tensor in run.model(CPU).state_dict().items()}
    state = repr(run.load_state()), run.metrics()
    return info, run.recipe, run.image_facts, run.text_facts, run.vocabulary, weights, state


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_or_changes_nothing(run, tmp_path, name):
    folder = shutil.copytree(run, tmp_path / "run")
    whole, sound, dice, refused = content(run), (run / name).read_bytes(), random.Random(7), 0
    for _ in range(200):
        bit = dice.randrange(8 * len(sound))
        spoilt = bytearray(sound)
        spoilt[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(spoilt)
        try:
            assert content(folder) == whole, bit
        except RunError as error:
            assert name in str(error) and "\n" not in str(error)
            refused += 1
    assert refused == 200 or name == "run.json"  # which has blanks between what it says
    assert refused > 150


def test_what_is_cut_short_or_lost_is_refused(run, tmp_path):
    for name in FILES[1:]:
        folder = shutil.copytree(run, tmp_path / name)
        (folder / name).write_bytes((run / name).read_bytes()[:-1])
        with pytest.raises(RunError, match=f"{name} is missing or damaged; restore it"):
            content(folder)
        (folder / name).unlink()
        with pytest.raises(RunError, match=f"has lost its {name}; restore it, or train with another --out"):
            content(folder)


def test_a_search_by_damaged_weights_is_refused(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    for use in (lambda it: it.model, lambda it: it.weights_digest, lambda it: it.search("red")):
        with pytest.raises(RunError, match=r"model\.safetensors is missing or damaged"):
            use(Retriever(folder, device="cpu"))


def places(value, path=()):
    """The paths of all values in nested JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


@pytest.mark.parametrize("name", ["config.json", "run.json"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_of_wrong_types_are_a_sentence(run, tmp_path, name, data):
    folder = tmp_path / "run"
    if not folder.exists():
        without_digests(shutil.copytree(run, folder))
        shutil.copyfile(folder / "run.json", tmp_path / "run.json")
    source = tmp_path / name if name == "run.json" else run / name
    forged = json.loads(source.read_text())
    *path, last = data.draw(st.sampled_from(places(forged)[1:]))
    block = forged
    for key in path:
        block = block[key]
    wrong = st.sampled_from([None, True, 0, -1, 2**63, 1e300, "", "x", [], [1], ["x"], {}, {"x": 1}])
    block[last] = data.draw(wrong)
    (folder / name).write_text(json.dumps(forged))
    try:
        opened = Run(folder)
        opened.model(CPU)
    except RunError as error:
        assert "\n" not in str(error)
