"""``xret extract``: stage one."""

from typing import Any

import click

from .parsing import FOLDER, device_option, workers
from .summaries import print_summary


def _regions(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    fewest, dash, most = value.partition("-")
    most = most if dash else fewest
    if not (fewest.isdecimal() and most.isdecimal() and 1 <= int(fewest) <= int(most)):
        raise click.BadParameter(f"'{value}' is no number of boxes; give one, as 36, or a range, as 10-100")
    return int(fewest), int(most)


def _pool(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    height, _, width = value.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise click.BadParameter(f"'{value}' is no window; give height and width in cells, as 2x2")
    return int(height), int(width)


# Options of every command that fills a store.
STORE = click.option("--store", required=True, help="The feature store: a local path or an fsspec URL.")
DATA_ROOT = click.option(
    "--data-root",
    type=FOLDER,
    help="What the manifest's relative paths are relative to; without it, the manifest's folder.",
)
DTYPE = click.option(
    "--dtype", default="float16", show_default=True, metavar="float16|float32", help="How features are stored."
)
SPLITS = click.option("--splits", default="train,val,test", show_default=True, help="Which splits to compute now.")
ON_ERROR = click.option(
    "--on-error",
    default="fail",
    show_default=True,
    type=click.Choice(["fail", "skip"]),
    help="At a sample that cannot be read: stop, or record it with the reason and go on.",
)


@click.command()
@click.argument("dataset")
@STORE
@DATA_ROOT
@click.option(
    "--visual",
    default="resnet152",
    show_default=True,
    metavar="ENCODER",
    help="A torchvision classification network; hf:ID or hf:DIR, an image model of transformers from the hub or a"
    " folder (CLIP, SigLIP, DINOv2, DINOv3, ViT, Swin, ConvNeXt, …); timm:NAME or timm:NAME.TAG; open_clip:ARCH/TAG;"
    " butd, butd-grid, fasterrcnn_resnet50_fpn_v2, plain-ground; none; or a class of your own as MODULE:CLASS, which is"
    " run.",
)
@click.option(
    "--text",
    default="bert",
    show_default=True,
    metavar="ENCODER",
    help="bert, words, none; hf:ID or hf:DIR, a text encoder of transformers (CLIP, SigLIP, RoBERTa, MPNet, T5, a"
    " folder of sentence-transformers, …); or open_clip:ARCH/TAG.",
)
@click.option(
    "--encoder",
    metavar="hf:ID|hf:DIR|open_clip:ARCH/TAG|RUN",
    help="A model of pictures and texts, such as CLIP, or the backbones that `xret finetune` left in RUN; in place of"
    " --visual and --text.",
)
@click.option(
    "--visual-weights",
    help="A file, random:SEED, or imagenet, the default: the published ones, of timm: and open_clip: those of the tag.",
)
@click.option(
    "--text-weights",
    help="For bert: a model id of the Hugging Face hub, by default bert-base-uncased, or a local folder. For open_clip:"
    " a file, or random:SEED, in place of those of the tag.",
)
@click.option(
    "--layer",
    default=-1,
    show_default=True,
    metavar="N",
    type=int,
    help="The layer that gives the local features; -1 the last. Of hf: and bert 0 are the embeddings, of timm: and"
    " open_clip: the first block or stage.",
)
@click.option(
    "--image-size",
    type=click.IntRange(32, 2048),
    metavar="PIXELS",
    help="Side of the input, for grids; by default 224, and of hf:, timm: and open_clip: the model's own.",
)
@click.option(
    "--whole",
    is_flag=True,
    help="Squeeze whole pictures into the square input, for grids that would cut out their middle.",
)
@click.option(
    "--pool",
    callback=_pool,
    metavar="HxW",
    help="Average the cells of a grid in windows of so many, as 2x2, before they are stored.",
)
@click.option(
    "--views",
    metavar="crop-flip:N|dihedral:N",
    help="Cache N views of each picture, for grids; the first is the picture itself. The others are random crops,"
    " mirrored half the time; or the turns and mirrorings of a square, up to eight, for pictures from the air.",
)
@click.option(
    "--regions", callback=_regions, metavar="N|MIN-MAX", help="Boxes of an image for detectors, by default 36."
)
@click.option("--frames", type=click.IntRange(1), help="Images are folders of video frames; take at most so many.")
@click.option(
    "--prompt",
    metavar="TEMPLATE",
    help='What is encoded in place of a caption, which stands in it for {}: "a photo of {}".',
)
@DTYPE
@SPLITS
@click.option(
    "--reuse",
    metavar="STORE",
    help="Copy the features of pictures with the same bytes and captions with the same text from another store.",
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1), help="Samples encoded at once.")
@device_option
@click.option(
    "--workers",
    callback=workers,
    metavar="N|tcp://…",
    help="Threads that read pictures, by default one a core, eight at most; or the address of a Dask scheduler, whose"
    " workers do all.",
)
@ON_ERROR
@click.option("--repair", is_flag=True, help="Compute again what is damaged, and samples that failed.")
@click.option("--trust", is_flag=True, help="Unpickle weights, or run a program that a checkpoint comes with.")
def extract(dataset: str, store: str, **options: Any) -> None:
    """Encode images and captions once, into a feature store.

    DATASET is a manifest's name (coco, flickr30k, flickr8k, rsicd) or the path of a manifest. Stopped at any moment
    and started again with the same options, it resumes.

    \b
    xret extract rsicd --data-root DIR --store rsicd.zarr
    xret extract photos.yaml --store photos.zarr \\
        --encoder hf:openai/clip-vit-base-patch32
    xret extract rsicd --data-root DIR --store rsicd.zarr \\
        --visual mobilenet_v2 --visual-weights mobilenet_v2.safetensors \\
        --text bert --text-weights MiniLM
    """
    from .. import extract as run

    print_summary(run(dataset, store, **options))
