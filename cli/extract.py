"""``xret extract`` and ``xret import``: stage one."""

import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.exchange import FORMATS
from ..pipeline.wording import counted, some_of
from .parsing import FOLDER, comma_list, device_option, key_values, show, trust_option, workers

if TYPE_CHECKING:
    from ..pipeline.extraction.summary import Extraction, SetSummary


def _numbers(pattern: str, advice: str) -> Any:
    """Return what reads the whole numbers of a text that fits a pattern."""

    def read(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
        if value is not None and not re.fullmatch(pattern, value):
            raise click.BadParameter(f"'{value}' {advice}")
        return None if value is None else [int(number) for number in re.findall(r"(?<!\d)-?\d+", value)]

    return read


_LAYERS = _numbers(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", "names no layers; give one, as 9, or several, as 6,9,12")
_POOL = _numbers(r"\d+x\d+", "is no window; give height and width in cells, as 2x2")
_REGIONS = _numbers(r"\d+(-\d+)?", "is no number of boxes; give one, as 36, or a range, as 10-100")


# Options of every command that fills a store.
STORE = click.option("--store", required=True, help="The feature store: a local path or an fsspec URL.")
DATA_ROOT = click.option(
    "--data-root", type=FOLDER, help="Folder that the manifest's paths start from; by default the manifest's own."
)
DTYPE = click.option("--dtype", default="float16", metavar="float16|float32", help="How features are stored.")
SPLITS = click.option("--splits", default="train,val,test", help="Which splits to compute now.")
ON_ERROR = click.option(
    "--on-error",
    default="fail",
    type=click.Choice(["fail", "skip"]),
    help="At a sample that cannot be read: stop, or record the reason and go on.",
)


@click.command()
@click.argument("dataset")
@STORE
@DATA_ROOT
@click.option(
    "--visual",
    default="resnet152",
    metavar="ENCODER",
    help="A torchvision classification network; an image model of transformers, hf:ID or hf:DIR (CLIP, SigLIP, "
    "DINOv2, DINOv3, ViT, Swin, ConvNeXt, …); timm:NAME or timm:NAME.TAG; open_clip:ARCH/TAG; another that `xret "
    "list encoders` names; none; or your own class, MODULE:CLASS, whose code is run.",
)
@click.option(
    "--text",
    default="bert",
    metavar="ENCODER",
    help="bert, words, none; a text encoder of transformers, hf:ID or hf:DIR (CLIP, SigLIP, RoBERTa, MPNet, "
    "T5, a folder of sentence-transformers, …); open_clip:ARCH/TAG; or your own class, MODULE:CLASS.",
)
@click.option(
    "--encoder",
    metavar="hf:ID|hf:DIR|open_clip:ARCH/TAG|RUN",
    help="A model of pictures and texts, such as CLIP, or the backbones that `xret finetune` saved in RUN; "
    "replaces --visual and --text.",
)
@click.option(
    "--visual-weights",
    help="A file, random:SEED, or imagenet, the default: the published weights; for timm: and open_clip: those "
    "of the tag.",
)
@click.option(
    "--text-weights",
    help="For bert: a model id of the Hugging Face hub or a local folder, by default bert-base-uncased. For "
    "open_clip: a file or random:SEED; by default the weights of the tag.",
)
@click.option(
    "--layers",
    default="-1",
    metavar="N,N,…",
    callback=_LAYERS,
    help="Layers of the local features, one feature set each; -1 is the last. 0 are the embeddings of texts and of "
    "hf:, and the first block or stage of images of timm: and open_clip:.",
)
@click.option(
    "--image-size",
    type=click.IntRange(32, 2048),
    metavar="PIXELS",
    help="Side of the input, for grids; by default 224, or for hf:, timm: and open_clip: the model's own.",
)
@click.option(
    "--whole",
    is_flag=True,
    help="Squeeze the whole picture into the square input, instead of cropping its middle; for grids.",
)
@click.option(
    "--pool",
    callback=_POOL,
    metavar="HxW",
    help="Average a grid's cells in windows, such as 2x2, before they are stored.",
)
@click.option(
    "--views",
    metavar="crop-flip:N|dihedral:N",
    help="Cache N views of each picture, for grids; the first is the picture itself. crop-flip: random crops, "
    "half of them mirrored. dihedral: turned by quarters and mirrored, at most 8; for pictures from the "
    "air.",
)
@click.option(
    "--regions", callback=_REGIONS, metavar="N|MIN-MAX", help="Boxes in an image, for detectors; by default 36."
)
@click.option("--frames", type=click.IntRange(1), help="Images are folders of video frames; encode at most this many.")
@click.option("--prompt", metavar="TEMPLATE", help='Template for each caption, such as "a photo of {}".')
@DTYPE
@SPLITS
@click.option(
    "--reuse", metavar="STORE", help="Copy the features of identical picture files and captions from another store."
)
@click.option("--batch-size", default=64, type=click.IntRange(1), help="Samples encoded at once.")
@device_option
@click.option(
    "--workers",
    callback=workers,
    metavar="N|tcp://…",
    help="Threads that read pictures, by default one a core, at most eight (for a GPU processes, one a core); or the "
    "address of a Dask scheduler, whose workers do everything.",
)
@ON_ERROR
@click.option("--repair", is_flag=True, help="Compute damaged chunks and failed samples again.")
@trust_option
@click.option(
    "--plan",
    "planned",
    is_flag=True,
    help="Only print how many samples, bytes, tasks and hours are left, from a hundred pictures that are encoded now.",
)
@click.option("--price", type=click.FloatRange(min=0), help="Of an hour of a worker, for the cost in --plan.")
def extract(dataset: str, store: str, planned: bool, price: float | None, **options: Any) -> None:
    """Encode images and captions once, into a feature store.

    DATASET is a manifest's name (coco, flickr30k, flickr8k, rsicd) or the path of a manifest. Run the same command
    again to resume after a stop.

    \b
    xret extract rsicd --data-root DIR --store rsicd.zarr
    xret extract photos.yaml --store photos.zarr \\
        --encoder hf:openai/clip-vit-base-patch32
    xret extract rsicd --data-root DIR --store rsicd.zarr \\
        --visual mobilenet_v2 --visual-weights mobilenet_v2.safetensors \\
        --text bert --text-weights MiniLM
    """
    from .. import extract as run
    from .. import plan

    if price is not None and not planned:
        raise click.UsageError("--price is for --plan; give both or none")
    if planned:
        foreseen = plan(dataset, store, price=price, **options)
        show(foreseen.to_json(), str(foreseen))
        return
    summary = run(dataset, store, **options)
    show(summary.to_json(), _lines(summary))


def _names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, str]:
    return key_values(ctx, parameter, comma_list(ctx, parameter, value))


_HELP = """Import features that others extracted into a feature store.

Features are regions, or embeddings of images and captions. DATASET is a manifest's name or path, as for extract;
without it, the images and captions of embeddings are the data set. The source's ids may be the data set's ids
(Karpathy's imgid), COCO ids or file names. Pickles are never opened. Run the same command again to resume.

\b
{formats}

\b
xret import flickr30k --data-root DIR --store f30k.zarr \\
    --from scan --source f30k_precomp
xret import coco --data-root DIR --store coco.zarr \\
    --from hdf5 --source coco.h5 \\
    --arrays local=features,boxes=boxes,length=num_boxes,id=image_ids
xret import --store laion.zarr \\
    --from embeddings --source laion --encoder ViT-B/32
"""
_FORMATS = (f"{name:16}{table.layout}" for name, table in FORMATS.items())


@click.command("import", help=_HELP.format(formats="\n".join(_FORMATS)))
@click.argument("dataset", required=False)
@STORE
@click.option(
    "--from",
    "format_",
    required=True,
    type=click.Choice([*FORMATS]),
    metavar="FORMAT",
    help="The format of the features: one of those above.",
)
@click.option("--source", required=True, type=click.Path(path_type=Path), help="The file or folder of the features.")
@click.option(
    "--arrays", callback=_names, metavar="ROLE=NAME,…",
    help="For hdf5: how the file names the arrays local and id, and length, boxes, classes, scores and size if "
    "there are any; not needed where it names them so. For embeddings: the arrays or columns of image and text.",
)  # fmt: skip
@click.option(
    "--encoder", callback=comma_list, metavar="NAME",
    help="The model that made the features; IMAGES,CAPTIONS for embeddings by two models.",
)  # fmt: skip
@click.option(
    "--kind", default="roi", type=click.Choice(["roi", "frames"]),
    help="What a row of features is: a region of a picture, or a frame of a video.",
)  # fmt: skip
@DATA_ROOT
@DTYPE
@SPLITS
@ON_ERROR
@click.option("--repair", is_flag=True, help="Write damaged chunks and failed samples again.")
def import_(dataset: str | None, store: str, data_root: Path | None, **options: Any) -> None:
    """Import features that others extracted into a feature store; see `_HELP`."""
    from ..pipeline.data.manifest import load_manifest
    from ..pipeline.exchange.importers.source import ImportOptions
    from ..pipeline.exchange.importing import import_features

    if not options["splits"].strip(","):
        raise click.UsageError("nothing to import: give at least one of --splits")
    if dataset is None and data_root is not None:
        raise click.UsageError("--data-root is for a DATASET, which is not given; leave it out")
    manifest = None if dataset is None else load_manifest(dataset, data_root)
    summary = import_features(manifest, store, ImportOptions(**options))
    show(summary.to_json(), _lines(summary))


def _lines(summary: "Extraction") -> Iterator[str]:
    counts = f"{counted(summary.images, 'image')}, {counted(summary.captions, 'caption')}"
    yield f"{summary.dataset}: {counts} in {summary.store}"
    for features in summary.sets:
        yield from _lines_of_set(features, summary)
    if "words" in summary.counts:
        shares = (f"{100 * share:.1f}% of {split}" for split, share in summary.counts["unknown_by_split"].items())
        yield f"  vocabulary: {counted(summary.counts['words'], 'word')}; unknown tokens: {', '.join(shares)}"
    for what, number in (
        ("captions without a known word", summary.counts.get("captions_unknown")),
        ("captions without words", summary.counts.get("captions_without_words")),
        ("captions truncated", summary.counts.get("captions_truncated")),
        ("entries of the source that are not in the data set", summary.unmatched),
    ):
        if number:
            yield f"  {what}: {number:,}"
    if summary.leaks and summary.leaks.sentence:
        yield f"  {summary.leaks.sentence}"
    if any(features.failed for features in summary.sets):
        yield f"`xret cache verify {quote(summary.store)}` lists all that failed; {_way_out(summary)}."


def _lines_of_set(features: "SetSummary", summary: "Extraction") -> Iterator[str]:
    imported = summary.unmatched is not None
    again = f", {features.reused:,} reused" if features.reused else ""
    took = ""
    if features.chunks:
        times = {name: seconds for name, seconds in features.shares.items() if not (imported and name == "encode")}
        work = ", ".join(f"{name} {seconds / max(sum(times.values()), 1e-9):.0%}" for name, seconds in times.items())
        rate = f"{features.per_second:,.{0 if features.per_second >= 10 else 1}f}"
        took = f" in {features.seconds:.1f} s ({rate}/s; work: {work})"
    matched = f", matched by {summary.matched_by}" if summary.matched_by else ""
    yield (
        f"  {features.name}: {features.samples:,} {'imported' if imported else 'encoded'}{again}{took}{matched},"
        f" {counted(features.chunks, 'chunk')} written, {features.chunks_before:,} there before,"
        f" {features.failed:,} failed"
    )
    if features.read_as:
        yield f"    read as {features.read_as}"
    yield from (f"    {line}" for line in some_of([f"failed: {reason}" for reason in features.reasons]))


def _way_out(summary: "Extraction") -> str:
    if summary.unmatched is None:
        return "repair those files and run the same command with --repair"
    if len(summary.sets) == 1:  # regions
        return "a repaired source is imported beside this one"
    # Embeddings, of which a store holds those of a name once.
    sets = zip(("images", "captions"), summary.sets, strict=True)
    remove = [f"`xret cache rm {quote(summary.store)} {quote(f'{side}/{features.name}')}`" for side, features in sets]
    return f"repair the source, run {' and '.join(remove)}, and import again"
