"""The summary of an extraction or an import."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SetSummary:
    """What became of one feature set.

    Attributes:
        samples: encoded or imported now, without those that failed.
        reused: copied from another store.
        chunks, chunks_before: written now, and done before.
        failed: samples recorded as failed, now or before; `reasons` has the file and what is wrong of each.
        seconds: wall time; of several layers' sets, which are filled together, that of all.
        shares: seconds that the tasks spent reading, encoding and writing, likewise.
    """

    name: str
    samples: int = 0
    reused: int = 0
    chunks: int = 0
    chunks_before: int = 0
    failed: int = 0
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    shares: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "encode", "write"), 0.0))

    @property
    def per_second(self) -> float:
        """Samples a second."""
        return self.samples / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class CaptionCounts:
    """What tokenisation has met.

    Attributes:
        captions_without_words: captions that hold no word.
        captions_truncated: captions that are longer than the encoder takes.
        words: in the vocabulary; None where the encoder has its own.
        unknown_tokens: tokens that are not in the vocabulary; None likewise.
        captions_unknown: captions that hold words, but none that is in the vocabulary.
        unknown_by_split: share of the tokens of each split that is not in the vocabulary.
        tokens: of all captions.
    """

    captions_without_words: int
    captions_truncated: int
    words: int | None = None
    unknown_tokens: int | None = None
    captions_unknown: int | None = None
    unknown_by_split: Mapping[str, float] | None = None
    tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the counts that are known."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Extraction:
    """What an extraction or an import has done.

    Attributes:
        dataset: the manifest's name.
        store: where the store lies.
        images, captions: of the data set.
        sets: the feature sets that were filled.
        counts: of the caption set; None where there is none.
        matched_by: of an import for a manifest, which key of the images the source's ids were.
        unmatched: of an import, how many images of the source are not in the data set.
    """

    dataset: str
    store: str
    images: int
    captions: int
    sets: tuple[SetSummary, ...]
    counts: CaptionCounts | None = None
    matched_by: str | None = None
    unmatched: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the summary with the counts among its keys, and without what does not apply."""
        found: dict[str, Any] = {key: value for key, value in vars(self).items() if key != "counts"}
        found["sets"] = [{**asdict(one), "per_second": one.per_second} for one in self.sets]
        found |= self.counts.to_json() if self.counts else {}
        return {key: value for key, value in found.items() if value is not None}
