"""``xret import``: stage one, with features that others extracted."""

from pathlib import Path
from typing import Any

import click

from ..pipeline.exchange.importers import FORMATS
from .extract import DATA_ROOT, DTYPE, SCHEDULER, STORE, WORKERS, refuse_workers_of_a_cluster
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
@click.argument("dataset")
@STORE
@click.option("--from", "format_", required=True, type=click.Choice(FORMATS), help="How the features are stored.")
@click.option("--source", required=True, type=click.Path(path_type=Path), help="The file or folder of the features.")
@click.option(
    "--arrays", default="", callback=_names, metavar="ROLE=NAME,…",
    help="For hdf5: which array is local, which is id; and length, boxes, classes, scores, size if it has them.",
)  # fmt: skip
@DATA_ROOT
@DTYPE
@click.option("--splits", default="train,val,test", show_default=True, callback=comma_list, help="Which to write now.")
@click.option(
    "--on-error",
    default="fail",
    show_default=True,
    type=click.Choice(["fail", "skip"]),
    help="At an image that the source lacks or that is damaged there: stop, or record it with the reason and go on.",
)
@WORKERS
@SCHEDULER
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def import_(dataset: str, store: str, data_root: Path | None, as_json: bool, **options: Any) -> None:
    """Write region features that others extracted for DATASET into the feature cache STORE.

    DATASET is a manifest's name or path, as for extract. The source's ids may be the data set's ids (Karpathy's
    imgid), COCO ids or file names. Pickles are never opened. Stopped and started again, it goes on where it
    was. With --scheduler every worker reads STORE and the source under the same paths.

    \b
    scan           folder of {train,dev,test,testall}_{ims.npy,caps.txt,ids.txt}
    vse-infty      VSE-infinity's data folder, or the folder of one data set in it
    butd-tsv       bottom-up attention's TSV, or a folder of them
    lxmert-tsv     LXMERT's TSV, or a folder of them
    detectron-npz  folder of .npz, one an image: x, bbox, num_bbox, image_h, image_w
    hdf5           one file, its arrays named by --arrays

    \b
    xret import flickr30k --data-root DIR --store f30k.zarr --from scan --source f30k_precomp
    xret import coco --data-root DIR --store coco.zarr --from hdf5 --source coco.h5 \\
        --arrays local=features,boxes=boxes,length=num_boxes,id=image_ids
    """
    from ..pipeline.data.manifest import load_manifest
    from ..pipeline.exchange.importers.importing import import_features
    from ..pipeline.exchange.importers.tasks import ImportOptions

    if not options["splits"]:
        raise click.UsageError("nothing to import: give at least one of --splits")
    refuse_workers_of_a_cluster(options)
    print_summary(import_features(load_manifest(dataset, data_root), store, ImportOptions(**options)), as_json)
