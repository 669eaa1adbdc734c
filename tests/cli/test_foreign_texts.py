"""A store may come from a stranger: none of its texts commands a terminal or becomes a part of a page."""

import logging
import re
from pathlib import Path

import pytest
from command_line import refused, run
from PIL import Image
from small_store import make_store

from xret.cli import Lines
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report import write_report
from xret.heads.training.train import train
from xret.pipeline.store import FeatureCache

MARK = "\x1b]0;x\x07$\\nothing{$\u202e<script>alert(1)</script>\n"  # also what matplotlib would take for mathematics
SMALL = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1"]
OWN = {"setdiv": ["aggregator.image.head_dim=16", "aggregator.text.head_dim=16", "aggregator.image.iterations=2"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of a store in which each text and name is hostile, its pictures, and runs on it."""
    folder = tmp_path_factory.mktemp("foreign")
    store = Path(make_store(folder / "s.zarr", mark=MARK, broken=(61,)))
    for features in [*store.glob("images/*@*"), *store.glob("captions/*@*")]:
        features.rename(features.with_name(re.sub(r"[/\\]", "", MARK) + features.name))
    cache = FeatureCache.open(str(store))
    images = cache.image_set()
    chunk = 61 // images.chunk_rows
    images.write(chunk, images.read_chunk(chunk), {61: f"{MARK}: damaged"})
    for name in cache.file_names(0, cache.images):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(folder / "images" / name)
    for name in ("setdiv", "gaussian-vsepp"):
        train(str(store), load_recipe(name, [*SMALL, *OWN.get(name, ())]), folder / name, device="cpu")
    return folder


def require_harmless(text):
    assert "alert(1)" in text
    assert [bad for bad in ("\x1b", "\x07", "\u202e", "script>\n") if bad in text] == []


def test_what_the_library_logs(capsys):
    Lines().emit(logging.LogRecord("xret", logging.WARNING, "", 0, "left out: %s", (MARK,), None))
    require_harmless(capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        *(f"cache {command} {{}}/s.zarr" for command in ("info", "ls", "verify")),
        "cache ls {}",
        "search {}/setdiv red --device cpu",
        "eval {}/gaussian-vsepp --diagnostics --device cpu",
    ],
)
def test_what_a_command_prints(folder, words):
    require_harmless(run(*words.format(folder, folder).split()).output)


def test_a_refusal(folder):
    require_harmless(refused("cache", "rm", folder / "s.zarr", "nothing"))


@pytest.mark.parametrize("data_root", [True, False], ids=["pictures", "none"])
def test_a_report(folder, tmp_path, data_root, capsys):
    out, runs = tmp_path / "report.html", [folder / "setdiv", folder / "gaussian-vsepp"]
    write_report(runs if data_root else runs[:1], out, data_root=folder if data_root else None, device="cpu")
    text = out.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert ("<image id=" in text) == data_root
    assert "\x1b" not in capsys.readouterr().err
