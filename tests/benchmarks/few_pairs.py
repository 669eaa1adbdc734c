"""The closed form beside trained heads, on subsets of the training pictures.

    python tests/benchmarks/few_pairs.py f8k.zarr --out pairs

Features are the images' global vectors and the means of the captions' token states, written as embeddings and imported
with a subset of the training pictures each, all of `val` and all of `test`. Every row is trained on each subset with
its recipe's values but for the epochs; validation keeps the best one, and the test split is looked at once. What is
done is not done again, so the command may be stopped and repeated.
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
@small(counts="8,16", subsets=1, epochs=1)
def main(store: str, out: Path, counts: str, subsets: int, epochs: int) -> None:
    """Train each row on subsets of STORE's pictures, and print mean recalls on test, ± over the subsets."""
    import xret

    out.mkdir(parents=True, exist_ok=True)
    click.echo(f"| training pictures | {' | '.join(ROWS)} |\n{'|---' * (1 + len(ROWS))}|")
    for count in map(int, counts.split(",")):
        cells: list[str] = []
        for name, (recipe, settings) in ROWS.items():
            found = []
            for seed in range(subsets):
                subset, run = make_subset(store, out, count, seed), out / f"{count}-{seed}-{name.replace(' ', '-')}"
                given = settings if recipe == "cca" else {**settings, "schedule.epochs": epochs}
                done = run / "test.json"
                if not done.exists():
                    xret.train(subset, recipe=recipe, out=run, settings=given, seed=seed, resume=True, device="cpu")
                    done.write_text(json.dumps(xret.evaluate(run, device="cpu").results[0].rsum))
                found.append(json.loads(done.read_text()) / 6)
            spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{statistics.fmean(found):.1f}{spread}")
        click.echo(f"| {count:,} | {' | '.join(cells)} |")


def make_subset(store: str, out: Path, count: int, seed: int) -> str:
    """Return a store of global features with so many training pictures, drawn, and all of the other splits."""
    import xret

    folder, url = out / f"files-{count}-{seed}", str(out / f"{count}-{seed}.zarr")
    if (folder / "done").exists():
        return url
    cache = xret.FeatureCache.open(store)
    images, captions = cache.image_set(), cache.caption_set()
    first, last = cache.splits["train"]
    drawn = np.random.default_rng(seed).permutation(np.arange(first, last))[:count]
    rows = np.sort(np.concatenate([drawn, *(np.arange(*cache.splits[name]) for name in ("val", "test"))]))
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
            vectors += [one.astype(np.float32).mean(0) for one in np.split(captions.local(spoken), ends)]
            for text in cache.caption_texts(start, stop):
                lines.writerow([cache.file_names(row, row + 1)[0], text, splits[row]])
    np.save(folder / "captions.npy", np.array(vectors, np.float32))
    command = [sys.executable, "-m", "xret.cli", "import", "--store", url, "--from", "embeddings", "--source", folder]
    subprocess.run([*map(str, command), "--encoder", "IMAGES,CAPTIONS"], check=True, stdout=subprocess.DEVNULL)
    (folder / "done").touch()
    return url


if __name__ == "__main__":
    main()
