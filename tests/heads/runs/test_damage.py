"""What is damaged or missing in a run is refused in one sentence."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from edited_runs import edited
from small_trainings import recipe_of

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(trained):
    return trained()


def use(folder):
    run = Run(folder)
    run.model(CPU)
    run.load_checkpoint()
    run.metrics()


@pytest.mark.parametrize("name", ["run.json", "model.safetensors", "checkpoint.pt", "metrics.jsonl"])
def test_what_is_cut_short_or_lost_is_refused(run, tmp_path, name):
    folder = shutil.copytree(run, tmp_path / "run")
    sound = (run / name).read_bytes()
    (folder / name).write_bytes(sound[: len(sound) // 2])
    with pytest.raises(RunError, match=name):
        use(folder)
    (folder / name).unlink()
    if name in ("run.json", "model.safetensors"):  # the others may be left out
        with pytest.raises(RunError, match=name):
            use(folder)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("format", "xret-run", r"is of format 'xret-run', not 'xret-run \d+'; train the run again"),
        ("recipe", {"name": "x"}, r"run\.json is damaged \(.*similarity\.name is missing.*\); restore it"),
        ("image", None, r"run\.json is damaged"),
        ("strange", 1, r"run\.json is damaged"),
        ("image_facts", [{"kind": "grid", "channels": 9, "global_channels": 9}], "does not fit the run's run.json"),
    ],
)
def test_other_values_are_refused(run, tmp_path, key, value, sentence):
    folder = edited(shutil.copytree(run, tmp_path / "run"), **{key: value})
    with pytest.raises(RunError, match=sentence) as caught:
        use(folder)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_refused(run, tmp_path):
    wider = recipe_of("vsepp", 2, "model.dim=32")
    folder = edited(shutil.copytree(run, tmp_path / "run"), recipe=wider.to_dict())
    with pytest.raises(RunError, match=r"checkpoint\.pt does not fit the run's run\.json"):
        train(Run(folder).info.store, wider, folder, device="cpu", resume=True)


def test_a_run_of_before_has_keys_that_do_not_count(run, tmp_path):
    now, folder = Run(run).recipe, shutil.copytree(run, tmp_path / "run")
    before = asdict(load_recipe("vsepp", ["optimizer.beta2=0.9", "runtime.cache=memory"]))
    for key in ("code", "sources", "conditions"):
        del before[key]
    before |= {key: value for key, value in now.to_dict().items() if key not in ("data", "adapter")}
    before["data"] |= {"batch_size": now.data.batch_size}
    before["adapter"] |= now.adapter
    file = folder / "run.json"
    written = json.loads(file.read_text()) | {"recipe": before | {"expected": {"f30k": None}, "paper": "unknown"}}
    del written["runtime"]
    file.write_text(json.dumps(written))
    assert Run(folder).recipe.to_dict() == now.to_dict() | {"expected": {}, "paper": "unknown"}
    assert train(Run(folder).info.store, now, folder, device="cpu", resume=True).trained == 0


def test_a_run_that_was_handed_on_without_its_checkpoint_is_not_trained_again(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint.pt"))
    with pytest.raises(RunError, match=r"has lost its checkpoint\.pt"):
        train(Run(folder).info.store, Run(folder).recipe, folder, device="cpu", resume=True)
    assert (folder / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_a_folder_without_a_run_names_one_inside(run):
    with pytest.raises(RunError, match=rf"it has no run\.json; name the folder of a run, such as {run.parent}"):
        Run(run.parent)
    with pytest.raises(RunError, match="make one with `xret train-head"):
        Run(run / "absent")
