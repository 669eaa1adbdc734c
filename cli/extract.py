"""``xret extract``: stage one."""

import json
from pathlib import Path
from typing import Any

import click


def _size(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}"


def _comma_list(_ctx: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


@click.command()
@click.argument("dataset")
@click.option("--store", required=True, help="The feature cache: a local path or an fsspec URL.")
@click.option(
    "--data-root",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="What the manifest's relative paths are relative to; without it, the manifest's folder.",
)
@click.option("--visual", default="resnet152", show_default=True, help="A torchvision classification network, or none.")
@click.option("--visual-weights", default="imagenet", show_default=True, help="imagenet, a file, or random:SEED.")
@click.option("--image-size", default=224, show_default=True, type=click.IntRange(32, 2048), help="Pixels a side.")
@click.option(
    "--text", default="bert", show_default=True, type=click.Choice(["bert", "words", "none"]), help="Caption encoder."
)
@click.option(
    "--text-weights", default="bert-base-uncased", show_default=True, help="Hub id or local folder, for bert."
)
@click.option(
    "--splits", default="train,val,test", show_default=True, callback=_comma_list, help="Which to compute now."
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1), help="Samples encoded at once.")
@click.option("--dtype", default="float16", show_default=True, type=click.Choice(["float16", "float32"]))
@click.option("--shard-images", type=click.IntRange(1), help="Images in a shard; by default 16 shards, at most 512.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--scheduler", metavar="ADDRESS", help="Run on this Dask cluster (tcp://…) instead of this process.")
@click.option("--workers", type=click.IntRange(1), help="Threads beside the encoder; by default one a core.")
@click.option(
    "--on-error",
    default="fail",
    show_default=True,
    type=click.Choice(["fail", "skip"]),
    help="What an image that cannot be read does: stop, or be recorded with its reason.",
)
@click.option("--repair", is_flag=True, help="Compute shards again that are damaged or hold samples that failed.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def extract(dataset: str, store: str, data_root: Path | None, as_json: bool, **options: Any) -> None:
    """Encode the images and captions of DATASET once, into the feature cache STORE.

    DATASET is a manifest's name (coco, flickr30k, flickr8k, rsicd) or the path of a manifest. Stopped at any moment
    and started again with the same words, it goes on where it was.

    \b
    xret extract rsicd --data-root DIR --store rsicd.zarr --visual mobilenet_v2 \\
        --visual-weights mobilenet_v2.safetensors --text bert --text-weights MiniLM
    """
    from ..pipeline import extraction
    from ..pipeline.manifest import load_manifest

    if options["visual"] == options["text"] == "none" or not options["splits"]:
        raise click.UsageError("nothing to extract: give --visual or --text, and at least one of --splits")
    for key in ("visual", "text"):
        options[key] = None if options[key] == "none" else options[key]
    summary = extraction.extract(load_manifest(dataset, data_root), store, extraction.Options(**options))
    if as_json:
        click.echo(json.dumps(summary))
        return
    click.echo(f"{summary['dataset']}: {summary['images']} images, {summary['captions']} captions in {store}")
    for features in summary["sets"]:
        shares = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in features["shares"].items())
        click.echo(
            f"  {features['name']}: {features['samples']} encoded in {features['seconds']:.1f} s"
            f" ({_size(features['per_second'])}/s; {shares}), {features['shards']} shards written,"
            f" {features['shards_before']} there before, {features['failed']} failed"
        )
    if summary.get("words"):
        unknown = 100 * summary["unknown_tokens"] / max(summary["tokens"], 1)
        click.echo(f"  vocabulary: {summary['words']} words, {unknown:.1f}% of the tokens are unknown")
    for key in ("captions_without_words", "captions_truncated"):
        if summary.get(key):
            click.echo(f"  {key.replace('_', ' ')}: {summary[key]}")
