"""``xret cache``: what a feature store holds, whether it is sound, and removal of sets."""

import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict, astuple, fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.wording import counted, in_bytes, printable, some_of
from .parsing import NEW_FILE, STORE, show

if TYPE_CHECKING:
    from ..pipeline.store.inspect import Verification


def _shape(features: dict[str, Any]) -> str:
    views = [f"{features['views']} views"] if features["views"] > 1 else []
    return " x ".join([*views, *map(str, features["shape"])]) or "token ids"


def _path(features: dict[str, Any]) -> str:
    return f"{features['modality']}/{features['name']}"


def _options(features: dict[str, Any]) -> str:
    """Return what the encoder saw of pictures, where that is known, and the options that tell it from others."""
    from ..pipeline.encoders.origin import grid_side

    options, preprocessing = [], features["identity"].get("preprocessing")
    if features["modality"] == "images" and isinstance(preprocessing, dict):
        side = grid_side(features["identity"])
        options += [f"{side} pixels"] if side else []
        options += ["whole pictures"] if preprocessing.get("whole") else []
    spec, keys = features["spec"] or {}, ("weights", "layer", "pool", "views", "regions", "prompt")
    return printable(", ".join([*options, *(f"{key} {spec[key]}" for key in keys if key in spec)]))


@click.group()
def cache() -> None:
    """Inspect, check and clean feature stores.

    \b
    xret cache info rsicd.zarr
    """


@cache.command()
@click.argument("store", type=STORE)
def info(store: str) -> None:
    """Show the data set, its splits and the feature sets of STORE.

    \b
    xret cache info rsicd.zarr
    """
    from ..pipeline.store.inspect import describe

    facts = describe(store)
    lines = [
        f"{facts['dataset']} ({facts['manifest_sha256'][:8]}): {counted(facts['images'], 'image')},"
        f" {counted(facts['captions'], 'caption')}, {in_bytes(facts['bytes'])}",
        "splits: " + ", ".join(f"{name} {count:,}" for name, count in facts["splits"].items()),
    ]
    for features in facts["sets"]:
        line = f"{_path(features)}: {features['kind']}, {_shape(features)}, {features['dtype']}"
        lines.append(f"{line}, {in_bytes(features['bytes'])}, {features['failed']} failed")
        lines += [f"  {options}"] if (options := _options(features)) else []
        done = ", ".join(f"{split} {count}/{all_}" for split, (count, all_) in features["done"].items())
        lines.append(f"  chunks done: {done}")
    show(facts, [*lines, *filter(None, [facts["leaks"]["sentence"]])])


@cache.command()
@click.argument("store", type=STORE)
def verify(store: str) -> None:
    """Read every chunk of STORE and report what is damaged.

    The exit code is 1 if anything is damaged, or if two sets are of different pictures. `xret extract` with the same
    options and --repair computes damaged chunks again.

    \b
    xret cache verify rsicd.zarr
    """
    from ..pipeline.store.inspect import verify as check

    report = check(store)
    lines = []
    for damage in report.damaged:
        where = "metadata" if damage.chunk is None else f"chunk {damage.chunk}"
        samples = f", samples {list(damage.samples)}" if damage.samples else ""
        lines.append(f"damaged: {damage.array}, {where}{samples}")
    lines += [f"failed sample {sample['id']}: {sample['reason']}" for sample in report.failed_samples]
    lines += [
        f"different pictures: {' and '.join(pair.sets)}, {counted(pair.images, 'file')} such as {pair.example}"
        for pair in report.differing
    ]
    lines += [report.leaks.sentence] if report.leaks and report.leaks.sentence else []
    state = "sound" if report.ok else counted(len(report.damaged), "damaged part")
    failed = f", {counted(len(report.failed_samples), 'failed sample')}" if report.failed_samples else ""
    lines.append(f"{store}: {counted(report.chunks, 'chunk')} read, {state}{failed}")
    show(report.to_json(), [*lines, *(f"To repair: {way}." for way in _repairs(store, report))])
    if not report.ok:
        sys.exit(1)


def _repairs(store: str, report: "Verification") -> Iterator[str]:
    of_sets = [damage.array for damage in report.damaged if damage.array.startswith(("images/", "captions/"))]
    if any(path.count("/") == 2 for path in of_sets):
        yield "run the same `xret extract` or `xret import` with --repair"
    if len(of_sets) < len(report.damaged):
        yield "copy the store again, or extract into another --store"
    for path in of_sets:
        if path.count("/") == 1:
            yield f"`xret cache rm {quote(store)} {quote(path)}`, then extract it again"
    if report.differing:
        yield "`xret cache rm` one of the two sets, then extract it again"


@cache.command()
@click.argument("place", metavar="STORE_OR_FOLDER")
def ls(place: str) -> None:
    """List the feature sets of a store, or the stores in a folder.

    \b
    xret cache ls rsicd.zarr
    xret cache ls s3://bucket/stores --json
    """
    from ..pipeline.errors import CacheError, StoreError
    from ..pipeline.store.inspect import describe, stores_at
    from ..pipeline.wording import aligned

    stores, rows, contents = stores_at(place), [], []
    for store in stores:
        try:
            facts = describe(store)
        except (CacheError, StoreError) as error:
            if stores == [place]:
                raise
            contents.append({"store": store, "error": str(error)})  # a damaged one hides no other
            click.echo(printable(str(error)), err=True)
            continue
        contents.append(facts)
        if stores == [place]:
            for features in facts["sets"]:
                size, done = in_bytes(features["bytes"]), f"{features['percent']:.0f}% done"
                about = features["kind"], _shape(features), features["dtype"], size, done, _options(features)
                rows.append([_path(features), *about])
        else:
            names = ", ".join(map(_path, facts["sets"]))
            rows.append([store, facts["dataset"], in_bytes(facts["bytes"]), names or "no feature set"])
    show(contents, aligned([[printable(cell) for cell in row] for row in rows]) if rows else [])


@cache.command()
@click.argument("store", type=STORE)
@click.option("--split", default="val", help="The split to compare.")
def align(store: str, split: str) -> None:
    """Rank pairs of image and caption sets, before any training.

    Compares each image set with each caption set. The best pair comes first, by the mean recall of a linear map that is
    fitted to the split train in closed form. Mutual nearest neighbours and linear CKA are printed beside it.

    \b
    xret cache align rsicd.zarr
    """
    from .. import align as measure

    alignment = measure(store, split)
    show(alignment.to_dict(), str(alignment))


@cache.command()
@click.argument("store", type=STORE)
@click.option("--set", "name", default="auto", metavar="PREFIX", help="The image set; needed where there are several.")
@click.option("--threshold", default=0.7, type=click.FloatRange(-1, 1), help="The least cosine that is listed.")
@click.option("--out", type=NEW_FILE, help="A CSV file to write, with all pairs.")
def leaks(store: str, name: str, threshold: float, out: Path | None) -> None:
    """Find pictures of one split that look like one of another.

    They may be re-encoded, resized or slightly cropped: their global features are compared. For each picture of val and
    test the nearest in train, and for test in val, is listed if the cosine, without the mean of all features, is high
    enough. Look at the pairs: encoders differ in the threshold that they need.

    \b
    xret cache leaks rsicd.zarr
    xret cache leaks rsicd.zarr --set resnet50 --threshold 0.6 --out near.csv
    """
    from ..pipeline.errors import OutputError
    from ..pipeline.files import making_file
    from ..pipeline.store import FeatureCache
    from ..pipeline.store.leaks import NearPair, near_pairs

    features = FeatureCache.open(store).image_set(name, "--set")
    pairs = near_pairs(features, threshold)
    if out is not None:
        with making_file(out, OutputError) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[field.name for field in fields(NearPair)], *map(astuple, pairs)])
    lines = [f"{pair.cosine:.4f}  {pair.split} {pair.image}  {pair.other_split} {pair.other}" for pair in pairs]
    summary = f"{store}: {counted(len(pairs), 'pair')} with a cosine of {threshold:g} or more by {features.name}"
    show({"set": features.name, "threshold": threshold, "pairs": [*map(asdict, pairs)]}, [*some_of(lines, 20), summary])


@cache.command()
@click.argument("store", type=STORE)
@click.argument("features", metavar="SET")
def rm(store: str, features: str) -> None:
    """Delete a feature set of STORE.

    SET is its whole name, as `xret cache ls` prints it.

    \b
    xret cache rm rsicd.zarr images/resnet18@1f3a5c7e
    """
    from ..pipeline.store.inspect import remove_set

    path, size = remove_set(store, features)
    show({"removed": path, "bytes": size}, f"{path}: removed, {in_bytes(size)} freed")
