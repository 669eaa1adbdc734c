"""`xret list`: every name that can be chosen stands in its list, and no other."""

import json
import subprocess
import sys

import pytest
from command_line import refused, run

from xret.cli.recipes import PARTS
from xret.heads.evaluation.protocols import PROTOCOLS
from xret.heads.modules.adapters import ADAPTERS
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.recipes.names import headlines, recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.encoders.registry import listed

NAMES = {
    "encoders": listed(), "recipes": [name for name in recipe_names() if "/" not in name],
    "protocols": PROTOCOLS, "aggregators": AGGREGATORS, "similarities": SIMILARITIES, "losses": LOSSES,
    "adapters": ADAPTERS,
}  # fmt: skip


@pytest.mark.parametrize("what", NAMES)
def test_a_line_each_that_fits(what):
    lines = run("list", what).stdout.splitlines()
    begun = [line for line in lines if line[0] != " "]  # a long one goes on below
    assert [line.split()[0] for line in begun] == list(json.loads(run("list", what, "--json").stdout))
    assert {line.split()[0] for line in begun} == set(NAMES[what])
    assert max(map(len, lines)) <= 80
    assert min(len(line.split()) for line in begun) > 1


def test_what_there_is_no_list_of_names_those_there_are():
    assert "is not one of 'encoders', 'recipes'" in refused("list", "nothing", code=2)
    assert run("list", "nothing", code=2).stderr.startswith("Usage: main list [OPTIONS] WHAT\n")
    assert all(what in run("list", "--help").stdout for what in ("encoders", "recipes", *PARTS))


def test_headlines_are_what_the_recipes_resolve_to():
    for found in headlines():
        recipe = load_recipe(found["name"], ["model.dim=8"])
        assert (found["reaches"], found["paper"]) == (recipe.reaches, recipe.paper)
        assert found["expected"] == recipe.expected


def test_what_needs_no_network_imports_no_torch(tmp_path):
    code = """if True:
        import sys
        from xret.cli import main
        for words in (["recipes"], ["list", "recipes"], ["-h"]):
            main(words, standalone_mode=False)
        print(*sys.modules)
    """
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "zarr", "dask", "transformers"} & set(found.stdout.splitlines()[-1].split())
    assert not heavy
