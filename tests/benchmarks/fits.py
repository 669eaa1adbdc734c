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
    import xret

    splits = xret.FeatureCache.open(store).splits
    most = splits["train"][1] - splits["train"][0]
    for count in map(int, counts.split(",")):
        fits = [_fit(store, out, count, seed) for seed in range(subsets)]
        rows = [{row["name"]: row["test"] for row in fit["rows"]} for fit in fits]
        chosen = [tests[fit["chosen"]] for tests, fit in zip(rows, fits, strict=True)]
        best = [max(tests.values()) for tests in rows]
        cells = [chosen, [tests[fit["before"]] for tests, fit in zip(rows, fits, strict=True)]]
        cells += [[tests["cca"] for tests in rows], best]
        lost = max(b - c for b, c in zip(best, chosen, strict=True))
        texts = [f"{count:,}", *(f"{statistics.fmean(cell):.1f}" for cell in cells), f"{lost:.1f}"]
        texts += [f"{statistics.fmean(fit['seconds'] for fit in fits):.0f}"]
        expected = [fit["curve"]["gain"] for fit in fits]
        texts.append(f"{statistics.fmean(expected):+.1f}")
        if 2 * count - 4 * (count // 10) <= most:  # else there are no twice as many
            doubles = [_fit(store, out, 2 * count, seed) for seed in range(subsets)]
            gains = [_of_curve(double) - _of_curve(fit) for fit, double in zip(fits, doubles, strict=True)]
            error = max(abs(g - e) for g, e in zip(gains, expected, strict=True))
            curves = [fit["curve"] for fit in fits]
            inside = sum(curve["low"] <= gain <= curve["high"] for gain, curve in zip(gains, curves, strict=True))
            texts += [f"{statistics.fmean(gains):+.1f}", f"{error:.1f}", f"{inside} of {subsets}"]
        else:
            texts += ["–"] * 3
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
