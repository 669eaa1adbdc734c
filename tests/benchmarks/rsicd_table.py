"""Every system on real data: RSICD with frozen features, each recipe tuned with the same number of trials.

A row is a recipe on one choice of captions. `xret tune` searches the recipe's bundled space, validation RSUM decides,
and the best values are trained with every seed; only then is the test split looked at. What is done is not done again,
so the command may be stopped and repeated. The store needs an image set, and caption sets `words` and `bert`:

    xret extract rsicd --data-root DIR --store rsicd.zarr --visual mobilenet_v2 \
        --visual-weights mobilenet_v2.safetensors --text bert --text-weights MINILM
    xret extract rsicd --data-root DIR --store rsicd.zarr --visual none --text words
    python tests/benchmarks/rsicd_table.py rsicd.zarr --out table --captions bert --row mlp --row setdiv

`linear` and `mlp` begin with their recipes' values. The systems keep their parts and similarities. Alike for all of
them are width, epochs, batches and a cosine, and what they begin with is what `mlp` has over the cached features: its
perceptron, standardised channels, dropout of features and of the hidden layer, equal captions as positives. Each but
`pcme` has two rows: with its own loss, where that is of triplets over all negatives, because RSICD's captions repeat
and the hardest negative is often none; and with the InfoNCE of the baselines in its place.

`fusemix`, `lit` and `sail` keep their layers and losses; what they begin with is standardised channels and the dropout
of features. `fusemix`, which blends vectors of texts, has no row on words.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
from sizes import small

BASELINES = ("linear", "mlp")
ALIGNED = ("fusemix", "lit", "sail")
BLENDED = ("fusemix",)  # texts that have a vector, and no captions of equal text as positives
COMMON = (
    "model.dim=256",
    "data.unit=image",
    "data.batch_size=128",
    "data.captions=1",
    "schedule.name=cosine",
    "schedule.epochs=20",
    "runtime.precision=bfloat16",
    "schedule.warmup_epochs=0",
    "optimizer.lr=0.001",
    "optimizer.aggregator_lr=1",
    "loss.same_text=positive",
)


def as_mlp(kind: str) -> tuple[str, ...]:
    """Return the layers and the regularisation that `mlp` has over cached features, for all rows of a kind."""
    same = ("layers=mlp", "hidden=1024", "batch_norm=false", "hidden_dropout=0.5", "standardize=true", "dropout=0.5")
    return tuple(f"adapter.{kind}.{one}" for one in same)


GRID = (*as_mlp("grid"), "adapter.grid.global=cached")
ON = {"bert": as_mlp("tokens"), "words": ("adapter.words.dropout=0.4",)}
ALL_NEGATIVES = ("loss.triplet.negatives=all", "loss.triplet.reduction=mean")
INFONCE = (
    "loss.infonce.weight=1",
    "loss.infonce.scale=20",
    "loss.infonce.learned=true",
    "loss.infonce.logarithm=true",
)
NO_TRIPLET = "loss.triplet.weight=0"
ROWS_LEFT_OUT = ("augment.image=0.2",)  # of all but systems that read one vector of each image
NARROW = ("aggregator.image.head_dim=256", "aggregator.text.head_dim=256")
UNWRITTEN = ("loss.caption-generation.weight=0",)  # a system writes captions on words only
WRITERS = ("vsrn", "gaussian-vsrn")
OF_TRIPLETS: dict[str, tuple[str, ...]] = {
    "vsepp": (),
    "vse-infty": ROWS_LEFT_OUT,
    "pvse": ROWS_LEFT_OUT,
    "setdiv": (*ROWS_LEFT_OUT, *NARROW),
    "maxmatch": (*ROWS_LEFT_OUT, *NARROW),
    "gaussian-vsepp": (),
    "vsrn": ROWS_LEFT_OUT,
    "gaussian-vsrn": ROWS_LEFT_OUT,
    "scan": ROWS_LEFT_OUT,
}
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in (*BASELINES, *ALIGNED)},
    **{
        f"{name}{label}": (name, (*own, *loss))
        for name, own in OF_TRIPLETS.items()
        for label, loss in (("", ALL_NEGATIVES), (", InfoNCE", (NO_TRIPLET, *INFONCE)))
    },
    "pcmepp": ("pcmepp", ROWS_LEFT_OUT),
    "pcmepp, InfoNCE": ("pcmepp", (*ROWS_LEFT_OUT, "loss.matching-bce.weight=0", *INFONCE)),
    "pcme": ("pcme", ROWS_LEFT_OUT),  # after an epoch with InfoNCE its match probabilities are still at chance
}


def settings(row: str, captions: str) -> list[str]:
    """Return what a row begins with beside the recipe's own values."""
    recipe, own = ROWS[row]
    if recipe in BASELINES:
        return []
    if recipe in ALIGNED:
        negative = ("loss.same_text=negative",) if recipe in BLENDED else ()
        kinds = ("grid", "tokens") if captions == "bert" else ("grid",)
        noise = [f"adapter.{kind}.{one}" for kind in kinds for one in ("standardize=true", "dropout=0.5")]
        return [*COMMON, "data.chunk=null", *noise, *(() if captions == "bert" else ON["words"]), *negative]
    unwritten = UNWRITTEN if recipe in WRITERS and captions != "words" else ()
    return [*COMMON, *GRID, *ON[captions], *own, *unwritten]


def train_row(store: str, folder: Path, row: str, captions: str, trials: int, seeds: int) -> None:
    """Tune a row, train its best values with every seed, and write down what they reach; what is there stays."""
    import xret
    from xret.heads.recipes.recipe import load_recipe
    from xret.heads.runs.run import recipe_text

    tuned = folder / "tuned"
    if not (tuned / "result.json").exists():
        # A recipe of its own, because a tuning leaves alone what is given to it as settings.
        begins = folder / f"{ROWS[row][0]}.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        begins.write_text(recipe_text(load_recipe(ROWS[row][0], settings(row, captions)).to_dict()))
        how: dict[str, Any] = {"trials": trials, "settings": {"data.text": captions}}
        xret.tune(store, recipe=begins, out=tuned, **how)
    for seed in range(seeds):
        run = tuned / "best" if seed == 0 else folder / f"seed-{seed}"  # the best trial is that of seed 0
        if not (folder / f"seed-{seed}.json").exists():
            found = xret.train(store, recipe=tuned / "best.yaml", out=run, seed=seed, resume=True)
            results = {ties: xret.evaluate(run, ties=ties).results[0] for ties in ("mean", "pessimistic")}
            recalls = {ties: result.rsum / 6 for ties, result in results.items()}
            line = {"validation": found.best_rsum / 6, **recalls}
            (folder / f"seed-{seed}.json").write_text(json.dumps(line))


@click.command()
@click.argument("store")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of all runs.")
@click.option("--captions", type=click.Choice(list(ON)), multiple=True, default=list(ON), help="Both by default.")
@click.option("--row", "rows", type=click.Choice(list(ROWS)), multiple=True, default=list(ROWS), help="All by default.")
@click.option("--trials", default=12, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--minutes", type=float, help="Begin no row after so long; by default all are trained.")
@small(seeds=1, trials=1)
def main(
    store: str,
    out: Path,
    captions: tuple[str, ...],
    rows: tuple[str, ...],
    trials: int,
    seeds: int,
    minutes: float | None,
) -> None:
    """Train what is missing, then print the table of all that is there."""
    began = time.monotonic()
    for row in rows:
        for text in captions:
            if text == "words" and row in BLENDED:
                continue
            if minutes is None or time.monotonic() - began < 60 * minutes:
                click.echo(f"{row}, {text}", err=True)
                train_row(store, out / _folder(row, text), row, text, trials, seeds)
    table(out, seeds)


def table(out: Path, seeds: int) -> None:
    """Print what the rows reach that are there."""
    click.echo("| captions | system | seeds | mR, ties `mean` | mR, pessimistic | of validation | minutes of tuning |")
    click.echo("|---|---|---|---|---|---|---|")
    for text in ON:
        for row in ROWS:
            folder = out / _folder(row, text)
            files = [folder / f"seed-{seed}.json" for seed in range(seeds)]
            found = [json.loads(file.read_text()) for file in files if file.exists()]
            if found:
                minutes = _minutes(folder / "tuned" / "result.json")
                shown = [_spread([one[key] for one in found]) for key in ("mean", "pessimistic", "validation")]
                click.echo(f"| {text} | {row} | {len(found)} | {' | '.join(shown)} | {minutes:.0f} |")


def _folder(row: str, captions: str) -> str:
    return f"{captions}-{row.replace(', ', '-').lower()}"


def _minutes(result: Path) -> float:
    return sum(trial["seconds"] for trial in json.loads(result.read_text())["trials"]) / 60


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
