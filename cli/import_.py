"""``xret import``: stage one, with features that others extracted."""

from pathlib import Path
from typing import Any

import click

from ..pipeline.exchange.importers import EMBEDDINGS, FORMATS
from .extract import DATA_ROOT, DTYPE, JSON, ON_ERROR, SPLITS, STORE
from .parsing import comma_list
from .summaries import print_summary


def _names(_ctx: click.Context, _parameter: click.Parameter, value: str) -> dict[str, str]:
    names = {}
    for part in value.split(",") if value else ():
        role, equals, name = part.partition("=")
        if not (role.strip() and equals and name.strip()) or role.strip() in names:
            raise click.BadParameter(f"'{part}' is not ROLE=NAME, each role once, as in local=features,id=image_ids")
        names[role.strip()] = name.strip()
    return names


@click.command("import")
@click.argument("dataset", required=False)
@STORE
@click.option(
    "--from",
    "format_",
    required=True,
    type=click.Choice([*FORMATS, *EMBEDDINGS]),
    metavar="FORMAT",
    help="How the features are stored: one of the formats above.",
)
@click.option("--source", required=True, type=click.Path(path_type=Path), help="The file or folder of the features.")
@click.option(
    "--arrays", default="", callback=_names, metavar="ROLE=NAME,…",
    help="For hdf5: which array is local, which is id; and length, boxes, classes, scores, size if it has them.",
)  # fmt: skip
@click.option(
    "--encoder", default="", callback=comma_list, metavar="NAME",
    help="For clip-retrieval and embeddings: the model that made them; of two models IMAGES,CAPTIONS.",
)  # fmt: skip
@DATA_ROOT
@DTYPE
@SPLITS
@ON_ERROR
@click.option("--repair", is_flag=True, help="Write again what is damaged, and samples that failed.")
@JSON
def import_(dataset: str | None, store: str, data_root: Path | None, as_json: bool, **options: Any) -> None:
    """Write features that others extracted into a feature cache.

    Features are regions, or embeddings of images and captions. DATASET is a manifest's name or path, as for extract.
    Without it the images and captions of embeddings are the data set. The source's ids may be the data set's ids
    (Karpathy's imgid), COCO ids or file names. Pickles are never opened. Stopped and started again, it goes on where it
    was.

    \b
    scan            folder of {train,dev,test,testall}_{ims.npy,caps.txt,ids.txt}
    vse-infty       VSE-infinity's data folder, or that of one data set in it
    butd-tsv        bottom-up attention's TSV, or a folder of them
    lxmert-tsv      LXMERT's TSV, or a folder of them
    detectron-npz   folder of .npz, for each image x, bbox, num_bbox, image_h, …
    hdf5            one file, its arrays named by --arrays
    clip-retrieval  folder of img_emb, text_emb and metadata of its inference
    embeddings      folder of images, captions (.npy, .safetensors) and index

    \b
    xret import flickr30k --data-root DIR --store f30k.zarr \\
        --from scan --source f30k_precomp
    xret import coco --data-root DIR --store coco.zarr \\
        --from hdf5 --source coco.h5 \\
        --arrays local=features,boxes=boxes,length=num_boxes,id=image_ids
    xret import --store laion.zarr \\
        --from clip-retrieval --source embeddings --encoder ViT-B/32
    """
    from ..pipeline.data.manifest import load_manifest
    from ..pipeline.exchange.importers.importing import ImportOptions, import_features

    if not options["splits"]:
        raise click.UsageError("nothing to import: give at least one of --splits")
    options["splits"] = tuple(filter(None, options["splits"].split(",")))
    if dataset is None and data_root is not None:
        raise click.UsageError("--data-root is for a DATASET, which is not given; leave it out")
    manifest = None if dataset is None else load_manifest(dataset, data_root)
    if options["format_"] in EMBEDDINGS:
        from ..pipeline.exchange.importers.global_features import import_embeddings

        print_summary(import_embeddings(manifest, store, ImportOptions(**options)), as_json)
        return
    if manifest is None:
        raise click.UsageError(f"--from {options['format_']} needs the data set: name a manifest as DATASET")
    if options["encoder"]:
        raise click.UsageError(f"--encoder is for embeddings, and --from is {options['format_']}; leave it out")
    print_summary(import_features(manifest, store, ImportOptions(**options)), as_json)
