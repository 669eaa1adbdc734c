"""A finished run that goes on with more epochs, and a run that begins with the weights of another."""

import pytest
from command_line import refused
from safetensors.torch import load_file
from small_store import make_store
from small_trainings import assert_equal, numbers, state_of

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

SMALL = ["data.unit=image", "model.dim=8", "adapter.words.word_dim=4", "data.batch_size=4", "optimizer.lr=0.01"]
ALIKE = "adapter.grid.standardize=true"


def recipe_of(epochs, *settings):
    return load_recipe("vsepp", [*SMALL, f"schedule.epochs={epochs}", *settings])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s.zarr", train=12, val=4, test=4)


@pytest.mark.parametrize(
    "settings",
    [
        ["schedule=step", "schedule.step=1", "schedule.gamma=0.5", "optimizer.ema=0.9"],
        ["schedule.name=constant", "optimizer=sgd", "schedule.warmup_epochs=1"],
    ],
)
def test_a_longer_run_is_that_of_as_many_epochs_from_the_beginning(store, tmp_path, settings):
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(store, recipe_of(4, *settings), whole, device="cpu")
    train(store, recipe_of(2, *settings), run, device="cpu")
    found = train(store, recipe_of(4, *settings), run, device="cpu", resume=True)
    assert (found.epochs, found.trained) == (4, 2)
    assert_equal(numbers(run), numbers(whole))
    assert Run(run).info == Run(whole).info
    assert (run / "recipe.yaml").read_text() == (whole / "recipe.yaml").read_text()
    assert train(store, recipe_of(4, *settings), run, device="cpu", resume=True).trained == 0
    with pytest.raises(RunError, match=r"begun otherwise: schedule\.epochs is 4 there and 3 now"):
        train(store, recipe_of(3, *settings), run, device="cpu", resume=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["schedule.name=cosine"], "the learning rate of schedule.name=cosine falls to 0 over all epochs"),
        (["schedule.name=linear"], "the learning rate of schedule.name=linear falls to 0 over all epochs"),
        (["schedule=step", "optimizer.swa_epochs=1"], "optimizer.swa_epochs averages over the last epochs"),
        (["schedule.name=constant", "optimizer.lr=0", "schedule.patience=1"], "schedule.patience=1 stopped it after"),
    ],
)
def test_what_cannot_be_made_longer_says_why(store, tmp_path, settings, why):
    epochs = 9 if "schedule.patience=1" in settings else 1
    train(store, recipe_of(epochs, *settings), tmp_path / "run", device="cpu")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    longer = (*SMALL, f"schedule.epochs={epochs + 1}", *settings)
    words = [word for setting in longer for word in ("--set", setting)]
    said = refused("train-head", store, "--recipe", "vsepp", "--out", tmp_path / "run", *words, "--resume")
    assert f"cannot be made longer, because {why}" in said and f"--init-from {tmp_path / 'run'}" in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.fixture
def base(store, tmp_path):
    train(store, recipe_of(2, ALIKE), tmp_path / "base", device="cpu")
    return tmp_path / "base"


def weights(run):
    return load_file(run / "model.safetensors")


def test_a_run_begins_with_the_weights_of_another(store, tmp_path, base):
    """At a learning rate of zero they stay what they were, also after a stop and with another seed."""
    still, how = [ALIKE, "optimizer.lr=0", "schedule.name=constant"], {"device": "cpu", "seed": 5}
    train(store, recipe_of(1, *still), tmp_path / "run", init_from=base, **how)
    assert_equal(weights(tmp_path / "run"), weights(base))
    assert Run(tmp_path / "run").info.init_from == str(base)
    for epochs, name in ((2, None), (3, base)):  # with its own state it needs the other no longer
        again = train(store, recipe_of(epochs, *still), tmp_path / "run", resume=True, init_from=name, **how)
        assert again.trained == 1
    assert_equal(weights(tmp_path / "run"), weights(base))


def test_a_run_begins_with_what_the_losses_of_another_have_learned(store, tmp_path):
    """Where both have the same term with the same values; another value begins anew."""

    def scale_of(name, *settings, **words):
        train(store, recipe_of(1, *settings), tmp_path / name, device="cpu", **words)
        return state_of(tmp_path / name)["losses"]["infonce.scale"].item()

    learned = scale_of("base", "loss.infonce.weight=1", "loss.infonce.scale=5")
    assert learned != 5
    still, base = ["optimizer.lr=0", "loss.infonce.weight=0.5", "loss.sigmoid.weight=1"], tmp_path / "base"
    assert scale_of("same", *still, "loss.infonce.scale=5", init_from=base) == pytest.approx(learned)
    assert scale_of("other", *still, "loss.infonce.scale=7", init_from=base) == pytest.approx(7)
    (base / "checkpoint.pt").unlink()  # as of a run that was handed on without it
    assert scale_of("without", *still, "loss.infonce.scale=5", init_from=base) == 5


def test_before_its_first_state_a_run_takes_the_weights_again(store, tmp_path, base, monkeypatch):
    recipe = recipe_of(1, ALIKE)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("xret.heads.training.trainer.Trainer.train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(store, recipe, tmp_path / "run", device="cpu", init_from=base)
    train(store, recipe, tmp_path / "whole", device="cpu", init_from=base)
    train(store, recipe, tmp_path / "run", device="cpu", resume=True)
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_weights_that_do_not_fit_wholly_are_refused(store, tmp_path, base):
    other = make_store(tmp_path / "other.zarr", train=12, val=4, test=4, words="unheard")
    for url, settings, sentence in (
        (store, ["model.dim=6", ALIKE], rf"the weights of {base} do not fit: .*is \[8, .* there and \[6, "),
        (store, [], " there and absent now"),  # the statistics that the other run standardises by
        (store, [ALIKE, "adapter.words.vectors=glove.txt"], r"began otherwise: .* is None there and glove\.txt now"),
        (other, [ALIKE], r"base knows other words than the captions of .*other\.zarr; `init_from` takes"),
    ):
        with pytest.raises(RunError, match=sentence):
            train(url, recipe_of(1, *settings), tmp_path / "run", device="cpu", init_from=base)
    with pytest.raises(RunError, match=r"has no run\.json"):
        train(store, recipe_of(1), tmp_path / "run", device="cpu", init_from=tmp_path / "nothing")
    with pytest.raises(RunError, match="is no run"):
        train(store, recipe_of(1), tmp_path / "run", device="cpu", init_from="")
    assert not (tmp_path / "run").exists()


def test_other_features_are_named_and_another_beginning_is_refused(store, tmp_path, base, caplog):
    other = make_store(tmp_path / "other.zarr", train=12, val=4, test=4, weights="b")
    train(other, recipe_of(1, ALIKE), tmp_path / "run", device="cpu", init_from=base)
    assert f"--init-from: {base} has learnt from other features (grid@" in caplog.text
    train(store, recipe_of(1, ALIKE), tmp_path / "plain", device="cpu")
    with pytest.raises(RunError, match=r"run was begun with `init_from` .*base; resume it so"):
        train(other, recipe_of(1, ALIKE), tmp_path / "run", device="cpu", resume=True, init_from=tmp_path / "plain")
    with pytest.raises(RunError, match=r"plain was begun without `init_from`; resume it so"):
        train(store, recipe_of(1, ALIKE), tmp_path / "plain", device="cpu", resume=True, init_from=base)
