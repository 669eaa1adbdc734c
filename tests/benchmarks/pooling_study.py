"""How well GPO's generators learn known poolings: VSE-infinity, Table 10.

Each generator is taught each pooling on sets of 20 to 100 random rows; the root mean squared error of its coefficients
is printed for these, for smaller and for larger sets, with the paper's beside it where the paper has it. One JSON line
a cell with --json.

    python tests/benchmarks/pooling_study.py
"""

import json
from typing import get_args

import click

from xret.heads.modules.aggregators.gpo import Generator
from xret.heads.report.diagnostics.pooling_study import PATTERNS, TESTED, study

PAPER = {  # Table 10, a row of PATTERNS for seen, smaller and larger sets; one row of it is not in the text at hand
    "interpolation": (
        (0, 0.065, 0.030, 0.011, 0.004),
        (0, 0.017, 0.141, 0.039, 0.016),
        (0, 0.070, 0.014, 0.005, 0.002),
    ),
    "cos-sin-mlp": (
        (0.012, 0.003, 0.047, 0.032, 0.022),
        (0.054, 0.003, 0.093, 0.096, 0.065),
        (0.006, 0.003, 0.030, 0.026, 0.028),
    ),
    "index-bigru": (
        (0.002, 0.002, 0.026, 0.011, 0.008),
        (0.006, 0.004, 0.052, 0.049, 0.015),
        (0.003, 0.001, 0.018, 0.007, 0.005),
    ),
    "cos-sin-bigru": (None, (0.002, 0.010, 0.031, 0.046, 0.005), (0, 0.004, 0.007, 0.004, 0.001)),
}


@click.command()
@click.option("--steps", default=2000, show_default=True, help="Of training, of each cell.")
@click.option("--seed", default=0, show_default=True)
@click.option("--pattern", "patterns", multiple=True, type=click.Choice(PATTERNS), help="Only these.")
@click.option("--generator", "generators", multiple=True, type=click.Choice(get_args(Generator)), help="Only these.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line a cell.")
def main(steps: int, seed: int, patterns: tuple[str, ...], generators: tuple[str, ...], as_json: bool) -> None:
    """Print the table, ours / the paper's."""
    if not as_json:
        click.echo(f"{'':16}{'pooling':>8}" + "".join(f"{which:>16}" for which in TESTED))
    for generator in generators or get_args(Generator):
        for name in patterns or PATTERNS:
            found = study(generator, name, steps=steps, seed=seed)
            column = PATTERNS.index(name)
            rows = PAPER[generator]
            paper = {which: row and row[column] for which, row in zip(TESTED, rows, strict=True)}
            if as_json:
                click.echo(json.dumps(found | {"paper": paper}))
                continue
            cells = [f"{found[which]:.3f} / {'-' if paper[which] is None else paper[which]}" for which in TESTED]
            click.echo(f"{generator:16}{name:>8}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
