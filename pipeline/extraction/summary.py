"""The summary of an extraction or an import."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..store.leaks import Leaks


@dataclass(frozen=True)
class SetSummary:
    """What became of one feature set."""

    name: str
    samples: int = 0  # encoded or imported now, without those that failed
    reused: int = 0  # copied from another store
    chunks: int = 0  # written now
    chunks_before: int = 0
    failed: int = 0  # samples recorded as failed, now or before
    read_as: str = ""  # of imported regions, how many rows of how many numbers an image has, and what boxes are
    reasons: tuple[str, ...] = ()  # of each of these the file and what is wrong
    seconds: float = 0.0  # wall time; of several layers' sets, which are filled together, that of all
    # Seconds that the tasks spent reading, encoding and writing, likewise.
    shares: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "encode", "write"), 0.0))

    @property
    def per_second(self) -> float:
        """Samples a second."""
        return self.samples / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Extraction:
    """What an extraction or an import has done."""

    dataset: str  # the manifest's name
    store: str  # where the store lies
    images: int  # of the data set
    captions: int
    sets: tuple[SetSummary, ...]  # that were filled
    # What tokenisation has met: ``captions_without_words``, ``captions_truncated`` and ``tokens``, and of a vocabulary
    # ``words`` in it, ``unknown_tokens``, ``captions_unknown``, which hold words, but none of these, and
    # ``unknown_by_split``, a share of the tokens.
    counts: Mapping[str, Any] = field(default_factory=dict)
    leaks: Leaks | None = None
    matched_by: str | None = None  # of an import for a manifest, which key of the images the source's ids were
    unmatched: int | None = None  # of an import, how many images of the source are not in the data set

    def to_json(self) -> dict[str, Any]:
        """Return the summary with the counts among its keys, and without what does not apply."""
        found = {key: value for key, value in vars(self).items() if key != "counts" and value is not None}
        found |= {"leaks": asdict(self.leaks)} if self.leaks else {}
        return found | {"sets": [{**asdict(one), "per_second": one.per_second} for one in self.sets]} | {**self.counts}
