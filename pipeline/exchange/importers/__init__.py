"""Features that others extracted become an ordinary feature set: one file a format.

A source is looked through once (`source.Source`), streamed; `importing.import_features` then has one task a shard read
that shard's images, so that no source is ever held whole. Embeddings of whole images and captions have a way of their
own, `global_features.import_embeddings`. Nothing here unpickles anything.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .source import Source

FORMATS = ("scan", "vse-infty", "butd-tsv", "lxmert-tsv", "detectron-npz", "hdf5")
EMBEDDINGS = ("clip-retrieval", "embeddings")  # of images and of captions, a vector each


def open_source(format_: str, path: Path, dataset: str, arrays: Mapping[str, str]) -> "Source":
    """Look through the source at `path`.

    Args:
        format_: one of `FORMATS`.
        path: its file or folder.
        dataset: the data set's name; it finds the folder in VSE-infinity's tree.
        arrays: for ``hdf5``, the name in the file of each role: ``local``, ``id``, ``boxes``, …

    Raises:
        SourceError: there is nothing at `path`, or it is not of that format.
    """
    from .source import SourceError

    if not path.exists():
        raise SourceError(f"{path} is not there; give the file or folder of the features as --source")
    if arrays and format_ != "hdf5":
        raise SourceError(f"--arrays names the arrays of an HDF5 file, but --from is {format_}; leave it out")
    if format_ in ("scan", "vse-infty"):
        from .scan import ScanSource, vse_infty

        return ScanSource(path) if format_ == "scan" else vse_infty(path, dataset)
    if format_ in ("butd-tsv", "lxmert-tsv"):
        from .tsv import TsvSource

        return TsvSource(path, format_)
    if format_ == "detectron-npz":
        from .npz import NpzSource

        return NpzSource(path)
    from .hdf5 import Hdf5Source

    return Hdf5Source(path, arrays)
