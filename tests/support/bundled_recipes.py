"""The bundled recipes by their names, and what is said of one that cannot be used."""

import pytest

from xret.heads.recipes.names import recipe_file, recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.errors import RecipeError

ALL = [name for name in recipe_names() if "/" not in name]
SYSTEMS = [name for name in ALL if "\n# Paper: " in recipe_file(name).read_text(encoding="utf-8")]
OURS = [name for name in ALL if name not in SYSTEMS]  # their values are ours
# All but the variants for COCO that differ from those for Flickr30K in numbers alone.
KINDS = [name for name in recipe_names() if "/coco-" not in name or name.startswith("gaussian")]


def text_kind(recipe):
    """Return a kind of captions that a recipe takes: words, unless it needs vectors."""
    needs_vectors = recipe.augment.mix or recipe.model.residual != "none"
    return recipe.data.text_kind or ("tokens" if needs_vectors else "words")


def small_settings(name):
    """Settings that make a recipe's head small and its epoch two steps long; nothing else."""
    recipe = load_recipe(name, ["model.dim=8"])
    batch = 4 if recipe.data.unit == "image" else 10  # of 8 images with 20 captions
    settings = ["model.dim=16", "adapter.words.word_dim=8", "schedule.epochs=1", f"data.batch_size={batch}"]
    settings += ["loss.embedding-graph.warmup_epochs=0"] if "embedding-graph" in recipe.terms else []
    settings += [f"aggregator.{side}.head_dim=8" for side, part in recipe.aggregator.items() if "head_dim" in part]
    return settings


def faults(name, *settings):
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(name), settings)
    return str(caught.value)
