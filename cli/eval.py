"""``xret eval``: the table of a run."""

import json
from typing import Any

import click


@click.command("eval")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN ...]")
@click.option("--store", help="Another feature cache, with features of the same encoders; by default the run's own.")
@click.option("--split", default="test", show_default=True)
@click.option(
    "--protocol",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "full", "1k-folds"]),
    help="auto: what the data set's manifest says; 1k-folds: the mean of five folds of 1,000 images.",
)
@click.option(
    "--ties",
    default="pessimistic",
    show_default=True,
    type=click.Choice(["pessimistic", "optimistic", "mean"]),
    help="Where an own item stands among equal scores: last, first, or on average.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def eval_(
    runs: tuple[str, ...], store: str | None, split: str, protocol: str, ties: Any, device: str, as_json: bool
) -> None:
    """Rank captions by images and images by captions with the best epoch of RUN; several runs make an ensemble.

    \b
    xret eval run
    xret eval run1 run2 --ties mean --json
    """
    from ..heads.evaluation import evaluate

    result = evaluate(runs, store=store, split=split, protocol=protocol, ties=ties, device=device)
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{', '.join(runs)} on {result['store']}")
    for table in result["results"]:
        click.echo(format_table(table))


def format_table(result: dict[str, Any]) -> str:
    """Return one of the results of `evaluate` as lines for a terminal."""
    lines = [
        f"split {result['split']}, protocol {result['protocol']}: {result['images']:,} images, "
        f"{result['captions']:,} captions ({result['captions'] / result['images']:.2f} an image), "
        f"{result['skipped']:,} skipped, ties {result['ties']}",
        f"{'':15}" + "".join(f"{name:>8}" for name in ("R@1", "R@5", "R@10", "medr")),
    ]
    for key in ("image_to_text", "text_to_image"):
        values = "".join(f"{result[key][name]:8.2f}" for name in ("R@1", "R@5", "R@10"))
        lines.append(f"{key.replace('_', ' '):15}{values}{result[key]['medr']:8.1f}")
    variance = result["log_circular_variance"]
    spread = "" if variance is None else f", log circular variance {variance:.2f}"
    return "\n".join([*lines, f"RSUM {result['rsum']:.2f}{spread}"])
