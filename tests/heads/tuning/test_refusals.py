"""What a tuning refuses: a folder of another, a damaged one, and what is not its best run."""

import json
import re
import shutil

import pytest
from small_store import make_store
from small_tunings import SETTINGS, heavy, tuned

from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.training import train
from xret.pipeline.errors import CacheError, RecipeError, RunError, XretError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_folder_belongs_to_one_tuning(stores, whole, tmp_path):
    out, found = whole
    with pytest.raises(RunError, match=r"another tuning: space.optimizer.lr is 0.0001:0.01:log there and 0.001:1 now;"):
        tuned(stores(), out, space=["optimizer.lr=1e-3:1"])
    with pytest.raises(RunError, match=r"recipe.schedule.epochs is 6 there and 7 now"):
        tuned(stores(), out, settings=[*SETTINGS[:-1], "schedule.epochs=7"])
    with pytest.raises(RunError, match=r"another tuning: name is vsepp there and vse-infty now"):
        tuned(stores(), out, "vse-infty")
    with pytest.raises(RunError, match="seed is 0 there and 1 now"):
        tuned(stores(), out, seed=1)
    with pytest.raises(RunError, match="image_set is grid"):
        tuned(make_store(tmp_path / "s.zarr", train=12, val=4, test=4, weights="b"), out)
    with pytest.raises(RunError, match="belongs to the tuning of a single recipe"):
        tuned(stores(), out, "vsepp", "vse-infty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no tuning"):
        tuned(stores(), tmp_path / "full")
    with pytest.raises(RunError, match=r"space.optimizer.beta1 is absent there and 0.8:0.9 now"):
        tuned(stores(), out, space=["optimizer.beta1=0.8:0.9"])
    shutil.copytree(out, again := tmp_path / "again")
    assert tuned(stores(), again, settings=[*SETTINGS, "runtime.cache=pinned"], ties="mean").trials == found.trials
    assert json.loads((again / "result.json").read_text())["run"] == str(again / "best")


def test_faults_of_all_recipes_come_at_once_and_nothing_is_made(stores, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RecipeError, match=r"recipe 'vsepp' has no key similarity.alpha.*recipe 'pcmepp' has no key"):
        tuned(stores(), out, "vsepp", "pcmepp", space=["similarity.alpha=1:2"])
    with pytest.raises(RecipeError, match=r"has no key similarity.*; adapter\.roi\.noise is not in use with these"):
        idle = [*SETTINGS, "adapter.roi.noise=0.1"]
        tuned(stores(), out, "vsepp", "pcmepp", settings=idle, space=["similarity.alpha=1:2"])
    decay = [*SETTINGS, "optimizer.decay=all"]
    assert tuned(stores(), tmp_path / "decays", settings=decay, trials=1)  # the space varies weight decay
    with pytest.raises(RecipeError, match=r"optimizer\.decay has no effect while optimizer\.weight_decay is 0\.0"):
        tuned(stores(), out, settings=[*decay, "optimizer.weight_decay=0"])
    with pytest.raises(RecipeError, match="have one name, and would share a folder"):
        tuned(stores(), out, "vsepp", "vsepp")
    with pytest.raises(CacheError, match="has no split 'test'"):
        tuned(make_store(tmp_path / "s.zarr", train=12, val=4, test=0), out)
    assert not out.exists()


def test_a_busy_or_damaged_folder(stores, whole, tmp_path):
    from xret.pipeline.cache.storage.lease import locked

    out = whole[0]
    with locked(out, RuntimeError("busy")), pytest.raises(RunError, match="another tuning is at work in"):
        tuned(stores(), out)
    other = tmp_path / "out"
    other.mkdir()
    (other / "tuning.json").write_text((out / "tuning.json").read_text())
    (other / "journal.log").write_text("rubbish\n{}\n")
    with pytest.raises(RunError, match=r"journal.log is damaged; restore it, or take another --out"):
        tuned(stores(), other)
    shutil.copytree(out, again := tmp_path / "again")
    with (again / "journal.log").open("a") as journal:
        journal.write("rubbish\n")
    with pytest.raises(RunError, match=r"journal.log is damaged; restore it, or take another --out"):
        tuned(stores(), again)
    whole = (out / "journal.log").read_text().splitlines(keepends=True)
    signs = ('"op_code":4', '"op_code":5', '"user_attr":{"rsum"')  # it is begun, has a value, has an end
    begun, value, end = (next(line for line in whole if sign in line) for sign in signs)
    for left in (
        [],
        whole[1:],
        ["5\n", *whole],
        *([line for line in whole if line != lost] for lost in (begun, value, end)),
    ):
        (again / "journal.log").write_text("".join(left))
        with pytest.raises(RunError, match=r"journal.log is damaged; restore it, or take another --out"):
            tuned(stores(), again)
        assert heavy(again) == ["best"]
        assert (again / "journal.log").read_text() == "".join(left)
    shutil.rmtree(again / "best")
    for left in ([], [line for line in whole if line != end]):
        (again / "journal.log").write_text("".join(left))
        with pytest.raises(RunError, match=r"journal.log is damaged; restore it, or take another --out"):
            tuned(stores(), again)
        assert (again / "trials.csv").read_text() == (out / "trials.csv").read_text()


def test_the_run_of_another_trial_is_not_taken_for_the_best(stores, tmp_path):
    out = tmp_path / "out"
    tuned(stores(), out, trials=1)
    before = (out / "journal.log").read_bytes()
    assert tuned(stores(), out, trials=2).best.number == 1
    (out / "journal.log").write_bytes(before)  # restored from an older copy
    said = r"best has validation RSUM 455\.0, and trial 0, the best in .*journal\.log, has 420\.0; restore"
    with pytest.raises(RunError, match=said):
        tuned(stores(), out, trials=1)


def test_a_result_of_another_best_run_is_not_taken_for_its_own(stores, whole, tmp_path):
    out, (result,) = tmp_path / "out", whole[1].evaluation.results
    shutil.copytree(whole[0], out)
    for key in ("values", "validation_rsum"):
        found = json.loads((out / "result.json").read_text())
        found["results"][0]["rsum"] = 599.0
        (out / "result.json").write_text(json.dumps(found))
        assert tuned(stores(), out, ties="mean").evaluation.results[0].rsum == 599
        (out / "result.json").write_text(json.dumps(found | {key: None}))
        assert tuned(stores(), out, ties="mean").evaluation.results == (result,)


def test_a_result_with_other_ties_is_replaced_with_a_word(stores, whole, tmp_path, capsys):
    shutil.copytree(whole[0], out := tmp_path / "out")
    tuned(stores(), out, ties="mean")
    assert "is written anew" not in capsys.readouterr().err
    tuned(stores(), out, ties="pessimistic")
    assert "result.json is written anew; it held the result with 1 view, ties mean." in capsys.readouterr().err


def test_a_best_run_that_was_lost_is_said_with_what_makes_it_again(stores, whole, tmp_path, capsys):
    shutil.copytree(whole[0], out := tmp_path / "out")
    kept = (out / "best" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "best")
    with pytest.raises(RunError, match=r"best has lost its weights; .* `xret train-head .*`") as caught:
        tuned(stores(), out)
    store, recipe, seed = re.search(r"train-head (\S+) --recipe (\S+) --seed (\d+)", str(caught.value)).groups()
    train(store, load_recipe(recipe), out / "best", device="cpu", seed=int(seed))
    assert (out / "best" / "model.safetensors").read_bytes() == kept
    capsys.readouterr()
    tuned(stores(), out)
    assert re.search(r"^trials finished already: \d+ of \d+$", capsys.readouterr().err, re.MULTILINE)


def test_a_tuning_has_a_trial(stores, tmp_path):
    for wrong, sentence in (
        ({"seed": -1}, "seed must be a whole number .*, not -1"),
        ({"ties": "worst"}, "must be one of"),
    ):
        with pytest.raises(XretError, match=sentence):
            tuned(stores(), tmp_path / "out", **wrong)
        assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="trials must be at least 1, not 0"):
        tuned(stores(), tmp_path / "out", trials=0)
