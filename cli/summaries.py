"""What ``xret extract`` and ``xret import`` print."""

import json
from shlex import quote
from typing import TYPE_CHECKING

import click

from ..pipeline.wording import counted, printable, some_of

if TYPE_CHECKING:
    from ..pipeline.extraction.summary import Extraction


def print_summary(summary: "Extraction", as_json: bool) -> None:
    """Print what an extraction or an import has done."""
    if as_json:
        click.echo(json.dumps(summary.to_json()))
        return
    counts = f"{counted(summary.images, 'image')}, {counted(summary.captions, 'caption')}"
    click.echo(printable(f"{summary.dataset}: {counts} in {summary.store}"))
    imported = summary.unmatched is not None
    for features in summary.sets:
        shares = ", ".join(
            f"{name} {seconds:.1f} s"
            for name, seconds in features.shares.items()
            if not (imported and name == "encode")
        )
        done = "imported" if imported else "encoded"
        again = f", {features.reused:,} reused" if features.reused else ""
        matched = f", matched by {summary.matched_by}" if summary.matched_by else ""
        click.echo(
            f"  {printable(features.name)}: {features.samples:,} {done}{again} in {features.seconds:.1f} s"
            f" ({_rate(features.per_second)}/s; {shares}){matched}, {counted(features.chunks, 'chunk')} written,"
            f" {features.chunks_before:,} there before, {features.failed:,} failed"
        )
        for line in some_of([f"failed: {reason}" for reason in features.reasons]):
            click.echo(printable(f"    {line}"))
    _print_counts(summary)
    if any(features.failed for features in summary.sets):
        _print_way_out(summary)


def _print_counts(summary: "Extraction") -> None:
    counts = summary.counts
    if counts and counts.words and counts.unknown_tokens is not None:
        unknown = 100 * counts.unknown_tokens / max(counts.tokens, 1)
        click.echo(f"  vocabulary: {counted(counts.words, 'word')}, {unknown:.1f}% of the tokens are unknown")
    if counts and counts.captions_without_words:
        click.echo(f"  captions without words: {counts.captions_without_words:,}")
    if counts and counts.captions_truncated:
        click.echo(f"  captions truncated: {counts.captions_truncated:,}")
    if summary.unmatched:
        click.echo(f"  entries of the source that are not in the data set: {summary.unmatched:,}")


def _print_way_out(summary: "Extraction") -> None:
    store = quote(summary.store)
    if summary.unmatched is None:
        way = "repair those files and run the same command with --repair"
    elif len(summary.sets) == 1:  # regions
        way = "a repaired source is imported beside this one"
    else:  # embeddings, of which a store holds those of a name once
        sets = zip(("images", "captions"), summary.sets, strict=True)
        remove = " and ".join(f"`xret cache rm {store} {quote(f'{side}/{one.name}')}`" for side, one in sets)
        way = f"repair the source, run {remove}, and import again"
    click.echo(printable(f"`xret cache verify {store}` lists all that failed; {way}."))


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"
