"""What to import, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CacheError
from ..extraction.options import Filling
from ..store.create import require_dtype

KINDS = ("roi", "frames")  # of features with rows


@dataclass(frozen=True)
class ImportOptions(Filling):
    """How to import; the command line's options, with its defaults."""

    format_: str  # one of `FORMATS`
    source: Path  # file or folder of the features
    arrays: Mapping[str, str] = field(default_factory=dict)  # for ``hdf5``, the name in the file of each role
    kind: str = "roi"  # of features with rows: ``roi``, regions of a picture, or ``frames`` of a video
    encoder: tuple[str, ...] = ()  # the model that made embeddings, or that of the images and that of the captions
    dtype: str = "float16"  # ``float16`` or ``float32``

    def __post_init__(self) -> None:
        super().__post_init__()
        require_dtype(self.dtype)
        if self.kind not in KINDS:
            raise CacheError(f"kind is '{self.kind}'; give {' or '.join(KINDS)}")
