"""What `--not` keeps out: how many of ten answers have the wanted, and how many the unwanted word in a caption.

    python tests/benchmarks/negation.py run

Searches the test split for each pair of words by "a WANTED", by "a WANTED without UNWANTED", and with the unwanted word
as `--not`. Prints the means over the pairs, in percent.
"""

import re
from statistics import fmean

import click
from sizes import small

PAIRS = (
    "dog snow,dog water,dog grass,child water,man bike,boy ball,girl dress,people street,man mountain,dog ball,"
    "woman dog,child playground"
)


@click.command()
@click.argument("run")
@click.option("--pairs", default=PAIRS, help="Wanted and unwanted words.")
@small()
def main(run: str, pairs: str) -> None:
    """Search with RUN."""
    import xret

    retriever = xret.load(run, split="test", device="cpu")
    gallery = retriever.gallery
    captions: dict[str, str] = {}
    for text, row in zip(gallery.texts, gallery.caption_image.tolist(), strict=True):
        captions[gallery.image_ids[row]] = f"{captions.get(gallery.image_ids[row], '')} {text.lower()}"
    click.echo("| query | wanted | unwanted |\n|---|---|---|")
    for name in ("a WANTED", "a WANTED without UNWANTED", "a WANTED, --not UNWANTED"):
        found = []
        for wanted, unwanted in (pair.split() for pair in pairs.split(",")):
            query = name.partition(",")[0].replace("UNWANTED", unwanted).replace("WANTED", wanted)
            hits = retriever.search(query, 10, unlike=[unwanted] if "--not" in name else [])
            found += [[bool(re.search(rf"\b{word}", captions[hit.id])) for word in (wanted, unwanted)] for hit in hits]
        shares = [f"{100 * fmean(column):.1f}" for column in zip(*found, strict=True)]
        click.echo(f"| {name} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
