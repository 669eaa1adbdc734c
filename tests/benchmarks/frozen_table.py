"""Every system on frozen features of real pictures, each tuned with the same number of trials.

A row is a recipe on one image set and one caption set, or on several joined. `xret tune` searches the recipe's bundled
space, validation RSUM decides, and the best values are trained with every seed; only then is the test split looked at.
What is done is not done again, so the command may be stopped and repeated. For Flickr8k:

    xret extract flickr8k --data-root DIR --store f8k.zarr --visual timm:tf_efficientnet_lite2 --whole --pool 3x3 \
        --visual-weights efficientnet_lite2.safetensors --text hf:MINILM
    xret extract flickr8k --data-root DIR --store f8k.zarr --visual none --text words
    python tests/benchmarks/frozen_table.py f8k.zarr --out table --images tf_efficientnet_lite2 --captions MiniLM \
        --captions words --row mlp --row "setdiv, InfoNCE" --row "setdiv K1, InfoNCE" --set model.dim=512

`linear` and `mlp` begin with their recipes' values. The systems keep their parts and similarities. Alike for all of
them are width, epochs, batches and a cosine, and what they begin with is what `mlp` has over the cached features: its
perceptron, standardised channels, dropout of features and of the hidden layer, equal captions as positives. Each has a
row with its own loss, of all negatives where that is a triplet's, and one with the InfoNCE of the baselines in its
place. Of set systems K1 has a single element a side, at the same width.

`fusemix`, `lit` and `sail` keep their layers and losses; what they begin with is standardised channels and the dropout
of features. `fusemix`, which blends vectors of texts, has no row on words.

With `--values-of IMAGES,CAPTIONS` the best values of that pair's tuning are trained, and no trial is run.
"""

import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import click
from sizes import small

BASELINES = ("linear", "mlp")
ALIGNED = ("fusemix", "lit", "sail")
BLENDED = ("fusemix",)  # texts that have a vector, and no captions of equal text as positives
WRITERS = ("vsrn", "gaussian-vsrn")  # of captions on words, which alone have the next word
COMMON = {
    "model.dim": 256,
    "data.unit": "image",
    "data.batch_size": 128,
    "data.captions": 1,
    "schedule.name": "cosine",
    "schedule.epochs": 20,
    "schedule.warmup_epochs": 0,
    "runtime.precision": "float32",
    "optimizer.lr": 1e-3,
    "optimizer.aggregator_lr": 1,
    "loss.same_text": "positive",
}
AS_MLP = {
    "layers": "mlp",
    "hidden": 1024,
    "batch_norm": False,
    "hidden_dropout": 0.5,
    "standardize": True,
    "dropout": 0.5,
}
ON_WORDS = {"adapter.words.dropout": 0.4}
TRIPLETS = ("triplet", "embedding-graph")
INFONCE = {
    "loss.infonce.weight": 1,
    "loss.infonce.scale": 20,
    "loss.infonce.learned": True,
    "loss.infonce.logarithm": True,
}
ROWS_LEFT_OUT = {"augment.image": 0.2}  # of all but systems that read one vector of each image
NARROW = {"aggregator.image.head_dim": 256, "aggregator.text.head_dim": 256}
ONE_ELEMENT = {"aggregator.image.slots": 1, "aggregator.text.slots": 1}
SYSTEMS: dict[str, dict[str, Any]] = {
    "vsepp": {},
    "hrem": {},
    "vse-infty": ROWS_LEFT_OUT,
    "vsrn": ROWS_LEFT_OUT,
    "scan": ROWS_LEFT_OUT,
    "setdiv": {**ROWS_LEFT_OUT, **NARROW},
    "setdiv K1": {**ROWS_LEFT_OUT, **NARROW, **ONE_ELEMENT},
    "maxmatch": {**ROWS_LEFT_OUT, **NARROW},
    "maxmatch K1": {**ROWS_LEFT_OUT, **NARROW, **ONE_ELEMENT},
    "pvse": ROWS_LEFT_OUT,
    "pvse K1": {**ROWS_LEFT_OUT, **ONE_ELEMENT},
    "pcmepp": ROWS_LEFT_OUT,
    "pcme": ROWS_LEFT_OUT,  # with InfoNCE its match probabilities stay at chance: it has no such row
    "gaussian-vsepp": {},
    "gaussian-vsrn": ROWS_LEFT_OUT,
}
ROWS = (*BASELINES, *ALIGNED, *SYSTEMS, *(f"{name}, InfoNCE" for name in SYSTEMS if name != "pcme"))


def settings(row: str, captions: str) -> dict[str, Any]:
    """Return what a row begins with beside the recipe's own values."""
    from xret.heads.recipes.recipe import load_recipe

    name, _, infonce = row.partition(", ")
    recipe = name.split()[0]
    if recipe in BASELINES:
        return {}
    kinds = ("grid",) if captions == "words" else ("grid", "tokens")
    words = ON_WORDS if captions == "words" else {}
    if recipe in ALIGNED:
        noise = {f"adapter.{kind}.{key}": AS_MLP[key] for kind in kinds for key in ("standardize", "dropout")}
        negative = {"loss.same_text": "negative"} if recipe in BLENDED else {}
        return {**COMMON, "data.chunk": None, **noise, **words, **negative}
    layers = {f"adapter.{kind}.{key}": value for kind in kinds for key, value in AS_MLP.items()}
    terms = load_recipe(recipe).terms
    all_negatives = (("negatives", "all"), ("reduction", "mean"))
    loss = {f"loss.{term}.{key}": value for term in TRIPLETS if term in terms for key, value in all_negatives}
    if infonce:
        loss |= {f"loss.{term}.weight": 0 for term in ("triplet", "matching-bce") if term in terms} | INFONCE
    unwritten = {"loss.caption-generation.weight": 0} if recipe in WRITERS and captions != "words" else {}
    return {**COMMON, "adapter.grid.global": "cached", **layers, **words, **SYSTEMS[name], **loss, **unwritten}


def train_row(
    store: str,
    out: Path,
    row: str,
    of: tuple[str, str],
    changed: dict[str, Any],
    values_of: str,
    trials: int,
    seeds: int,
) -> None:
    """Tune a row, train its best values with every seed, and write down what they reach; what is there stays."""
    import xret
    from xret.heads.recipes.recipe import load_recipe
    from xret.heads.runs.run import recipe_text

    folder, recipe = out / _folder(*of, row), row.partition(",")[0].split()[0]
    folder.mkdir(parents=True, exist_ok=True)
    data = {f"data.{side}": names.split("+") for side, names in zip(("image", "text"), of, strict=True)}
    best = folder / "tuned" / "best.yaml"
    if values_of:
        best = out / _folder(*values_of.split(","), row) / "tuned" / "best.yaml"
    elif not best.exists():
        # A recipe of its own, because a tuning leaves alone what is given to it as settings.
        begins = folder / f"{recipe}.yaml"
        own = settings(row, of[1]) | (changed if recipe not in BASELINES else {})
        begins.write_text(recipe_text(load_recipe(recipe, own).to_dict()))
        xret.tune(store, recipe=begins, out=folder / "tuned", trials=trials, settings=data)
    for seed in range(seeds):
        # The best trial is that of seed 0.
        run = folder / "tuned" / "best" if seed == 0 and not values_of else folder / f"seed-{seed}"
        if not (folder / f"seed-{seed}.json").exists():
            began = time.process_time()
            found = xret.train(store, recipe=best, out=run, seed=seed, settings=data, resume=True)
            minutes = (time.process_time() - began) / 60
            both = xret.evaluate(run, ties="mean", hubness=True).tables
            results = {"mean": both[0][0], "hubness": both[1][0], "pessimistic": xret.evaluate(run).results[0]}
            recalls = {name: result.rsum / 6 for name, result in results.items()}
            line = {"validation": found.best_rsum / 6, **recalls, "minutes": minutes, "run": str(run)}
            (folder / f"seed-{seed}.json").write_text(json.dumps(line))


@click.command()
@click.argument("store")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of all runs.")
@click.option("--images", multiple=True, help="How an image set's name begins; several joined as A+B. Repeatable.")
@click.option("--captions", multiple=True, help="The same of caption sets.")
@click.option("--row", "rows", type=click.Choice(ROWS), multiple=True, default=ROWS, help="All by default.")
@click.option("--set", "pairs", metavar="KEY=VALUE", multiple=True, help="What systems begin with instead.")
@click.option("--trials", default=12, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--values-of", metavar="IMAGES,CAPTIONS", default="", help="Take the values of this pair's tuning.")
@click.option("--minutes", type=float, help="Begin no row after so long; by default all are trained.")
@small(seeds=1, trials=1)
def main(
    store: str,
    out: Path,
    images: tuple[str, ...],
    captions: tuple[str, ...],
    rows: tuple[str, ...],
    pairs: tuple[str, ...],
    trials: int,
    seeds: int,
    values_of: str,
    minutes: float | None,
) -> None:
    """Train what is missing, then print the table of all that is there."""
    began, changed = time.monotonic(), dict(pair.split("=", 1) for pair in pairs)
    for of in product(images, captions):
        for row in rows:
            if row in BLENDED and of[1] == "words":
                continue
            if minutes is None or time.monotonic() - began < 60 * minutes:
                click.echo(f"{', '.join(of)}, {row}", err=True)
                train_row(store, out, row, of, changed, values_of, trials, seeds)
    table(out)


def table(out: Path) -> None:
    """Print what the rows reach that are there, the best on validation first."""
    rows = []
    for folder in out.iterdir():
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("seed-*.json"))]
        if found:
            shown = [_spread([one[key] for one in found]) for key in ("mean", "hubness", "pessimistic", "validation")]
            tuned = folder / "tuned" / "result.json"
            minutes = "values of another pair"
            if tuned.exists():
                minutes = f"{json.loads(tuned.read_text())['seconds'] / 60:.0f}"
            of_one = f"{max(one['minutes'] for one in found):.1f}"  # the first is trained already if it was tuned
            validation = statistics.mean(one["validation"] for one in found)
            rows.append((validation, [*folder.name.split("--"), str(len(found)), *shown, minutes, of_one]))
    columns = ["images", "captions", "system", "seeds", "mR, ties `mean`", "with hubness corrected", "mR, pessimistic"]
    columns += ["validation", "tuning, min", "one training, min of CPU"]
    click.echo(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for _, cells in sorted(rows, key=lambda row: -row[0]):
        click.echo(f"| {' | '.join(cells)} |")


def _folder(images: str, captions: str, row: str) -> str:
    return "--".join((images, captions, row.replace(", ", "-").replace(" ", "-").lower()))


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
