"""What a training logs: a line an epoch, notes, and train.log in the run's folder."""

import logging

import pytest
from small_store import make_store
from small_trainings import recipe_of

from xret.heads.training.log import LOG
from xret.heads.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_the_start_says_what_differs_from_the_recipe_and_what_is_too_small(store, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "xret"):
        train(store, recipe_of("vsepp", 1, "data.batch_size=999"), tmp_path / "run", device="cpu")
    assert "vsepp with " in caplog.text and "data.batch_size=999" in caplog.text and "model.dim=16" in caplog.text
    assert "data.batch_size=999 takes all 60 captions at once: an epoch is a single step." in caplog.text
    assert "val: 12 images are too few" in caplog.text


def test_the_log_is_appended_when_a_run_goes_on(store, tmp_path):
    def stop(epoch, _):
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu", after_epoch=stop)
    train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu", resume=True)
    log = (tmp_path / "run" / LOG).read_text()
    assert "stopped by Ctrl-C" in log and "goes on after epoch 1, step 0, vsepp" in log


def test_a_log_that_cannot_be_written_stops_no_training(store, tmp_path):
    train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu")
    (tmp_path / "run" / LOG).unlink()
    (tmp_path / "run" / LOG).mkdir()
    assert train(store, recipe_of("vsepp", 1), tmp_path / "run", device="cpu", resume=True).trained == 0
