"""How well GPO's generators learn known poolings, and how they carry them to other numbers of rows.

Source: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity, CVPR 2021), appendix B.3 and
Table 10. The paper leaves open how the generators are trained; here it is Adam on the squared error of what is pooled.

Each generator is taught each pooling on sets of 20 to 100 random rows; the root mean squared error of its coefficients
is printed for these, for smaller and for larger sets, with the paper's beside it where the paper has it. One JSON line
a cell with --json. --small shows in seconds that all of it runs; its errors say nothing.

    python tests/benchmarks/pooling_study.py
"""

import json
from dataclasses import asdict, dataclass
from typing import get_args

import click
import torch
from torch import Tensor
from torch.nn import functional

from xret.heads.modules.aggregators.gpo import GPO, Generator
from xret.heads.modules.aggregators.pooling import sorted_rows

PATTERNS = ("A", "M-1", "M-10", "T-50%", "L")  # as Table 10 calls them
TRAINED = range(20, 101)  # numbers of rows, appendix B.3
TESTED = {"seen": TRAINED, "smaller": range(10, 20), "larger": range(101, 121)}
DIM = 16  # of the random features
LENGTHS, SAMPLES = 4, 8  # of a step: numbers of rows, and sets of each
RATE = 5e-3
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


def pattern(name: str, rows: int) -> Tensor:
    """Return the coefficients of a known pooling, from the largest value's to the smallest's, float32 ``[rows]``.

    Args:
        name: ``A``: the average; ``M-K``: that of the K largest; ``T-P%``: that of the largest P percent, rounded;
            ``L``: falling linearly from the largest to zero at the smallest.
        rows: from 1.

    Raises:
        ValueError: there is no such pooling.
    """
    kind, _, number = name.partition("-")
    rank = torch.arange(rows)
    if name == "A":
        weights = torch.ones(rows)
    elif name == "L":
        weights = (rows - 1 - rank).float() if rows > 1 else torch.ones(1)
    elif kind == "M":
        weights = (rank < int(number)).float()
    elif kind == "T":
        weights = (rank < max(1, round(rows * float(number.rstrip("%")) / 100))).float()
    else:
        raise ValueError(f"there is no pooling '{name}'; take one of {', '.join(PATTERNS)}")
    return weights / weights.sum()


@dataclass(frozen=True)
class Study:
    """The root mean squared error of a generator's coefficients.

    Attributes:
        generator, pattern, steps: as given.
        seen: over all sets of 20 to 100 rows.
        smaller: of 10 to 19.
        larger: of 101 to 120.
    """

    generator: str
    pattern: str
    steps: int
    seen: float
    smaller: float
    larger: float


def study(generator: Generator, name: str, *, steps: int = 2000, seed: int = 0) -> Study:
    """Teach a generator one pooling of random features, and compare its coefficients with the true ones.

    Args:
        generator: see `GPO`.
        name: see `pattern`.
        steps: of training, on feature sets of 20 to 100 rows.
        seed: of weights and features.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        pooling = GPO(DIM, DIM, generator=generator)
        optimizer = torch.optim.Adam(pooling.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        truth = {rows: pattern(name, rows) for rows in TRAINED}
        for _ in range(steps):
            loss = _step(pooling, truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return Study(generator, name, steps, *(coefficient_error(pooling, name, lengths) for lengths in TESTED.values()))


@torch.no_grad()
def coefficient_error(pooling: GPO, name: str, lengths: range) -> float:
    """Return the root mean squared error of all coefficients for sets of these numbers of rows."""
    weights = pooling.coefficients(torch.tensor(lengths))
    squares = [(row[:rows] - pattern(name, rows)).square() for row, rows in zip(weights, lengths, strict=True)]
    return torch.cat(squares).mean().sqrt().item()


def _step(pooling: GPO, truth: dict[int, Tensor]) -> Tensor:
    """Return the squared error of what is pooled of new random sets."""
    lengths = torch.randint(TRAINED.start, TRAINED.stop, (LENGTHS,)).repeat_interleave(SAMPLES)
    most = int(lengths.max())
    local = torch.randn(len(lengths), most, DIM)
    wanted = torch.stack([functional.pad(truth[rows], (0, most - rows)) for rows in lengths.tolist()])
    target = (wanted[:, None] @ sorted_rows(local, lengths))[:, 0]
    return functional.mse_loss(pooling(local, lengths, local[:, 0]).embedding, target)


@click.command()
@click.option("--steps", default=2000, show_default=True, help="Of training, of each cell.")
@click.option("--seed", default=0, show_default=True)
@click.option("--pattern", "patterns", multiple=True, type=click.Choice(PATTERNS), help="Only these.")
@click.option("--generator", "generators", multiple=True, type=click.Choice(get_args(Generator)), help="Only these.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line a cell.")
@click.option("--small", is_flag=True, help="Two steps of training.")
def main(
    steps: int, seed: int, patterns: tuple[str, ...], generators: tuple[str, ...], as_json: bool, small: bool
) -> None:
    """Print the table, ours / the paper's."""
    steps = 2 if small else steps
    if not as_json:
        click.echo(f"{'':16}{'pooling':>8}" + "".join(f"{which:>16}" for which in TESTED))
    for generator in generators or get_args(Generator):
        for name in patterns or PATTERNS:
            found = study(generator, name, steps=steps, seed=seed)
            column = PATTERNS.index(name)
            rows = PAPER[generator]
            paper = {which: row and row[column] for which, row in zip(TESTED, rows, strict=True)}
            if as_json:
                click.echo(json.dumps(asdict(found) | {"paper": paper}))
                continue
            cells = [
                f"{getattr(found, which):.3f} / {'-' if paper[which] is None else paper[which]}" for which in TESTED
            ]
            click.echo(f"{generator:16}{name:>8}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
