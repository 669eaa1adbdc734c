"""`xret report`: what it says, and the sentence that each mistake gets."""

import pytest
import torch
from click.testing import CliRunner
from small_store import make_store

from xret.cli import main
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.train import train

SETTINGS = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several threads
    folder = tmp_path_factory.mktemp("report")
    train(make_store(folder / "small.zarr"), load_recipe("vsepp", SETTINGS), folder / "run", device="cpu")
    yield folder / "run"
    torch.set_num_threads(threads)


def called(*words):
    result = CliRunner().invoke(main, ["report", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_command_writes_the_page_and_says_where(run, tmp_path):
    out = tmp_path / "new" / "report.html"
    for _ in range(2):  # an earlier report is replaced
        result = called(run, "--out", out, "--device", "cpu")
        assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{out}: {out.stat().st_size / 1e3:.1f} kB, ")
    text = out.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "give their folder as --data-root DIR" in text
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 2, "Missing argument 'RUN [RUN ...]'"),
        (["{folder}"], 1, "is no run: it has no run.json"),
        (["{run}", "--out", "{folder}"], 1, "is a folder; give --out the name of a file"),
        (["{run}", "--out", "{folder}/taken"], 1, "taken exists and is no report of xret"),
        (["{run}", "--out", "{folder}/taken/report.html"], 1, "taken is a file; choose another --out"),
        (["{run}", "--out", "{folder}/r", "--split", "dev"], 1, "has no split 'dev'"),
        (["{run}", "--out", "{folder}/r", "--store", "{folder}/none"], 1, "there is no feature store"),
        (["{run}", "--out", "{folder}/r", "--data-root", "{folder}/nope"], 2, "nope' does not exist"),
    ],
)
def test_mistakes(run, tmp_path, words, code, sentence):
    (tmp_path / "taken").write_text("a letter")
    result = called(*(word.format(run=run, folder=tmp_path) for word in words))
    assert result.exit_code == code
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken").read_text() == "a letter"
