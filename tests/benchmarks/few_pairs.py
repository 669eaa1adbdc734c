"""The closed form beside trained heads, on subsets of the training pictures.

    python tests/benchmarks/few_pairs.py f8k.zarr --out pairs

Features are the images' global vectors and the means of the captions' token states, written as embeddings and imported
with a subset of the training pictures each, all of `val` and all of `test`. Every row is trained on each subset with
its recipe's values but for the epochs; validation keeps the best one, and the test split is looked at once, without and
with `--hubness`. What is done is not done again, so the command may be stopped and repeated. `--plot` draws the means.
"""

import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from sizes import small

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "`linear`": ("linear", {}),
    "`mlp`": ("mlp", {}),
    "`cca`": ("cca", {}),
    "`mlp` beside `cca`": ("mlp", {"model.residual": "cca"}),
}
COUNTS = (250, 1000, 6000)


@click.command()
@click.argument("store")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of stores and runs.")
@click.option("--counts", default=",".join(map(str, COUNTS)), show_default=True, help="Training pictures.")
@click.option("--subsets", default=3, show_default=True)
@click.option("--epochs", default=20, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="A picture of the table, such as pairs.svg.")
@small(counts="8,16", subsets=1, epochs=1)
def main(store: str, out: Path, counts: str, subsets: int, epochs: int, plot: Path | None) -> None:
    """Train each row on subsets of STORE's pictures, and print mean recalls on test, ± over the subsets."""
    import xret

    out.mkdir(parents=True, exist_ok=True)
    means: dict[str, list[list[float]]] = {name: [] for name in ROWS}  # without and with hubness, of each count
    click.echo("Mean recalls without and with hubness corrected, ± over the subsets.\n")
    click.echo(f"| training pictures | {' | '.join(ROWS)} |\n{'|---' * (1 + len(ROWS))}|")
    for count in map(int, counts.split(",")):
        cells: list[str] = []
        for name, (recipe, settings) in ROWS.items():
            found = []
            for seed in range(subsets):
                subset, run = make_subset(store, out, count, seed), out / f"{count}-{seed}-{name.replace(' ', '-')}"
                given = settings if recipe == "cca" else {**settings, "schedule.epochs": epochs}
                done = run / "recalls.json"
                if not done.exists():
                    xret.train(subset, recipe=recipe, out=run, settings=given, seed=seed, resume=True, device="cpu")
                    judged = xret.evaluate(run, device="cpu", hubness=True).tables
                    done.write_text(json.dumps([one.mean_recall for one, _ in (judged[0], judged[-1])]))
                found.append(json.loads(done.read_text()))
            both = list(zip(*found, strict=True))
            means[name].append([statistics.fmean(values) for values in both])
            spreads = [f" ± {statistics.stdev(values):.1f}" if subsets > 1 else "" for values in both]
            cells.append(", ".join(f"{mean:.1f}{one}" for mean, one in zip(means[name][-1], spreads, strict=True)))
        click.echo(f"| {count:,} | {' | '.join(cells)} |")
    if plot is not None:
        draw(plot, [int(count) for count in counts.split(",")], means)


def draw(path: Path, counts: list[int], means: dict[str, list[list[float]]]) -> None:
    """Draw mean recalls over training pictures: without hubness corrected in full lines, with it dashed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "xret", "svg.fonttype": "none", "font.size": 11}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for (name, values), colour in zip(means.items(), ("#57606a", "#0b61a4", "#b45309", "#14804a"), strict=True):
        for column, style in enumerate(("-", "--")):
            label = name.replace("`", "") if column == 0 else None
            axes.plot(counts, [one[column] for one in values], style, color=colour, marker="o", label=label)
    axes.set(xscale="log", xlabel="training pictures, each with five captions", ylabel="mean recall on test, %")
    axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, title="dashed: with hubness corrected")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def make_subset(store: str, out: Path, count: int, seed: int, held: int | None = None) -> str:
    """Return a store of global features with so many training pictures, drawn, all of the test, and `held` of val."""
    import xret

    name = f"{count}-{seed}" if held is None else f"{count}-{held}-{seed}"
    folder, url = out / f"files-{name}", str(out / f"{name}.zarr")
    if (folder / "done").exists():
        return url
    cache = xret.FeatureCache.open(store)
    images, captions = cache.image_set(), cache.caption_set()
    counts = {"train": count, "val": held, "test": None}
    drawn = [np.random.default_rng(seed).permutation(np.arange(*cache.splits[key]))[:n] for key, n in counts.items()]
    rows = np.sort(np.concatenate(drawn))
    folder.mkdir(exist_ok=True)
    np.save(folder / "images.npy", images.global_(rows))
    splits = {row: name for name, ends in cache.splits.items() for row in range(*ends)}
    vectors = []
    with (folder / "index.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["file_name", "caption", "split"])
        for row in rows.tolist():
            start, stop = cache.captions_of(row, row + 1)
            spoken = np.arange(start, stop)
            ends = np.cumsum(captions.length[spoken])[:-1]
            if captions.kind == "global":
                vectors += [*captions.global_(spoken)]
            else:
                vectors += [one.astype(np.float32).mean(0) for one in np.split(captions.local(spoken), ends)]
            for text in cache.caption_texts(start, stop):
                lines.writerow([cache.file_names(row, row + 1)[0], text, splits[row]])
    np.save(folder / "captions.npy", np.array(vectors, np.float32))
    command = [sys.executable, "-m", "xret.cli", "import", "--store", url, "--from", "embeddings", "--source", folder]
    names = "BOTH" if images.space is not None and images.space == captions.space else "IMAGES,CAPTIONS"
    subprocess.run([*map(str, command), "--encoder", names], check=True, stdout=subprocess.DEVNULL)
    (folder / "done").touch()
    return url


if __name__ == "__main__":
    main()
