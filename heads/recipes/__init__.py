"""Recipes: published systems as YAML, read, changed by settings and checked.

The name of a bundled recipe follows from its place in `systems/`:

- A system's own file gives the system's name: `systems/setdiv.yaml` is `setdiv`.
- A folder beside it that bears its name holds its variants: `systems/setdiv/f30k-butd-bigru.yaml` is
  `setdiv/f30k-butd-bigru`.
- Any other folder only groups systems: `systems/baselines/linear.yaml` would be `linear`, and
  `systems/baselines/linear/coco.yaml` its variant `linear/coco`.
"""
