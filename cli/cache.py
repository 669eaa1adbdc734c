"""``xret cache``: what a feature cache holds, whether it is sound, removal, merging and export."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..pipeline.wording import counted, in_bytes, printable
from .parsing import comma_list

if TYPE_CHECKING:
    from ..pipeline.cache.storage.generations import Generation
    from ..pipeline.cache.upkeep.contents import SetContents

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")


def _shape(features: "SetContents") -> str:
    views = [f"{features.views} views"] if features.views > 1 else []
    return " x ".join([*views, *map(str, features.shape)]) or "token ids"


def _spent(features: "SetContents") -> str:
    """Return how many bytes a stored value takes, and how many values belong to no sample."""
    if features.bytes_per_value is None or features.padding is None:
        return ""
    return (
        f", {features.bytes_per_value:.2f} bytes a stored value where raw are {features.raw_bytes_per_value};"
        f" {100 * features.padding:.1f}% of the values are padding, as all shards have one length"
    )


def _seen(features: "SetContents") -> str:
    """Return what the encoder saw of pictures: side, whole or not, upright or not; empty where that is not known."""
    from ..pipeline.encoders import is_own, sees_whole, turns_upright
    from ..pipeline.reading.origin import grid_side

    identity = dict(features.identity)
    if features.modality != "images" or "preprocessing" not in identity or is_own(str(identity.get("encoder"))):
        return ""
    side = grid_side(identity)
    pixels = "" if side is None else f"{side} pixels, "
    whole = "whole pictures, " if sees_whole(identity) else ""
    return f"{pixels}{whole}EXIF orientation {'' if turns_upright(identity) else 'not '}applied"


@click.group()
def cache() -> None:
    """Look into feature caches and look after them.

    \b
    xret cache info rsicd.zarr
    xret cache verify rsicd.zarr
    xret cache ls DIR
    xret cache rm rsicd.zarr resnet18
    xret cache rm rsicd.zarr --old
    xret cache merge rsicd.zarr train.zarr test.zarr
    xret cache export rsicd.zarr --to npy --out rsicd_precomp
    """


@cache.command()
@click.argument("store")
@_JSON
def info(store: str, as_json: bool) -> None:
    """Show the data set, its splits and the feature sets of STORE.

    \b
    xret cache info rsicd.zarr
    """
    from ..pipeline.cache.upkeep.contents import describe

    facts = describe(store)
    if as_json:
        click.echo(json.dumps(asdict(facts)))
        return
    click.echo(
        f"{printable(facts.dataset)} ({facts.manifest_sha256[:8]}): {counted(facts.images, 'image')},"
        f" {counted(facts.captions, 'caption')}, {in_bytes(facts.bytes)}"
    )
    click.echo(printable("splits: " + ", ".join(f"{name} {count:,}" for name, count in facts.splits.items())))
    for features in facts.sets:
        click.echo(
            printable(
                f"{features.path}: {features.kind}, {_shape(features)}, {features.dtype},"
                f" {in_bytes(features.bytes)}, {features.failed} failed"
            )
        )
        if seen := _seen(features):
            click.echo(f"  {seen}")
        click.echo(f"  compression: {features.codec}{_spent(features)}")
        click.echo(printable("  shards done: " + ", ".join(f"{s} {a}/{b}" for s, (a, b) in features.done.items())))


@cache.command()
@click.argument("store")
@_JSON
def verify(store: str, as_json: bool) -> None:
    """Read every file of STORE and report what is damaged.

    The command that repairs comes last. The exit code is 1 if anything is damaged.

    \b
    xret cache verify rsicd.zarr
    """
    from ..pipeline.cache.upkeep import verify as checking
    from ..pipeline.extraction.repair import remedies

    found = checking.verify(store)
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        for damage in found.damaged:
            where = "metadata" if damage.shard is None else f"shard {damage.shard}"
            samples = f", samples {list(damage.samples)}" if damage.samples else ""
            click.echo(printable(f"damaged: {damage.array}, {where}{samples}"))
        for sample in found.failed_samples:
            click.echo(printable(f"failed sample {sample.id}: {sample.reason}"))
        state = "sound" if found.ok else counted(len(found.damaged), "damaged part")
        failed = f", {counted(len(found.failed_samples), 'failed sample')}" if found.failed_samples else ""
        click.echo(f"{store}: {counted(found.shards, 'shard')} read, {state}{failed}")
        for line in remedies(store, found):
            click.echo(printable(f"To repair: {line}."))
    if not found.ok:
        sys.exit(1)


@cache.command()
@click.argument("place", metavar="STORE_OR_FOLDER")
@_JSON
def ls(place: str, as_json: bool) -> None:
    """List the feature sets of a store, or the stores in a folder.

    The generations of a store that has grown are listed, too.

    \b
    xret cache ls rsicd.zarr
    xret cache ls s3://bucket/caches --json
    """
    from ..pipeline.cache.upkeep.contents import describe, partials_at, stores_at
    from ..pipeline.errors import CacheError, StoreError

    stores, rows, found = stores_at(place), [], []
    for store in stores:
        try:
            facts = describe(store)
        except (CacheError, StoreError) as error:
            if stores == [place]:
                raise
            found.append({"store": store, "error": str(error)})  # one that is damaged hides no other
            rows.append([str(error)])
            continue
        found.append(asdict(facts))
        if stores == [place]:
            rows += [_row(features) for features in facts.sets]
            if facts.generations[1:] or facts.generation > 1:
                rows += [[_said(one)] for one in facts.generations]
        else:
            names = ", ".join(features.path for features in facts.sets)
            rows.append([store, facts.dataset, in_bytes(facts.bytes), names or "no feature set"])
    if left := partials_at(place):
        note = (
            f"Note: {counted(len(left), 'partial file')} in {place}, such as {left[0].name}: of a killed process, which"
        )
        click.echo(printable(f"{note} the same command removes when it runs again, or of one at work."), err=True)
    if as_json:
        click.echo(json.dumps(found))
        return
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)] if len(row) > 1 else row
        click.echo("  ".join(padded).rstrip())


def _said(one: "Generation") -> str:
    of = f"{counted(one.images, 'image')}, manifest {one.manifest_sha256[:8]}"
    return f"generation {one.number} ({one.state}): {of}, {in_bytes(one.bytes)}"


def _row(features: "SetContents") -> list[str]:
    done = f"{features.percent:.0f}% done"
    size = in_bytes(features.bytes)
    return [features.path, features.kind, _shape(features), features.dtype, size, done, _seen(features)]


@cache.command()
@click.argument("store")
@click.argument("features", metavar="[SET]", required=False)
@click.option("--old", is_flag=True, help="Delete all generations but the current one, instead of a feature set.")
@click.option("--yes", is_flag=True, help="Remove it without asking.")
@_JSON
def rm(store: str, features: str | None, old: bool, yes: bool, as_json: bool) -> None:
    """Delete a feature set of STORE.

    SET is what its name begins with, after images/ or captions/ if need be.

    \b
    xret cache rm rsicd.zarr resnet18
    xret cache rm rsicd.zarr images/resnet18@1f2e --yes
    xret cache rm rsicd.zarr --old
    """
    from ..pipeline.cache.upkeep.contents import remove_set, set_to_remove

    if (features is None) != old:
        raise click.UsageError("give either a feature set or --old")
    if as_json and not yes:
        raise click.UsageError("with --json nothing is asked; give --yes as well")
    if features is None:
        _free_old(store, yes, as_json)
        return
    removal = set_to_remove(store, features)
    path = removal.removed
    _require_agreed(path, removal.bytes, store, yes)
    removal = remove_set(store, path)
    freed = f"{removal.removed}: removed, {in_bytes(removal.bytes)} freed"
    click.echo(json.dumps(asdict(removal)) if as_json else freed)


def _free_old(store: str, yes: bool, as_json: bool) -> None:
    from ..pipeline.cache.storage.generations import free_old, old

    found = old(store)
    if found.generations:
        said = "generation " + ", ".join(map(str, found.generations))
        lost = f" (with {', '.join(found.lost)}, which the current one lacks)" if found.lost else ""
        _require_agreed(printable(said + lost), found.bytes, store, yes)
        found = free_old(store)
        freed = printable(f"{said}{lost}: removed, {in_bytes(found.bytes)} freed")
    else:
        freed = f"{store} has no old generation"
    click.echo(json.dumps(asdict(found)) if as_json else freed)


def _require_agreed(what: str, size: int, store: str, yes: bool) -> None:
    """Ask whether something is to be removed, unless that was said; raise ClickException where it is not."""
    if yes:
        return
    try:
        agreed = click.confirm(f"Remove {what} ({in_bytes(size)}) from {store}?", err=True)
    except click.Abort:  # nobody is there to answer
        click.echo(err=True)
        agreed = False
    if not agreed:
        raise click.ClickException(f"{what} was not removed; agree, or give --yes to remove it without being asked")


@cache.command()
@click.argument("store")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@_JSON
def merge(store: str, sources: tuple[str, ...], as_json: bool) -> None:
    """Copy what other stores have finished into STORE.

    STORE is made if it is not there. For splits that were extracted on different machines: the manifest, the encoder
    and the length of the shards must be the same. Each shard is checked and copied whole; stopped and started again, it
    goes on where it was.

    \b
    xret cache merge coco.zarr coco-train.zarr coco-rest.zarr
    """
    from ..pipeline.cache.upkeep.merge import merge as merge_stores

    summary = merge_stores(store, sources)
    if as_json:
        click.echo(json.dumps(asdict(summary)))
        return
    for features in summary.sets:
        finished = features.shards + features.shards_before
        click.echo(
            f"{printable(f'{features.modality}/{features.name}')}: {counted(features.shards, 'shard')} copied,"
            f" {features.shards_before} there before, {finished}/{features.shards_in_all} done,"
            f" {features.failed} failed"
        )


@cache.command()
@click.argument("store")
@click.option("--to", required=True, type=click.Choice(["npy", "hdf5"]), help="SCAN's arrays, or one HDF5 file.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder (npy) or file (hdf5) to write.")
@click.option("--set", "sets", multiple=True, metavar="PREFIX", help="A set to export; by default the only ones there.")
@click.option(
    "--splits", default="train,val,test", show_default=True, callback=comma_list, help="Which splits to export."
)
@_JSON
def export(store: str, to: str, out: Path, sets: tuple[str, ...], splits: tuple[str, ...], as_json: bool) -> None:
    """Write features of STORE for the code of others.

    Images that failed are left out with their captions, and captions that failed. npy is SCAN's folder of
    {train,dev,test}_{ims.npy,caps.txt,ids.txt}: float32, a row an image if each has five captions, else a row a
    caption. hdf5 is one file with images/local, global, length, boxes, id, captions/text, token and so on, in the
    store's own precision; `xret import` takes the images of both again, as regions without a global feature.

    \b
    xret cache export f30k.zarr --to npy --out f30k_precomp --set resnet152
    xret cache export f30k.zarr --to hdf5 --out f30k.h5 --splits test \\
        --set images/butd --set captions/bert
    """
    from ..pipeline.exchange.exporters.export import export as write

    if not splits:
        raise click.UsageError("there is no split to export; give at least one as --splits")
    summary = write(store, to, out, sets, splits)
    if as_json:
        click.echo(json.dumps(asdict(summary)))
        return
    click.echo(printable(f"{out}: {', '.join(summary.sets)}, {in_bytes(summary.bytes)}"))
    for split, counts in summary.splits.items():
        left_out = f", {counted(counts.left_out, 'failed image')} left out" if counts.left_out else ""
        click.echo(
            f"  {printable(split)}: {counted(counts.images, 'image')}, {counted(counts.captions, 'caption')}{left_out}"
        )
