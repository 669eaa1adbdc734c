"""What 24 heads that differ in numbers alone cost together, beside one head and beside processes of one head each.

    python tests/benchmarks/stacked.py --device cuda
    python tests/benchmarks/stacked.py --device cpu --store scenes.zarr --set model.dim=128 --set data.batch_size=50

Without a store, features of Flickr8k's size are drawn. An epoch is the median of all but the first two, with its
validation. On a GPU steps are CUDA graphs; `graphs` says how many there were. `ablation` is all that a user waits for.
"""

import json
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from reading import make_store
from sizes import small

import xret
from xret.heads.runs.run import Run
from xret.heads.training.gradients import Gradients
from xret.heads.training.stacked import Stack
from xret.heads.training.stacking import StackedGradients
from xret.heads.training.train import train


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--store", default=None, help="A feature store; by default one is made.")
@click.option("--recipe", default="mlp", show_default=True)
@click.option("--set", "given", multiple=True, metavar="KEY=VALUE")
@click.option("--cells", default=24, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--epochs", default=6, show_default=True)
@click.option("--jobs", default=2, show_default=True, help="Processes to compare with; 0: none.")
@click.option("--images", default=6000, show_default=True)
@small(cells=2, seeds=1, epochs=3, jobs=0, images=40, device="cpu")
def main(
    device: str,
    store: str | None,
    recipe: str,
    given: tuple[str, ...],
    cells: int,
    seeds: int,
    epochs: int,
    jobs: int,
    images: int,
) -> None:
    """Print a JSON line for each way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = store or make_store(folder, images + 100, 1, 1280, val=100).url
        settings: dict[str, Any] = {"adapter.words.word_dim": 256, "schedule.epochs": epochs}
        settings |= dict(text.split("=", 1) for text in given)
        rates = [1e-3 * (1 + number) / cells for number in range(cells // seeds)]
        graphs: list[Gradients] = []
        original = Gradients.__init__

        def noted(self: Gradients, *arguments: Any) -> None:
            original(self, *arguments)
            graphs.append(self)

        Gradients.__init__ = noted  # type: ignore[method-assign]

        def one(rate: float, seed: int, out: Path, stack: Stack | None = None) -> Path:
            train(
                store,
                recipe,
                out,
                settings=settings | {"optimizer.lr": rate},
                seed=seed,
                device=device,
                title=None,
                stack=stack,
            )
            return out

        alone = [one(rates[0], seed, folder / f"alone-{seed}") for seed in range(2)]
        show("one cell", alone, graphs=len(graphs[-1].graphs), launched=graphs[-1].refused)
        parts = [(rate, seed, folder / f"stacked-{rate}-{seed}") for seed in range(seeds) for rate in rates]
        graphs.clear()
        ended = Stack().run([partial(one, *part) for part in parts])
        stacked = [part.result() for part in ended]
        last = next((part for part in reversed(graphs) if isinstance(part, StackedGradients)), None)
        show(
            f"{len(parts)} cells together",
            stacked[:1],
            graphs=None if last is None else len(last.graphs),
            stacked=last is not None,
        )
        pair = [[line["loss"] for line in Run(run).metrics()] for run in (alone[0], stacked[0])]
        print(json.dumps({"what": "loss", "apart": max(abs(a - b) for a, b in zip(*pair, strict=True))}))
        for count in filter(None, (1, jobs)):
            began = time.perf_counter()
            vary = {"optimizer.lr": rates}
            xret.ablate(
                store,
                folder / f"jobs{count}",
                recipe=recipe,
                vary=vary,
                settings=settings,
                seeds=seeds,
                split="val",
                device=device,
                jobs=count,
            )
            print(json.dumps({"what": "ablation", "jobs": count, "seconds": round(time.perf_counter() - began, 1)}))
            shutil.rmtree(folder / f"jobs{count}")
        Gradients.__init__ = original  # type: ignore[method-assign]


def show(what: str, runs: list[Path], **more: Any) -> None:
    """Print the seconds of an epoch."""
    seconds = [line["seconds"] for run in runs for line in Run(run).metrics()[2:]]
    print(json.dumps({"what": what, "epoch seconds": round(statistics.median(seconds), 4), **more}), flush=True)


if __name__ == "__main__":
    main()
