"""What ``xret extract`` and ``xret import`` print."""

from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING

from ..pipeline.wording import counted, some_of
from .parsing import show

if TYPE_CHECKING:
    from ..pipeline.extraction.summary import Extraction, SetSummary


def print_summary(summary: "Extraction") -> None:
    """Print what an extraction or an import has done."""
    show(summary.to_json(), _lines(summary))


def _lines(summary: "Extraction") -> Iterator[str]:
    counts = f"{counted(summary.images, 'image')}, {counted(summary.captions, 'caption')}"
    yield f"{summary.dataset}: {counts} in {summary.store}"
    for features in summary.sets:
        yield from _lines_of_set(features, summary)
    if "words" in summary.counts:
        shares = (f"{100 * share:.1f}% of {split}" for split, share in summary.counts["unknown_by_split"].items())
        yield f"  vocabulary: {counted(summary.counts['words'], 'word')}; unknown tokens: {', '.join(shares)}"
    for what, number in (
        ("captions without a known word", summary.counts.get("captions_unknown")),
        ("captions without words", summary.counts.get("captions_without_words")),
        ("captions truncated", summary.counts.get("captions_truncated")),
        ("entries of the source that are not in the data set", summary.unmatched),
    ):
        if number:
            yield f"  {what}: {number:,}"
    if summary.leaks and summary.leaks.sentence:
        yield f"  {summary.leaks.sentence}"
    if any(features.failed for features in summary.sets):
        yield f"`xret cache verify {quote(summary.store)}` lists all that failed; {_way_out(summary)}."


def _lines_of_set(features: "SetSummary", summary: "Extraction") -> Iterator[str]:
    imported = summary.unmatched is not None
    times = [f"{name} {t:.1f} s" for name, t in features.shares.items() if not (imported and name == "encode")]
    again = f", {features.reused:,} reused" if features.reused else ""
    matched = f", matched by {summary.matched_by}" if summary.matched_by else ""
    rate = f"{features.per_second:,.{0 if features.per_second >= 10 else 1}f}"
    yield (
        f"  {features.name}: {features.samples:,} {'imported' if imported else 'encoded'}{again} in"
        f" {features.seconds:.1f} s ({rate}/s; {', '.join(times)}){matched}, {counted(features.chunks, 'chunk')}"
        f" written, {features.chunks_before:,} there before, {features.failed:,} failed"
    )
    if features.read_as:
        yield f"    read as {features.read_as}"
    yield from (f"    {line}" for line in some_of([f"failed: {reason}" for reason in features.reasons]))


def _way_out(summary: "Extraction") -> str:
    if summary.unmatched is None:
        return "repair those files and run the same command with --repair"
    if len(summary.sets) == 1:  # regions
        return "a repaired source is imported beside this one"
    # Embeddings, of which a store holds those of a name once.
    sets = zip(("images", "captions"), summary.sets, strict=True)
    remove = [f"`xret cache rm {quote(summary.store)} {quote(f'{side}/{features.name}')}`" for side, features in sets]
    return f"repair the source, run {' and '.join(remove)}, and import again"
