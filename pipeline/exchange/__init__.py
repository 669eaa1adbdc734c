"""Features that others extracted come into the store. A format registers by its line in `FORMATS`."""

from typing import NamedTuple


class Format(NamedTuple):
    """A format of features."""

    where: str  # module of `importers`, and the class or function that opens it: called with the path and the options
    layout: str  # of its files, for the help of `xret import`
    pairs: bool = False  # embeddings of images and captions
    takes_arrays: bool = False  # names of arrays, by ``--arrays``


FORMATS = {
    "scan": Format("scan:ScanRegions", "folder of {train,dev,test,testall}_{ims.npy,caps.txt,ids.txt}"),
    "butd-tsv": Format("tsv:TsvRegions", "bottom-up attention's TSV or LXMERT's, or a folder of them"),
    "hdf5": Format("hdf5:Hdf5Regions", "one file with arrays local, id, …, or named by --arrays", takes_arrays=True),
    "embeddings": Format(
        "embeddings:open_embeddings",
        "image and caption vectors: clip-retrieval, DataComp, .npy",
        pairs=True,
        takes_arrays=True,
    ),
}
