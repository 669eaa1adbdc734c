"""Whether `xret cache align` ranks pairs of feature sets as heads do that are trained on them.

    python tests/benchmarks/alignment.py f8k.zarr --out heads

`linear` is trained on each pair of an image and a caption set. Beside what `align` measures on validation images stands
the mR of the best epoch on validation and on test images; below, Spearman's correlation of each measure with these
over the pairs. What is trained is not trained again, so the command may be stopped and repeated.
"""

from pathlib import Path
from typing import Any

import click
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from sizes import small

MEASURES = {"mR of the map": "mean_recall", "mutual 10-NN": "mutual_neighbours", "CKA": "cka"}
HEADS = ("mR of `linear`, validation", "mR of `linear`, test")


@click.command()
@click.argument("store")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of all runs.")
@click.option("--epochs", default=40, show_default=True)
@small(epochs=1)
def main(store: str, out: Path, epochs: int) -> None:
    """Train `linear` on each pair of STORE, and print the pairs and the correlations."""
    import xret

    out.mkdir(parents=True, exist_ok=True)
    pairs = xret.align(store).pairs
    columns: dict[str, list[Any]] = {name: [getattr(pair, key) for pair in pairs] for name, key in MEASURES.items()}
    columns |= {name: [] for name in HEADS}
    for pair in pairs:
        click.echo(f"{pair.images}, {pair.captions}", err=True)
        run = out / f"{pair.images}--{pair.captions}"
        settings = {"data.image": pair.images, "data.text": pair.captions, "schedule.epochs": epochs}
        found = xret.train(store, recipe="linear", out=run, settings=settings, resume=True)
        for name, rsum in zip(HEADS, (found.best_rsum, xret.evaluate(run).results[0].rsum), strict=True):
            columns[name].append(rsum / 6)
    click.echo(f"| images | captions | {' | '.join(columns)} |\n{'|---' * (2 + len(columns))}|")
    for number, pair in enumerate(pairs):
        values = (f"{column[number]:.2f}" for column in columns.values())
        click.echo(f"| {pair.images} | {pair.captions} | {' | '.join(values)} |")
    click.echo(f"\n| Spearman's correlation | validation | test |\n|---|---|---|\n{_correlations(columns)}")


def _correlations(columns: dict[str, list[Any]]) -> str:
    """Return rows of a table: of each measure the correlation with each mR of the heads."""
    return "\n".join(
        f"| {name} | {' | '.join(f'{spearmanr(columns[name], columns[head]).statistic:.2f}' for head in HEADS)} |"
        for name in MEASURES
    )


if __name__ == "__main__":
    main()
