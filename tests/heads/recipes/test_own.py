"""Parts of one's own: from a file beside the recipe through every command, and what is refused before training."""

import json
import re
import shutil
import sys
from hashlib import sha256

import pytest
import torch
import yaml
from command_line import refused, run
from safetensors.torch import load_file
from small_store import make_store

import xret
from xret.heads.modules import aggregators
from xret.heads.modules.parts import import_all
from xret.heads.recipes import own
from xret.heads.recipes.blocks import arguments
from xret.heads.recipes.own import part_of
from xret.heads.recipes.recipe import changed, load_recipe
from xret.heads.recipes.settings import settings_of
from xret.heads.retrieval import export, hub, indexing
from xret.heads.runs.run import Run

MINE = """
import torch
from torch import nn
from xret.losses import Loss
from xret.nn import Adapted, Adapter, Aggregated, Aggregator, valid_rows
from xret.similarities import Similarity


class Scaled(Aggregator):
    def __init__(self, local_dim: int, dim: int, *, factor: float = 1.0):
        super().__init__(local_dim, dim)
        self.layer, self.factor = nn.Linear(local_dim, dim), factor

    def forward(self, local, length, global_):
        rows = local.masked_fill(~valid_rows(local, length)[..., None], 0)
        return Aggregated(self.factor * self.layer(rows.sum(1) / length[:, None].clamp(min=1)))


class Dot(Similarity):
    def forward(self, images, captions):
        return images @ captions.T


class Square(Loss):
    def __init__(self, *, shift: float = 0.0):
        super().__init__()
        self.shift = shift

    def forward(self, similarity, positives, images, captions):
        return ((similarity - positives.float() - self.shift) ** 2).mean()


class Linear(Adapter):
    def __init__(self, channels, global_channels, dim, *, bias: bool = True):
        super().__init__()
        self.layer, self.local_dim = nn.Linear(channels, dim, bias=bias), dim

    def fields(self, uses_local):
        return {"local"}

    def forward(self, length, local=None, global_=None, token=None, *, uses_local=True):
        rows = self.layer(local.to(self.layer.weight.dtype)).masked_fill(~valid_rows(local, length)[..., None], 0)
        return Adapted(rows, length, rows.sum(1))
"""
RECIPE = {
    "name": "own",
    "base": "vsepp",
    "model": {"dim": 8},
    "adapter": {"grid": {"name": "mine:Linear", "bias": False}, "words": {"word_dim": 8}},
    "aggregator": {"image": {"name": "mine:Scaled", "factor": 2.0}},
    "similarity": {"name": "mine:Dot"},
    "loss": {"mine:Square": {"weight": 0.5, "shift": 0.1}},
    "schedule": {"epochs": 1},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a store, and another one with a recipe and the module of its parts."""
    monkeypatch.chdir(tmp_path)
    make_store("s.zarr", train=16, val=8, test=8)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.py").write_text(MINE)
    (tmp_path / "parts" / "own.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def test_a_part_of_ones_own_goes_through_every_command(folder):
    run("train-head", "s.zarr", "--recipe", "parts/own.yaml", "--out", "run", "--device", "cpu")
    first = run("eval", "run", "--device", "cpu", "--json").stdout
    run("report", "run", "--out", "report.html", "--device", "cpu")
    varied = ["--vary", "aggregator.image.factor=1,2", "--out", "cells", "--json"]
    cells = run("ablate", "s.zarr", "--recipe", "parts/own.yaml", *varied)
    assert [(cell["error"], cell["values"]) for cell in json.loads(cells.stdout)] == [
        (None, {"aggregator.image.factor": value}) for value in (1, 2)
    ]
    space = ["--space", "loss.mine:Square.shift=0:1"]
    run("tune", "s.zarr", "--recipe", "parts/own.yaml", "--trials", "2", "--out", "tuned", *space)
    shutil.rmtree(folder / "parts")  # every folder has a copy of its own
    assert run("eval", "run", "--device", "cpu", "--json").stdout == first
    run("train-head", "s.zarr", "--recipe", "tuned/best.yaml", "--out", "again", "--device", "cpu")
    retriever = xret.load("again", device="cpu")
    assert retriever.search("a red cube", k=2)[0].rank == 1
    recipe = load_recipe("run/recipe.yaml")
    assert (recipe.aggregator["image"]["factor"], recipe.loss["mine:Square"]["shift"]) == (2.0, 0.1)


ASKED = """
import torch
from torch.nn.functional import normalize
from xret.losses import Loss
from xret.nn import Adapted, Adapter
from xret.similarities import Similarity


class Angle(Similarity):
    of_cosines = True
    score = "the angle between both, turned around"

    def forward(self, images, captions):
        return -torch.acos(0.999 * normalize(images, dim=-1) @ normalize(captions, dim=-1).T)


class Flat(Loss):
    def begin(self, now):
        self.now = now

    def at_rest(self, pairs):
        return 1.0 if self.now >= 0.5 else None

    def forward(self, similarity, positives, images, captions):
        return 1 + 0 * similarity.sum()


class Centred(Adapter):
    def __init__(self, channels, global_channels, dim):
        super().__init__()
        self.local_dim, self.layer = dim, torch.nn.Linear(channels, dim)
        self.register_buffer("mean", torch.zeros(channels))

    def fields(self, uses_local):
        return {"local"}

    def measure(self, parts, uses_local=True):
        self.mean.copy_(torch.cat([part.local.float().mean(1) for part in parts()]).mean(0))

    def forward(self, length, local=None, global_=None, token=None, *, uses_local=True):
        return Adapted(None, length, self.layer(local[:, 0].float() - self.mean))
"""


def test_parts_of_ones_own_are_asked_as_bundled_ones_are(folder, caplog):
    """Statistics before the first step, a warning of a collapse, an index, and fewer dimensions."""
    (folder / "asked.py").write_text(ASKED)
    parts = ["aggregator.image=global", "similarity=asked:Angle", "adapter.grid=asked:Centred"]
    losses = ["loss.asked:Flat.weight=1", "loss.triplet.weight=0", "loss.infonce.weight=0.1"]
    sizes = ["model.dim=8", "adapter.words.word_dim=8", "data.batch_size=2", "schedule.epochs=8", "optimizer.lr=0.01"]
    xret.train("s.zarr", recipe="vsepp", out="run", settings=settings_of([*parts, *losses, *sizes]), device="cpu")
    assert [one for one in caplog.messages if one.startswith("collapse: the asked:Flat loss has sat at 1,")]
    assert load_file("run/model.safetensors")["image.adapter.mean"].any()
    retriever = xret.load("run", device="cpu")
    found = indexing.index_run(retriever, folder / "index", dims=4)
    assert found["images"]["recall"] >= 0.99
    query = retriever.encode_query("a red cube")
    expected = [hit.id for hit in xret.load("run", device="cpu").search(query, k=3)]
    indexing.index_run(retriever, folder / "whole")
    assert [hit.id for hit in xret.load("run", device="cpu", index="whole").search(query, k=3)] == expected
    about = export.export_embeddings(retriever, folder / "exported", dims=4, dtype="int8")
    assert about["measure"] == "asked:Angle: the angle between both, turned around"


def test_settings_name_parts_of_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "parts")
    settings = settings_of(["loss.mine:Square.weight=2", "similarity=mine:Dot", "aggregator.image=mine:Scaled"])
    recipe = load_recipe("vsepp", settings)
    assert recipe.loss["mine:Square"] == {"weight": 2.0, "shift": 0.0}
    assert list(recipe.code) == ["mine"]
    assert "code" not in load_recipe("vsepp").to_dict()


def test_a_loss_may_lie_in_a_package(folder):
    (folder / "parts").rename(folder / "package")
    learned = MINE.replace("self.shift = shift", "self.shift = nn.Parameter(torch.tensor(shift))")
    (folder / "package" / "mine.py").write_text(learned)
    term, words = "package.mine:Square", ["--device", "cpu", "--json"]
    words += [f"--set={setting}" for setting in (f"loss.{term}.weight=1", "model.dim=8", "optimizer.lr=0.1")]
    train = ["train-head", "s.zarr", "--recipe", "vsepp", *words, "--set", "schedule.epochs=1"]
    run(*train, "--out", "one")
    run(*train, "--out", "two", "--init-from", "one", "--set", "optimizer.lr=0")
    states = [torch.load(folder / out / "checkpoint.pt", weights_only=True)["state"] for out in ("one", "two")]
    (one,), (two,) = (state["losses"].values() for state in states)
    assert one == two != 0
    assert list(Run("one").metrics()[0]["parts"]) == ["triplet", term]


def test_a_part_is_tried_once_in_a_process(folder, monkeypatch):
    counted = ["made = []", "def __init__(self, local_dim, dim):", "    super().__init__(local_dim, dim)"]
    counted += ["    self.made.append(dim)", FORWARD, "    return Aggregated(global_)"]
    (folder / "counted.py").write_text(made("A", "Aggregator", counted)[0])
    recipes = [load_recipe("vsepp", ["aggregator.image=counted:A", f"optimizer.lr={rate}"]) for rate in (0.1, 0.2)]
    part = part_of(aggregators.AGGREGATORS, "counted:A", recipes[0].sources)
    tried = len(part.made)
    assert changed(recipes[0], ["schedule.epochs=2"]) and len(part.made) == tried == 2  # and made again, to compare
    assert load_recipe("vsepp", ["aggregator.image=counted:A", "model.dim=8"]) and len(part.made) > tried


def test_words_may_be_masked_for_an_adapter_of_ones_own(folder):
    lines = [
        "def __init__(self, words, dim):",
        "    super().__init__()",
        "    self.local_dim, self.words = dim, nn.EmbeddingBag(words, dim)",
        "def fields(self, uses_local):",
        "    return {'token'}",
        "def forward(self, length, local=None, global_=None, token=None, *, uses_local=True):",
        "    return Adapted(None, length, self.words(token))",
    ]
    (folder / "bag.py").write_text(f"from torch import nn\n{made('Bag', 'Adapter', lines)[0]}")
    settings = ["adapter.words=bag:Bag", "augment.mask_words=0.5", "model.dim=8", "schedule.epochs=1"]
    xret.train("s.zarr", recipe="vsepp", out="masked", settings=settings_of(settings), device="cpu")
    weights = load_file(folder / "masked" / "model.safetensors")["text.adapter.words.weight"]
    assert len(weights) == len(Run("masked").vocabulary) + 1
    hub.save_to_folder(xret.load("masked", device="cpu"), "published")
    assert Run("published").recipe.adapter["words"] == {"name": "bag:Bag"}


def test_parameters_may_be_named_as_words_of_python_and_keys_of_losses(tmp_path, monkeypatch):
    body = "    def __init__(self, a, b, *, weight: float = 1.0, lambda_: float = 1.0, type_: str = 'x'):\n"
    body += "        self.given = weight, lambda_, type_\n        super().__init__(a, b)\n"
    forward = "    def forward(self, local, length, global_):\n        return Aggregated(global_)\n"
    (tmp_path / "words.py").write_text(f"from xret.nn import *\n\nclass A(Aggregator):\n{body}{forward}")
    monkeypatch.chdir(tmp_path)
    given = {"weight": 3, "lambda": 2, "type_": "y"}
    recipe = load_recipe("vsepp", {"aggregator.image": {"name": "words:A", **given}})
    part = part_of(aggregators.AGGREGATORS, "words:A", recipe.sources)(8, 8, **arguments(recipe.aggregator["image"]))
    assert part.given == (3.0, 2.0, "y")


def test_a_changed_file_is_said_and_is_another_recipe(folder):
    words = ["train-head", "s.zarr", "--recipe", "parts/own.yaml", "--out", "run", "--device", "cpu"]
    run(*words)
    (folder / "parts" / "mine.py").write_text(MINE + "\n# changed\n")
    assert "code.mine is" in refused(*words, "--resume", "--set", "schedule.epochs=2")
    assert "changed since" not in run("eval", "run", "--device", "cpu").stderr
    (folder / "run" / "mine.py").write_text(MINE + "\n# changed\n")
    assert "run/mine.py, and run it with --trust" in refused("eval", "run", "--device", "cpu")
    said = run("eval", "run", "--device", "cpu", "--trust").stderr
    assert "run/mine.py is not what run was trained with" in said
    (folder / "run" / "mine.py").unlink()
    assert "put mine.py beside the recipe" in refused("eval", "run", "--device", "cpu")


def made(name, base, body, setting="aggregator.image=wrong:A"):
    head = (
        "import torch\nfrom xret.nn import *\nfrom xret.similarities import Similarity\nfrom xret.losses import Loss\n"
    )
    return f"{head}\n\nclass {name}({base}):\n" + "".join(f"    {line}\n" for line in body), setting


FORWARD = "def forward(self, local, length, global_):"


def adapter(returned, *more):
    lines = [
        "def __init__(self, channels, global_channels, dim):",
        "    super().__init__()",
        "    self.local_dim = dim",
    ]
    lines += [
        "    self.layer = torch.nn.Linear(global_channels, dim)",
        "def forward(self, length, local, global_, *_, **__):",
    ]
    return made("Z", "Adapter", [*lines, f"    return {returned}", *more], "adapter.grid=wrong:Z")


WRONG = {
    "another shape": (made("A", "Aggregator", [FORWARD, "    return Aggregated(global_[:, :3])"]), r"\[2, 3\]"),
    "no Aggregated": (made("A", "Aggregator", [FORWARD, "    return global_"]), "must return xret.nn.Aggregated"),
    "a set called a vector": (made("A", "Aggregator", [FORWARD, "    return Aggregated(local)"]), "must give a vector"),
    "padding": (made("A", "Aggregator", [FORWARD, "    return Aggregated(local.mean(1))"]), "reads padding"),
    "other samples": (
        made("A", "Aggregator", [FORWARD, "    return Aggregated(global_ - global_.mean(0))"]),
        "reads padding or other samples",
    ),
    "other captions": (
        made(
            "S",
            "Similarity",
            ["def forward(self, a, b):", "    return (x := a @ b.T) - x.mean(1, keepdim=True)"],
            "similarity=wrong:S",
        ),
        "must score each image with each caption whatever others it is given",
    ),
    "numbers that are not kept": (
        made(
            "A",
            "Aggregator",
            [
                "def __init__(self, local_dim, dim):",
                "    super().__init__(local_dim, dim)",
                "    self.signs = torch.randn(dim).sign()",
                FORWARD,
                "    return Aggregated(global_ * self.signs)",
            ],
        ),
        "A gives other values when it is made again with the same weights: register what it draws as a buffer",
    ),
    "NaN": (made("A", "Aggregator", [FORWARD, "    return Aggregated(global_ / 0 * 0)"]), "not finite"),
    "an error": (made("A", "Aggregator", [FORWARD, "    return 1 / 0"]), "fails on a trial batch .*ZeroDivisionError"),
    "no type": (made("A", "Aggregator", ["def __init__(self, a, b, k=3): ..."]), "parameter 'k' needs a type"),
    "another base": (made("A", "torch.nn.Module", ["x = 1"]), "must derive from xret.nn.Aggregator"),
    "another name": (made("B", "Aggregator", ["x = 1"]), "has no class 'A'"),
    "no import": (("import nothing_like_it", "aggregator.image=wrong:A"), "wrong.py cannot be imported"),
    "a file's name": (("", "aggregator.image=wrong.py:A/B"), "write module:Class"),
    "no file": (("", "aggregator.image=nowhere:A"), "put nowhere.py beside the recipe"),
    "a similarity turned around": (
        made("S", "Similarity", ["def forward(self, a, b):", "    return b @ a.T"], "similarity=wrong:S"),
        r"here \[2, 3\], and gave \[3, 2\]",
    ),
    "a loss of each pair": (
        made("L", "Loss", ["def forward(self, similarity, *_):", "    return similarity"], "loss.wrong:L.weight=1"),
        "must give a scalar",
    ),
    "a loss without a gradient": (
        made("L", "Loss", ["def forward(self, similarity, *_):", "    return torch.ones(())"], "loss.wrong:L.weight=1"),
        "is not attached to its inputs",
    ),
    "a file beside it": (("import beside", "aggregator.image=wrong:A"), "move what it needs of beside into it"),
    "an adapter of rows alone": (adapter("Adapted(local, length, local)"), "must return xret.nn.Adapted"),
    "an adapter of other fields": (
        adapter("Adapted(local, length, local)", "def fields(self, uses_local):", "    return {'rows'}"),
        "fields must return a set of 'local', 'global' or 'token', and gave {'rows'}",
    ),
    "an adapter that asks for less than it reads": (
        adapter("Adapted(None, length, local.mean(1))", "def fields(self, uses_local):", "    return {'global'}"),
        "fails on a trial batch .*NoneType",
    ),
    "an adapter of float32 alone": (
        adapter("Adapted(None, length, self.layer(global_))"),
        "fails on a trial batch .*torch.float16",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_said_before_training(folder, case):
    (source, setting), message = WRONG[case]
    (folder / "wrong.py").write_text(source)
    (folder / "beside.py").touch()
    words = ["train-head", "s.zarr", "--recipe", "vsepp", "--out", "run", "--set", "model.dim=8", "--set", setting]
    said = refused(*words, "--device", "cpu")
    assert re.search(message, said), said
    assert "wrong" in said or "nowhere" in said
    assert not (folder / "run").exists()


def test_code_of_the_hub_needs_trust_but_where_it_was_trained(folder, monkeypatch):
    run("train-head", "s.zarr", "--recipe", "parts/own.yaml", "--out", "run", "--device", "cpu")
    hub.save_to_folder(xret.load("run", device="cpu"), "published")
    assert (folder / "published" / "mine.py").read_text() == MINE
    written = folder / "published" / "recipe.yaml"  # for readers: what it leaves out is run all the same
    written.write_text(written.read_text().partition("\ncode:")[0])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder / "published"))
    assert xret.load("someone/own", device="cpu").run.recipe.similarity["name"] == "mine:Dot"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "of another user"))
    with pytest.raises(xret.errors.RunError, match=r"mine\.py, and run it with `trust`"):
        xret.load("someone/own")
    assert xret.load("someone/own", trust=True, device="cpu").run.recipe.similarity["name"] == "mine:Dot"


def changed_code(received):
    with (received / "mine.py").open("a") as file:
        file.write(f"import pathlib\npathlib.Path({str(received.parent / 'ran')!r}).touch()\n")


def recorded_code(received):
    """Record what the changed file has, as whoever changed it can."""
    changed_code(received)
    for name in ("run.json", "recipe.yaml"):
        text = (received / name).read_text()
        (received / name).write_text(text.replace(sha256(MINE.encode()).hexdigest(), digest_of("mine", received)))


def hidden_code(received):
    changed_code(received)
    values = json.loads((received / "run.json").read_text())
    del values["recipe"]["code"]
    (received / "run.json").write_text(json.dumps(values))
    (received / "recipe.yaml").write_text(yaml.safe_dump(values["recipe"]))


def digest_of(module, folder):
    return sha256((folder / f"{module}.py").read_bytes()).hexdigest()


@pytest.mark.parametrize("change", [changed_code, recorded_code, hidden_code, lambda received: None])
def test_code_of_a_run_from_elsewhere_needs_trust(folder, monkeypatch, change):
    run("train-head", "s.zarr", "--recipe", "parts/own.yaml", "--out", "sent", "--device", "cpu")
    (folder / "sent").rename(folder / "received")
    assert run("eval", "received", "--device", "cpu")  # it was trained here, wherever it lies now
    if change.__name__ != "changed_code":
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "of another user"))
    change(folder / "received")
    train = ["train-head", "s.zarr", "--set", "schedule.epochs=1", "--device", "cpu"]
    for words in (
        ["eval", "received"],
        ["eval", "received", "received", "--compare"],
        ["report", "received"],
        ["search", "received", "a red cube"],
        ["export", "received", "--out", "all.parquet"],
        ["index", "received", "--out", "index"],
        ["finetune", "received", "--out", "tuned"],
        [*train, "--recipe", "vsepp", "--init-from", "received", "--out", "second"],
        [*train, "--recipe", "received/recipe.yaml", "--out", "third"],
        ["recipes", "show", "received/recipe.yaml"],
        ["extract", "none.yaml", "--store", "t.zarr", "--encoder", "received"],
    ):
        assert re.search(r"received/mine\.py, and .*--trust", refused(*words)), words
    assert not (folder / "ran").exists()
    assert run("eval", "received", "--trust", "--device", "cpu")
    assert (folder / "ran").exists() == (change.__name__ != "<lambda>")
    run(*train, "--recipe", "received/recipe.yaml", "--out", "third", "--trust")
    run("eval", "third", "--device", "cpu")


def test_a_run_names_no_module_that_was_not_trained_with(folder, monkeypatch):
    """Neither one that is installed, nor the parent of one, may be imported to look whether it is there."""
    run("train-head", "s.zarr", "--recipe", "vsepp", "--out", "run", "--device", "cpu", "--set", "model.dim=8")
    values = json.loads((folder / "run" / "run.json").read_text())
    for name in ("antigravity", "antigravity.inner", "../escape"):
        values["recipe"] |= {"similarity": {"name": f"{name}:Own"}, "code": {name: "/etc/hostname"}}
        (folder / "run" / "run.json").write_text(json.dumps(values))
        assert "--trust" in refused("eval", "run")
    assert "antigravity" not in sys.modules


def test_trust_is_asked_for_where_nothing_can_be_noted(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))
    monkeypatch.setattr(own, "_here", set())
    vary = ["ablate", "s.zarr", "--recipe", "parts/own.yaml", "--vary", "aggregator.image.factor=1,2", "--out", "cells"]
    run(*vary)
    (cell,) = (folder / "cells").glob("*factor=1/seed=0")
    run("eval", cell, "--device", "cpu")
    monkeypatch.setattr(own, "_here", set())  # another process
    assert "--trust" in refused("eval", cell, "--device", "cpu")
    run(*vary)  # finished cells are of the recipe that is named
    monkeypatch.setattr(own, "_here", set())
    run("eval", cell, "--device", "cpu", "--trust")


def test_a_bundled_part_is_its_file_alone(monkeypatch, folder):
    before = dict(aggregators.AGGREGATORS), dict(aggregators.AGGREGATORS.when)
    (folder / "zeroth.py").write_text(
        "from xret.heads.modules.aggregators.aggregated import AGGREGATORS, Aggregated, Aggregator\n"
        "@AGGREGATORS.register('zeroth', 'a part that a test adds')\nclass Zeroth(Aggregator):\n"
        "    def forward(self, local, length, global_):\n        return Aggregated(global_)\n"
    )
    monkeypatch.setattr(aggregators, "__path__", [*aggregators.__path__, str(folder)])
    try:
        import_all(aggregators.__name__, [str(folder)])
        assert "a part that a test adds" in run("list", "aggregators").stdout
        recipe = load_recipe("vsepp", {"aggregator.image.name": "zeroth"})
        assert recipe.aggregator["image"] == {"name": "zeroth"}
        assert xret.nn.Zeroth is aggregators.AGGREGATORS["zeroth"]
    finally:
        for now, then in zip((aggregators.AGGREGATORS, aggregators.AGGREGATORS.when), before, strict=True):
            now.clear()
            now.update(then)
