"""The bundled recipes by their names, and what is said of one that cannot be used."""

import pytest

from xret.heads.recipes.names import recipe_file
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.errors import RecipeError

SYSTEMS = ["fusemix", "gaussian-vsepp", "gaussian-vsrn", "lit", "maxmatch", "pcme", "pcmepp", "pvse", "sail", "scan"]
SYSTEMS += ["setdiv", "vse-infty", "vsepp", "vsrn"]
OURS = ["linear", "mlp", "setdiv-small"]  # no paper's: their values are ours
SETDIV = recipe_file("setdiv").read_text()


def faults(name, *settings):
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(name), settings)
    return str(caught.value)
