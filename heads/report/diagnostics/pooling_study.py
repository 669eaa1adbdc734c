"""Can a generator of pooling coefficients learn known poolings, and does it carry them to other numbers of rows?

Source: *Learning the Best Pooling Strategy for Visual Semantic Embedding* (VSE-infinity, CVPR 2021), appendix B.3 and
Table 10. The paper leaves open how the generators are trained; here it is Adam on the squared error of what is pooled.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...modules.aggregators.gpo import GPO, Generator
from ...modules.aggregators.pooling import sorted_rows

PATTERNS = ("A", "M-1", "M-10", "T-50%", "L")  # as Table 10 calls them
TRAINED = range(20, 101)  # numbers of rows, appendix B.3
TESTED = {"seen": TRAINED, "smaller": range(10, 20), "larger": range(101, 121)}
DIM = 16  # of the random features
LENGTHS, SAMPLES = 4, 8  # of a step: numbers of rows, and sets of each
RATE = 5e-3


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


def study(generator: Generator, name: str, *, steps: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Teach a generator one pooling of random features, and compare its coefficients with the true ones.

    Args:
        generator: see `GPO`.
        name: see `pattern`.
        steps: of training, on feature sets of 20 to 100 rows.
        seed: of weights and features.

    Returns:
        ``{"generator", "pattern", "steps", "seen", "smaller", "larger"}``: the root mean squared error of the
        coefficients over all sets of 20 to 100, 10 to 19 and 101 to 120 rows.
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
    errors = {which: coefficient_error(pooling, name, lengths) for which, lengths in TESTED.items()}
    return {"generator": generator, "pattern": name, "steps": steps, **errors}


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
