"""The summary of an extraction or an import."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SetSummary:
    """What became of one feature set."""

    name: str
    samples: int = 0  # encoded or imported now, without those that failed
    found: int = 0  # taken from another generation of the store
    shards: int = 0  # written now
    shards_before: int = 0  # found finished
    failed: int = 0  # samples recorded as failed, now or before
    reasons: tuple[str, ...] = ()  # of each of them, its file and what is wrong
    seconds: float = 0.0  # wall time
    # seconds that the tasks spent reading, encoding and writing
    shares: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "encode", "write"), 0.0))

    @property
    def per_second(self) -> float:
        """Samples a second."""
        return self.samples / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class CaptionCounts:
    """What tokenisation has met, of a caption set."""

    captions_without_words: int  # captions that hold no word
    captions_truncated: int  # captions that are longer than the encoder takes
    words: int | None = None  # in the vocabulary; None where the encoder has its own
    unknown_tokens: int | None = None  # tokens that are not in the vocabulary; None likewise
    tokens: int = 0  # of all captions

    def to_json(self) -> dict[str, int]:
        """Return the counts that are known, as they stand in the set's attributes."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Extraction:
    """What an extraction or an import has done."""

    dataset: str  # the manifest's name
    store: str  # where the cache lies
    images: int  # of the data set
    captions: int  # of the data set
    sets: tuple[SetSummary, ...]  # the feature sets that were filled
    counts: CaptionCounts | None = None  # of the caption set; None where there is none
    matched_by: str | None = None  # of an import for a manifest, which key of the images the source's ids were
    unmatched: int | None = None  # of an import, how many images of the source are not in the data set

    def to_json(self) -> dict[str, Any]:
        """Return the summary with the counts among its keys, and without what does not apply."""
        found: dict[str, Any] = {key: value for key, value in vars(self).items() if key != "counts"}
        found["sets"] = [{**asdict(one), "per_second": one.per_second} for one in self.sets]
        found |= self.counts.to_json() if self.counts else {}
        return {key: value for key, value in found.items() if value is not None}
