"""``xret train-head``: stage two."""

import json
from dataclasses import asdict

import click


@click.command("train-head")
@click.argument("store")
@click.option("--recipe", required=True, metavar="NAME|FILE", help="A name that `xret recipes` lists, or a YAML file.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a value of the recipe; as often as needed."
)
@click.option(
    "--also",
    multiple=True,
    metavar="STORE2",
    help="Learn the training split of this store as well, extracted with the same words; as often as needed.",
)
@click.option("--out", required=True, help="The run folder; must not exist, unless --resume.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Same seed, same numbers."
)
@click.option("--resume", is_flag=True, help="Go on where it stopped, with the same words as before.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def train_head(
    store: str,
    recipe: str,
    settings: tuple[str, ...],
    also: tuple[str, ...],
    out: str,
    device: str,
    seed: int,
    resume: bool,
    as_json: bool,
) -> None:
    """Train a head on the features in STORE, and keep its best epoch by validation RSUM.

    \b
    xret train-head rsicd.zarr --recipe setdiv --out run
    xret train-head rsicd.zarr --recipe setdiv --set schedule.epochs=20 --set loss.triplet.margin=0.2 --out run2
    xret train-head coco.zarr --also f30k.zarr --recipe vse-infty --out run3
    torchrun --nproc-per-node 2 -m xret.cli train-head rsicd.zarr --recipe setdiv --out run4
    """
    from ..heads.ranks import speaks
    from ..heads.recipe import load_recipe
    from ..heads.training import train

    summary = train(store, load_recipe(recipe, settings), out, device=device, seed=seed, resume=resume, also=also)
    if not speaks():
        return
    if as_json:
        click.echo(json.dumps(asdict(summary)))
        return
    done = f"{summary.trained} epochs in {summary.seconds:.1f} s" if summary.trained else "it was complete already"
    click.echo(
        f"{summary.run}: {done}; best of {summary.epochs}: epoch {summary.best_epoch}, "
        f"validation RSUM {summary.best_rsum:.1f}"
    )
