"""Recipes: published systems as YAML, read, changed by settings and checked."""
