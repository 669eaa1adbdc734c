"""The bundled recipes by their names, and what is said of one that cannot be used."""

import pytest

from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.errors import RecipeError

SYSTEMS = ["fusemix", "gaussian-vsepp", "gaussian-vsrn", "lit", "maxmatch", "pcme", "pcmepp", "pvse", "sail", "scan"]
SYSTEMS += ["setdiv", "vse-infty", "vsepp", "vsrn"]
OURS = ["cca", "linear", "mlp", "setdiv-small"]  # no paper's: their values are ours
# All but the variants for COCO that differ from those for Flickr30K in numbers alone.
KINDS = [name for name in recipe_names() if "/coco-" not in name or name.startswith("gaussian")]
ALIGNMENT = ["cca", "fusemix", "lit", "sail"]  # of two frozen encoders, any of them


def small_settings(name):
    """Settings that make a recipe's head small and its epoch two steps long; nothing else."""
    recipe = load_recipe(name, ["model.dim=8"])
    batch = 4 if recipe.data.unit == "image" else 10  # of 8 images with 20 captions
    settings = ["model.dim=16", "adapter.words.word_dim=8", "schedule.epochs=1", f"data.batch_size={batch}"]
    settings += [f"aggregator.{side}.head_dim=8" for side, part in recipe.aggregator.items() if "head_dim" in part]
    return settings


def faults(name, *settings):
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(name), settings)
    return str(caught.value)
