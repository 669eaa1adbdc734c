"""What a training logs: lines for `logging`, train.log in the run's folder, TensorBoard and Weights & Biases."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
from small_store import make_store
from small_trainings import recipe_of

import xret
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.callbacks import LOG, Callback
from xret.heads.training.train import train
from xret.pipeline.errors import RecipeError, RunError

TABLE = {f"{name}{side}" for name in ("r1", "r5", "r10", "medr") for side in ("", "i")} | {"rsum", "epoch"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=24)


@pytest.mark.parametrize(
    ("level", "title", "terms", "lines"),
    [
        (logging.INFO, "", False, 2),
        (logging.DEBUG, "", True, 2),
        (logging.WARNING, "", False, 0),
        (logging.INFO, "cell 1", False, 0),
        (logging.DEBUG, "cell 1", True, 2),
    ],
)
def test_an_epoch_is_a_line(store, tmp_path, caplog, capfd, monkeypatch, level, title, terms, lines):
    monkeypatch.setattr(logging.getLogger("xret"), "handlers", [])  # of a command of another test
    with caplog.at_level(level, "xret"):
        train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu", title=title)
    found = [record.getMessage() for record in caplog.records if "val RSUM" in record.getMessage()]
    assert len(found) == lines
    assert all(("triplet" in line) == terms for line in found)
    assert capfd.readouterr() == ("", "")  # the library prints nothing
    log = (tmp_path / "run" / LOG).read_text()
    assert log.count("val RSUM") == 2 and "begins vsepp on" in log and "ended well: 2 epochs" in log


@pytest.mark.parametrize(("level", "lines"), [(logging.NOTSET, 2), (logging.WARNING, 0)])
def test_a_notebook_shows_progress(store, tmp_path, capfd, monkeypatch, level, lines):
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    logger = logging.getLogger("xret")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(logger, "level", level)
    logger.manager._clear_cache()
    train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu")
    said = capfd.readouterr().err
    assert said.count("val RSUM") == lines
    assert ("epoch 2/2:" in said) == bool(lines)


def test_the_start_says_what_differs_from_the_recipe_and_what_is_too_small(store, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "xret"):
        recipe = recipe_of("vsepp", 1, "data.batch_size=999")
        train(store, recipe, tmp_path / "run", device="cpu")
    assert "vsepp with " in caplog.text and "data.batch_size=999" in caplog.text and "model.dim=16" in caplog.text
    assert "data.batch_size=999 takes all 60 captions at once: an epoch is a single step." in caplog.text
    assert "val: 12 images are too few" in caplog.text


def test_what_a_closed_form_has_no_steps_for_is_named(tmp_path, caplog):
    store = make_store(tmp_path / "s.zarr", text="tokens")
    settings = {"optimizer.lr": 0.1, "data.share": 0.9}
    xret.train(store, recipe="cca", out=tmp_path / "run", settings=settings, device="cpu")
    assert [text for text in caplog.messages if "nothing" in text] == [
        "optimizer.lr changes nothing: schedule.epochs is 0"
    ]
    with pytest.raises(RecipeError, match=r"a teacher teaches by steps, and schedule\.epochs is 0"):
        xret.train(store, recipe="cca", out=tmp_path / "other", distil=tmp_path / "run", device="cpu")


def test_a_setting_that_does_not_count_is_named(store, tmp_path, caplog):
    settings = {"model.dim": 16, "schedule.epochs": 1, "loss.triplet.weight": 0, "loss.infonce.weight": 1}
    settings |= {"loss.triplet.margin": 0.3, "loss.infonce.scale": 10, "loss.same_text": "excluded"}
    settings |= {"adapter.roi.dropout": 0.5, "adapter.words.hidden": 8, "data.captions": 1, "optimizer.momentum": 0.5}
    settings |= {"finetune.mask_words": 0.2, "runtime.cache": "memory", "schedule.gamma": 0.5, "data.text": "words"}
    xret.train(store, recipe="vsepp", out=tmp_path / "run", settings=settings, device="cpu")
    assert {text for text in caplog.messages if "changes nothing" in text} == {
        "loss.triplet.margin changes nothing: the loss has no such term; loss.triplet.weight adds it",
        "adapter.roi.dropout changes nothing: no feature set in use is of its kind",
        "adapter.words.hidden changes nothing: adapter.words.encoder is gru",
        "data.captions changes nothing: data.unit is caption",
        "optimizer.momentum changes nothing: optimizer.name is adamw",
        "finetune.mask_words changes nothing: finetune.image_lr and finetune.text_lr are 0",
    }
    written = (tmp_path / "run" / "recipe.yaml").read_text()
    assert not [key for key in ("roi:", "hidden:", "captions:", "momentum:", "finetune:", "runtime:") if key in written]
    assert load_recipe(str(tmp_path / "run" / "recipe.yaml")).to_dict() == Run(tmp_path / "run").recipe.to_dict()


def test_the_log_goes_on_with_the_run_and_stops_none(store, tmp_path):
    class Stop(Callback):
        def on_epoch(self, epoch, step, values):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu", callbacks=[Stop()])
    train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu", resume=True)
    log = (tmp_path / "run" / LOG).read_text()
    assert "stopped by Ctrl-C" in log and "goes on after epoch 1, step 0, vsepp" in log
    (tmp_path / "run" / LOG).unlink()
    (tmp_path / "run" / LOG).mkdir()  # it cannot be written
    assert train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu", resume=True).trained == 0


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_said_before_anything_is_made(store, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("xret.heads.training.callbacks.find_spec", lambda name: None)
    with pytest.raises(RunError, match=f"^runtime.log={kind} needs the package {kind}: `pip install {kind}`, or take"):
        train(store, recipe_of("vsepp", 1, f"runtime.log={kind}"), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def check(recorded, run):
    """Compare ``{tag: {step: value}}`` with the run's own metrics."""
    lines = Run(run).metrics()
    assert set(recorded) == {"Le", "Le/triplet", "lr", *TABLE}
    assert list(recorded["Le"]) == list(range(1, lines[-1]["step"] + 1))
    first = 0
    for line in lines:
        step = line["step"]
        steps = [recorded["Le"][one] for one in range(first + 1, step + 1)]
        first = step
        assert sum(steps) / len(steps) == pytest.approx(line["loss"], rel=1e-5)
        assert (recorded["rsum"][step], recorded["lr"][step]) == pytest.approx((line["rsum"], line["lr"]), rel=1e-5)
        total = sum(recorded[f"r{k}{side}"][step] for k in (1, 5, 10) for side in ("", "i"))
        assert total == pytest.approx(line["rsum"], rel=1e-5)


def test_tensorboard(store, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Stop(Callback):
        def on_step(self, step, values):
            if step == 8:  # the second of the third epoch, of which nothing was saved
                raise KeyboardInterrupt

    recipe = recipe_of("vsepp", 3, "data.batch_size=24", "runtime.log=tensorboard")
    with pytest.raises(KeyboardInterrupt):
        train(store, recipe, tmp_path / "run", device="cpu", callbacks=[Stop()])
    train(store, recipe, tmp_path / "run", device="cpu", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    recorded = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    check({tag: {event.step: event.value for event in of_tag} for tag, of_tag in recorded.items()}, tmp_path / "run")
    assert [event.step for event in recorded["Le"]] == list(range(1, 10))  # none twice


def test_wandb(store, tmp_path, monkeypatch):
    """Against a stand-in for the package, which needs an account."""
    recorded, begun, module = {}, {}, ModuleType("wandb")

    class Session:
        def log(self, values, step):
            for tag, value in values.items():
                recorded.setdefault(tag, {})[step] = value

        def finish(self, exit_code):
            begun["exit_code"] = exit_code

    def init(**options):
        begun.update(options)
        return Session()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("xret.heads.training.callbacks.find_spec", lambda name: name)
    recipe = recipe_of("vsepp", 2, "runtime.log=wandb")
    train(store, recipe, tmp_path / "run", device="cpu")
    check(recorded, tmp_path / "run")
    assert (begun["project"], begun["name"], begun["dir"]) == ("xret", "run", tmp_path / "run")
    assert (begun["config"], begun["exit_code"]) == (Run(tmp_path / "run").recipe.to_dict(), 0)


class Told(Callback):
    """Writes down what it is told, and ends the training after an epoch where it shall."""

    def __init__(self, until=None):
        self.said, self.until = [], until

    def on_begin(self, run, step, epochs):
        self.said.append(("begin", run.path.name, step, [line["epoch"] for line in epochs]))

    def on_step(self, step, values):
        assert values["Le"] == values["Le/triplet"] and values["lr"] > 0
        self.said.append(("step", step))

    def on_epoch(self, epoch, step, values):
        self.said.append(("epoch", epoch, step, values["rsum"]))
        if epoch == self.until:
            raise ValueError("enough")

    def on_end(self, error):
        self.said.append(("end", error and str(error)))


def test_callbacks_are_told_in_order_also_of_an_error_and_a_resumption(store, tmp_path):
    first, second, recipe = Told(until=1), Told(), recipe_of("vsepp", 2)
    with pytest.raises(ValueError, match="enough"):
        train(store, recipe, tmp_path / "run", device="cpu", callbacks=[first])
    train(store, recipe, tmp_path / "run", device="cpu", resume=True, callbacks=[second])
    lines = Run(tmp_path / "run").metrics()
    steps = lines[0]["step"]
    said = [("epoch", line["epoch"], line["step"], line["rsum"]) for line in lines]
    counted = [[("step", number) for number in range(1 + k * steps, 1 + (k + 1) * steps)] for k in range(2)]
    assert first.said == [("begin", "run", 0, []), *counted[0], said[0], ("end", "enough")]
    assert second.said == [("begin", "run", steps, [1]), *counted[1], said[1], ("end", None)]
