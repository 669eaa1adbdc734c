"""``xret extract``: stage one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from .parsing import FOLDER, Sectioned, comma_list, images_to_plan_for
from .summaries import print_plan, print_summary


def _dtype(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value not in ("float16", "float32", "bfloat16"):  # why not bfloat16, the pipeline says
        raise click.BadParameter(f"'{value}' is not one of 'float16', 'float32'.")
    return value


# Options of every command that fills a store.
STORE = click.option("--store", required=True, help="The feature cache: a local path or an fsspec URL.")
DATA_ROOT = click.option(
    "--data-root",
    type=FOLDER,
    help="What the manifest's relative paths are relative to; without it, the manifest's folder.",
)
DTYPE = click.option(
    "--dtype",
    default="float16",
    show_default=True,
    callback=_dtype,
    metavar="float16|float32",
    help="How features are stored.",
)
WORKERS = click.option(
    "--workers", type=click.IntRange(1), help="Threads that read and write; by default one a core, at least two."
)
SCHEDULER = click.option(
    "--scheduler", metavar="ADDRESS", help="Run on this Dask cluster (tcp://…) instead of this process."
)


def _regions(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    fewest, dash, most = value.partition("-")
    try:
        bounds = int(fewest), int(most if dash else fewest)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise click.BadParameter(f"'{value}' is no number of boxes; give one, as 36, or a range, as 10-100")
    return bounds


def _pool(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    height, _, width = value.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise click.BadParameter(f"'{value}' is no window; give height and width in cells, as 2x2")
    return int(height), int(width)


@click.command(
    cls=Sectioned,
    sections={
        "Data": "store data_root splits update",
        "Images": "visual visual_weights visual_layer image_size whole pool regions frames views augment",
        "Both": "encoder",
        "Captions": "text min_count text_weights text_layer max_tokens special_tokens prompt",
        "By a fine-tuned run instead": "from_run",
        "Where and how it runs": "plan device batch_size dtype workers scheduler shard_images as_json",
        "Faults": "on_error repair trust",
    },
)
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
    " butd, butd-grid, fasterrcnn_resnet50_fpn_v2; none; or a class of your own as MODULE:CLASS, which is run.",
)
@click.option(
    "--visual-weights",
    default="imagenet",
    show_default=True,
    help="imagenet, which for timm: and open_clip: means those of the tag; a file; or random:SEED.",
)
@click.option(
    "--visual-layer",
    default=-1,
    show_default=True,
    metavar="N",
    type=int,
    help="The layer that gives the local features; -1 the last. Of hf: 0 are the embeddings, of timm: and open_clip:"
    " the first block or stage.",
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
    "--regions", callback=_regions, metavar="N|MIN-MAX", help="Boxes of an image for detectors, by default 36."
)
@click.option("--frames", type=click.IntRange(1), help="Images are folders of video frames; take at most so many.")
@click.option(
    "--pool",
    callback=_pool,
    metavar="HxW",
    help="Average the cells of a grid in windows of so many, as 2x2, before they are stored.",
)
@click.option(
    "--views",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Views that are cached of each picture, for grids; the first is the picture itself.",
)
@click.option(
    "--augment",
    type=click.Choice(["crop-flip", "dihedral"]),
    help="What makes the other views: random crops, mirrored half the time; or the turns and mirrorings of a square, up"
    " to eight, for pictures without an upright, as from the air.",
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
    metavar="hf:ID|hf:DIR|open_clip:ARCH/TAG",
    help="A model of pictures and texts, as CLIP: the same as --visual and --text.",
)
@click.option(
    "--text-weights",
    default="bert-base-uncased",
    show_default=True,
    help="For bert: a model id of the Hugging Face hub, downloaded once, or a local folder. For open_clip: a file, or"
    " random:SEED, in place of those of the tag.",
)
@click.option(
    "--min-count",
    type=click.IntRange(1),
    help="For words: how often one occurs in the training captions to be in the vocabulary; by default as in the words"
    " of the store, else 1 below 10,000 training captions and 4 from there on.",
)
@click.option(
    "--text-layer",
    default=-1,
    show_default=True,
    help="The layer that gives the states: 0 the embeddings, -1 the last.",
)
@click.option("--special-tokens/--no-special-tokens", default=True, help="Keep the states of special tokens.")
@click.option("--max-tokens", type=click.IntRange(1), help="Tokens of a caption; by default all that the model takes.")
@click.option(
    "--prompt",
    metavar="TEMPLATE",
    help='What is encoded in the place of a caption, which stands in it for {}: "a photo of {}".',
)
@click.option(
    "--splits", default="train,val,test", show_default=True, callback=comma_list, help="Which splits to compute now."
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1), help="Samples encoded at once.")
@DTYPE
@click.option("--shard-images", type=click.IntRange(1), help="Images in a shard; by default 16 shards, at most 512.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@SCHEDULER
@WORKERS
@click.option(
    "--on-error",
    default="fail",
    show_default=True,
    type=click.Choice(["fail", "skip"]),
    help="At an image that cannot be read: stop, or record it with the reason and go on.",
)
@click.option(
    "--from-run",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="RUN",
    help="Encode with the backbones that `xret finetune` left in RUN, instead of --visual and --text.",
)
@click.option("--repair", is_flag=True, help="Compute shards again that are damaged or hold samples that failed.")
@click.option(
    "--update",
    is_flag=True,
    help="Where the data set has changed: add it to the store as a new generation, and compute only what is new.",
)
@click.option("--trust", is_flag=True, help="Unpickle weights, or run a program that a checkpoint comes with.")
@click.option(
    "--plan",
    is_flag=False,
    flag_value="0",
    metavar="[IMAGES]",
    callback=images_to_plan_for,
    help="Load the encoders, time a few batches and print tasks, bytes and time, for this data set or as if it had so"
    " many images; write nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def extract(
    ctx: click.Context,
    /,
    dataset: str,
    store: str,
    data_root: Path | None,
    from_run: Path | None,
    plan: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Encode images and captions once, into a feature cache.

    DATASET is a manifest's name (coco, flickr30k, flickr8k, rsicd) or the path of a manifest. Stopped at any moment
    and started again with the same options, it goes on where it was.

    \b
    xret extract rsicd --data-root DIR --store rsicd.zarr
    xret extract photos.yaml --store photos.zarr \\
        --encoder hf:openai/clip-vit-base-patch32
    xret extract rsicd --data-root DIR --store rsicd.zarr \\
        --visual mobilenet_v2 --visual-weights mobilenet_v2.safetensors \\
        --text bert --text-weights MiniLM
    """
    from ..pipeline.data.manifest import load_manifest
    from ..pipeline.extraction import extraction
    from ..pipeline.extraction.options import Options

    _take_encoder(ctx, options)
    _refuse_without_effect(ctx, options)
    if options["visual"] == options["text"] == "none" or not (options["visual"] and options["splits"]):
        raise click.UsageError("nothing to extract: give --visual or --text, and at least one of --splits")
    for key in ("visual", "text"):
        options[key] = None if options[key] == "none" else options[key]
    if from_run is not None:
        options |= _words_of(from_run, ctx)
    manifest, chosen = load_manifest(dataset, data_root), Options(**options)
    if plan is not None:
        from ..pipeline.extraction.plan import plan as make_plan

        print_plan(make_plan(manifest, store, chosen, plan or None), as_json)
        return
    print_summary(extraction.extract(manifest, store, chosen), as_json)


def _given(ctx: click.Context, keys: Iterable[str]) -> str:
    """Return those of these options that stand on the command line, as they are written there."""
    given = [key for key in keys if ctx.get_parameter_source(key) == click.core.ParameterSource.COMMANDLINE]
    names = [f"--{'no-' * (ctx.params[key] is False)}{key.replace('_', '-')}" for key in given]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _without_effect(names: str, on: str) -> str:
    """Return that options, as `_given` returns them, have no effect on something."""
    has, them = ("have", "them") if " and " in names else ("has", "it")
    return f"{names} {has} no effect on {on}; leave {them} out"


def refuse_workers_of_a_cluster(options: dict[str, Any]) -> None:
    """Refuse --workers beside --scheduler."""
    if options["scheduler"] and options["workers"]:
        raise click.UsageError(
            "--workers has no effect beside --scheduler, whose workers have threads of their own; leave it out"
        )


def _take_encoder(ctx: click.Context, options: dict[str, Any]) -> None:
    """Put --encoder in the place of --visual and --text."""
    from ..pipeline.encoders import HUB, OPEN_CLIP

    encoder = options.pop("encoder")
    if encoder is None:
        return
    if names := _given(ctx, ["visual", "text"]):
        raise click.UsageError(f"--encoder decides {names}; leave out one or the other")
    if not encoder.startswith((HUB, OPEN_CLIP)):
        raise click.UsageError(
            f"--encoder {encoder}: give a model of pictures and texts as {HUB}ID, {HUB}DIR or {OPEN_CLIP}ARCH/TAG, or"
            " --visual and --text"
        )
    options |= {"visual": encoder, "text": encoder}


def _refuse_without_effect(ctx: click.Context, options: dict[str, Any]) -> None:
    """Refuse options that the chosen encoders would pass over in silence."""
    from ..pipeline.encoders import HUB, OPEN_CLIP, REGION_ENCODERS

    of_hub = options["text"].startswith(HUB)
    if options["text"] not in ("bert", "words", "none") and not options["text"].startswith((HUB, OPEN_CLIP)):
        raise click.BadParameter(
            f"'{options['text']}' is none of bert, words, none, {HUB}ID, {HUB}DIR and {OPEN_CLIP}ARCH/TAG",
            param_hint="'--text'",
        )
    of_texts = ("text_layer", "special_tokens", "max_tokens", "prompt")
    if options["text"] in ("words", "none") and (names := _given(ctx, ("text_weights", *of_texts))):
        raise click.UsageError(f"{_without_effect(names, '--text ' + options['text'])}, or choose --text bert")
    if options["text"] != "words" and _given(ctx, ["min_count"]):
        raise click.UsageError(f"--min-count has no effect on --text {options['text']}; leave it out")
    if of_hub and _given(ctx, ["text_weights"]):
        raise click.UsageError(f"--text {options['text']} names its weights itself; leave --text-weights out")
    of_images: tuple[str, ...] = (
        "visual_weights",
        "visual_layer",
        "image_size",
        "whole",
        "pool",
        "regions",
        "frames",
        "views",
        "augment",
    )
    if not options["text"].startswith((HUB, OPEN_CLIP)):
        of_images = (*of_images, "trust")
    if options["visual"] == "none" and (names := _given(ctx, of_images)):
        raise click.UsageError(f"{_without_effect(names, '--visual none')}, or choose an encoder")
    refuse_workers_of_a_cluster(options)
    if options["visual"].startswith(HUB) and _given(ctx, ["visual_weights"]):
        raise click.UsageError(f"--visual {options['visual']} names its weights itself; leave --visual-weights out")
    if options["visual"] in REGION_ENCODERS and _given(ctx, ["image_size"]):
        raise click.UsageError(
            f"--image-size has no effect on {options['visual']}, whose sizes are its own; leave it out"
        )


def _words_of(run: Path, ctx: click.Context) -> dict[str, Any]:
    """Return the options that a run decides; none of them may be given beside it."""
    from ..heads.runs.encoders import words_of_run

    words = words_of_run(run)
    if names := _given(ctx, ["views", "augment", "pool", "visual_layer"]):
        raise click.UsageError(
            f"{names} would make another set than the one that {run} evaluates on; leave that out, or give the run's "
            "backbones as --visual-weights and --text-weights"
        )
    if names := _given(ctx, list(dict.fromkeys(["encoder", "visual_weights", "text_weights", *words]))):
        raise click.UsageError(f"--from-run decides {names}; leave out one or the other")
    return words
