"""Recipes: published systems as YAML, read, changed by settings and checked.

`systems/setdiv.yaml` is the recipe `setdiv`. An entry of its block `variants` is `setdiv/f30k-butd-bigru`, and
says only what differs from `setdiv`, or from its `base`: another variant of the file, or another recipe.
"""
