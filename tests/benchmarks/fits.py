"""What ``xret fit`` chooses and foretells, on subsets of a data set.

    python tests/benchmarks/fits.py f8k.zarr --out fits

Of N pictures four fifths are learnt from and a tenth chooses, as in xret's own split; all of `test` judges, so that the
differences are exact. Subsets of one seed contain one another: what the curve of N pictures expects of twice as many is
compared with the fit of 2N. What is done is not done again.
"""

import json
import statistics
import time
from pathlib import Path

import click
from few_pairs import make_subset
from sizes import small


@click.command()
@click.argument("store")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of stores and fits.")
@click.option("--counts", default="60,250,1000", show_default=True, help="Pictures.")
@click.option("--subsets", default=3, show_default=True)
@small(counts="50", subsets=1)
def main(store: str, out: Path, counts: str, subsets: int) -> None:
    """Fit subsets of STORE's pictures, and print what was chosen and foretold, the mean over the subsets."""
    out.mkdir(parents=True, exist_ok=True)
    header = ["pictures", "chosen", "before", "closed form", "best row", "lost, at most", "CPU seconds"]
    header += ["expected of twice", "found", "error, at most", "in the interval"]
    click.echo(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for count in map(int, counts.split(",")):
        found = [(_fit(store, out, count, seed), _fit(store, out, 2 * count, seed)) for seed in range(subsets)]
        rows = [{row["name"]: row["test"] for row in one["rows"]} for one, _ in found]
        chosen = [tests[one["chosen"]] for tests, (one, _) in zip(rows, found, strict=True)]
        best = [max(tests.values()) for tests in rows]
        gains = [_of_curve(double) - _of_curve(one) for one, double in found]
        expected = [one["curve"]["gain"] for one, _ in found]
        inside = sum(
            one["curve"]["low"] <= gain <= one["curve"]["high"] for gain, (one, _) in zip(gains, found, strict=True)
        )
        cells = [chosen, [tests[one["before"]] for tests, (one, _) in zip(rows, found, strict=True)]]
        cells += [[tests["cca"] for tests in rows], best]
        lost = max(b - c for b, c in zip(best, chosen, strict=True))
        error = max(abs(g - e) for g, e in zip(gains, expected, strict=True))
        texts = [f"{count:,}", *(f"{statistics.fmean(one):.1f}" for one in cells), f"{lost:.1f}"]
        texts += [f"{statistics.fmean(one['seconds'] for one, _ in found):.0f}"]
        texts += [f"{statistics.fmean(one):+.1f}" for one in (expected, gains)] + [
            f"{error:.1f}",
            f"{inside} of {subsets}",
        ]
        click.echo(f"| {' | '.join(texts)} |")


def _of_curve(fitted: dict) -> float:
    """Return the mean recall of the candidate that the curve is of."""
    return fitted["curve"]["points"][-1][1]


def _fit(store: str, out: Path, count: int, seed: int) -> dict:
    """Return what a fit of so many pictures finds, and its CPU seconds."""
    import xret

    held = count // 10
    done = out / f"fit-{count}-{seed}.json"
    if not done.exists():
        subset, began = make_subset(store, out, count - 2 * held, seed, held), time.process_time()
        fitted = xret.fit(subset, out=out / f"fit-{count}-{seed}", seed=seed, device="cpu").to_dict()
        done.write_text(json.dumps({**fitted, "seconds": time.process_time() - began}))
    return json.loads(done.read_text())


if __name__ == "__main__":
    main()
