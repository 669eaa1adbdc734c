"""``xret import``: stage one, with features that others extracted."""

from pathlib import Path
from typing import Any

import click

from ..pipeline.exchange import FORMATS
from .extract import DATA_ROOT, DTYPE, ON_ERROR, SPLITS, STORE
from .parsing import comma_list, key_values
from .summaries import print_summary


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
_FORMATS = (f"{name:16}{one.layout}" for name, one in FORMATS.items())


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
    print_summary(import_features(manifest, store, ImportOptions(**options)))
