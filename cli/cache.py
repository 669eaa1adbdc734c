"""``xret cache``: what a feature cache holds, and whether it is sound."""

import json
import sys

import click


@click.group()
def cache() -> None:
    """Look into a feature cache.

    \b
    xret cache info rsicd.zarr
    xret cache verify rsicd.zarr
    """


@cache.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def info(store: str, as_json: bool) -> None:
    """Show the data set, its splits and the feature sets of STORE.

    \b
    xret cache info rsicd.zarr
    """
    from ..pipeline.verify import describe

    facts = describe(store)
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{facts['dataset']} ({facts['manifest_sha256'][:8]}): {facts['images']} images,"
               f" {facts['captions']} captions, {facts['bytes'] / 1e6:.1f} MB")  # fmt: skip
    click.echo("splits: " + ", ".join(f"{name} {count}" for name, count in facts["splits"].items()))
    for features in facts["sets"]:
        shape = " x ".join(str(number) for number in features["shape"]) or "token ids"
        click.echo(
            f"{features['modality']}/{features['name']}: {features['kind']}, {shape}, {features['dtype']},"
            f" {features['bytes'] / 1e6:.1f} MB, {features['failed']} failed"
        )
        click.echo("  shards done: " + ", ".join(f"{s} {a}/{b}" for s, (a, b) in features["done"].items()))


@cache.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def verify(store: str, as_json: bool) -> None:
    """Read every file of STORE and report what is damaged; the exit code is 1 if anything is.

    \b
    xret cache verify rsicd.zarr
    """
    from ..pipeline import verify as checking

    report = checking.verify(store)
    if as_json:
        click.echo(json.dumps(report))
    else:
        for damage in report["damaged"]:
            where = "metadata" if damage["shard"] is None else f"shard {damage['shard']}, samples {damage['samples']}"
            click.echo(f"damaged: {damage['array']}, {where}")
        for failed in report["failed_samples"]:
            click.echo(f"failed sample {failed['id']}: {failed['reason']}")
        state = "sound" if report["ok"] else f"{len(report['damaged'])} damaged parts"
        click.echo(f"{store}: {report['shards']} shards read, {state}")
    if not report["ok"]:
        sys.exit(1)
