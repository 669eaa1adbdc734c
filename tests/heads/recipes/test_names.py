"""Where recipes are found: the list, files, folders, and what a file is based on."""

import json

import pytest
from bundled_recipes import faults
from command_line import run
from small_store import make_store

import xret
from xret.heads.recipes import names
from xret.heads.recipes.names import recipe_file, recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.schema import flat
from xret.pipeline.documents import read_yaml
from xret.pipeline.errors import RecipeError


def test_the_list_groups_variants_below_their_system():
    lines = run("recipes").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names: list[str] = []
    for line in lines[1:]:
        if not line.startswith("    "):  # else it is the paper of a system
            first = line.split()[0]
            names.append(names[-1].split("/")[0] + first if first.startswith("/") else first)
    assert names == recipe_names()
    at = next(number for number, line in enumerate(lines) if line.startswith("setdiv "))
    assert (lines[at].split()[1:], lines[at + 1].split()[0]) == (["524.6", "430.7", "500.8", "cache"], "Kim")
    row = next(line for line in lines if line.startswith("  /coco-resnet152-bigru ") and "506.75" in line)
    assert row.split()[1:] == ["506.75", "398.95", "-", "finetune"]
    listed = json.loads(run("recipes", "--json").stdout)
    assert [recipe["name"] for recipe in listed] == names


@pytest.mark.parametrize("name", ["setdiv", "maxmatch/f30k-butd-bert", "vsepp/f30k-butd-bigru", "pcme"])
def test_what_is_shown_is_the_same_recipe(name, tmp_path):
    shown = run("recipes", "show", name).stdout
    (tmp_path / "shown.yaml").write_text(shown)
    assert load_recipe(str(tmp_path / "shown.yaml")) == load_recipe(name)
    assert json.loads(run("recipes", "show", name, "--json").stdout) == load_recipe(name).to_dict()


def test_what_is_shown_for_a_store_is_what_its_run_writes(tmp_path):
    store = make_store(tmp_path / "small.zarr")
    chosen = ["--set", "model.dim=16", "--set", "schedule.epochs=1"]
    values = json.loads(run("recipes", "show", "setdiv", "--for", store, *chosen, "--json").stdout)
    assert list(values["adapter"]) == ["grid", "words"]
    assert "finetune" not in values and len(flat(values)) <= 95
    shown = run("recipes", "show", "setdiv", "--for", store, *chosen).stdout
    assert "  dim: 16\n" in shown and f"{'  batch_size: 200':27}  # section 4.2\n" in shown
    trained = str(tmp_path / "run")
    xret.train(store, recipe="setdiv", out=trained, settings={"model.dim": 16, "schedule.epochs": 1}, device="cpu")
    assert read_yaml(tmp_path / "run" / "recipe.yaml") == values
    other = make_store(tmp_path / "other.zarr", image="roi")
    with pytest.raises(RecipeError, match="values for image features of kind 'grid', not 'roi'; take 'setdiv'"):
        xret.train(other, recipe=f"{trained}/recipe.yaml", out=tmp_path / "other", device="cpu")


def test_what_is_shown_has_the_source_of_the_file_that_sets_it():
    shown = run("recipes", "show", "setdiv/f30k-butd-bigru").stdout
    lines = {tuple(line.split("  # ")) for line in map(str.strip, shown.splitlines()) if "  # " in line}
    found = {value.strip(): source for value, source in lines}
    assert found["aggregator_lr: 0.05"] == "appendix A"  # its own
    assert found["margin: 0.2"] == "section 4.2: regions"  # that of its base
    assert found["alpha: 16.0"] == "section 4.2; Table 4"  # that of its base's base
    assert found["image_kind: roi"] == found["text_kind: words"] == "section 4.2"  # of a block on a line
    assert "coco_1k: null" not in found  # the row that its base has


def test_comments_of_values_that_stand_elsewhere(tmp_path):
    lines = ["base: setdiv", "data:", "  batch_size: &r-a 64  # as many as fit", "schedule:", "  epochs: &r-b 9"]
    lines += ["  patience: *r-a  # own", "  warmup_epochs: *r-b", "optimizer: {clip: &c 3}", "loss:", "  triplet:"]
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, "    warmup_epochs: *r-a", "    margin: *c"]))
    mine = str(tmp_path / "mine.yaml")
    shown = run("recipes", "show", mine).stdout
    said = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in shown.splitlines()}
    assert (said["batch_size"], said["patience"], said["epochs"]) == ("as many as fit", "own", "")
    triplet = shown.partition("  triplet:")[2]
    assert "warmup_epochs: 64" in triplet and "# as many as fit" in triplet.partition("warmup_epochs")[2].split("\n")[0]
    assert "    margin: 3.0\n" in triplet


def test_a_recipe_that_is_not_there(tmp_path, monkeypatch):
    assert "did you mean 'setdiv'?" in faults("setdif")
    assert "there is no recipe" in faults("../heads/recipes/setdiv")
    assert "did you mean 'setdiv/f30k-butd-bigru'?" in faults("setdiv/f30k-butd-bigur")
    (tmp_path / "recipe.yaml").touch()
    assert faults(str(tmp_path)) == f"{tmp_path} is a run; take its recipe, {tmp_path / 'recipe.yaml'}"
    assert faults("zzz") == "there is no recipe 'zzz'; take one that `xret recipes` lists, or a YAML file's path"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setdiv").mkdir()
    assert recipe_file("setdiv").parent == names.FOLDER


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "must be a mapping"),
        ("base: vsepp\nmodel: {dim: 8}\nmodel: {residual: false}", "line 3, column 1: the key 'model' stands twice"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, fault):
    (tmp_path / "mine.yaml").write_text(text)
    assert fault in faults(tmp_path / "mine.yaml")


@pytest.mark.parametrize("file", sorted(names.FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_bundled_file_names_no_key_twice(file):
    assert read_yaml(file)["name"] == file.stem


def test_recipes_that_are_based_on_each_other(tmp_path):
    (tmp_path / "one.yaml").write_text("base: two.yaml\n")
    (tmp_path / "two.yaml").write_text("base: one.yaml\n")
    assert "base must be another recipe, not " in faults(tmp_path / "one.yaml")


def test_a_base_beside_the_file_is_found_from_anywhere(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "one.yaml").write_text("base: vsepp\noptimizer: {lr: 0.5}\n")
    (folder / "two.yaml").write_text("base: one.yaml\nmodel: {dim: 8}\n")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("recipes/two.yaml")
    assert (recipe.optimizer.lr, recipe.model.dim) == (0.5, 8)


def test_an_alias_in_a_file_of_ones_own(tmp_path):
    text = "name: mine\nbase: vsepp\nadapter:\n  grid: &all {dropout: 0.5}\n  roi: *all\n"
    (tmp_path / "mine.yaml").write_text(text)
    adapter = load_recipe(str(tmp_path / "mine.yaml"), ["adapter.roi.dropout=0.25"]).adapter
    assert (adapter["grid"]["dropout"], adapter["roi"]["dropout"]) == (0.5, 0.25)
