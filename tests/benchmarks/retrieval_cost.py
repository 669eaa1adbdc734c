"""What finding images by a caption takes, of every recipe on one gallery, and as the gallery grows.

Images and captions are embedded before: what is timed is comparing one caption with all images and taking the ten
best, as VSE-infinity's Figure 3 and SetDiv's appendix B.1 do. Embeddings are those of each recipe's own model with its
weights at random, 36 regions of 2,048 numbers an image and 12 words a caption; a gallery repeats a few of them, which
changes no time. First all recipes on the gallery of --gallery, then those of --grow on galleries of --sizes, of which
those beyond 4 GB are left out. Rounds take turns; the fastest of each counts. One JSON line a measurement.

    python tests/benchmarks/retrieval_cost.py --plot retrieval-cost.png

`ratio` is over the time of vse-infty.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import click
import torch

from xret.heads.diagnostics.cost import cost
from xret.heads.model import FeatureFacts, Model, build_model
from xret.heads.modules.embedding import Embedding, each
from xret.heads.modules.similarity import in_blocks
from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.reading.batches import Features

REGIONS, CHANNELS, WORDS, VOCABULARY = 36, 2048, 12, 10_000
FEW = 8  # samples that are embedded
BEST = 10
MOST_MB = 4096  # of a gallery


def embed(name: str, device: str) -> tuple[Model, Embedding, Embedding]:
    """Return the model of a recipe, and the embeddings of a few random images and captions."""
    torch.manual_seed(0)
    image = FeatureFacts("roi", CHANNELS, CHANNELS)
    model = build_model(load_recipe(name), image, FeatureFacts("words", None, None, VOCABULARY)).to(device).eval()
    local = torch.randn(FEW, REGIONS, CHANNELS, device=device)
    length = torch.full((FEW,), REGIONS, device=device)
    images = model.embed_images(Features(length, local, local.mean(1))).embedding
    token = torch.randint(VOCABULARY, (FEW, WORDS), device=device)
    captions = model.embed_captions(Features(torch.full((FEW,), WORDS, device=device), token=token)).embedding
    return model, images, captions


class Search:
    """One caption's way to the best images of a gallery that repeats a few."""

    def __init__(self, model: Model, images: Embedding, captions: Embedding, size: int) -> None:
        self.model, self.size = model, size
        self.gallery = each(lambda t: t[torch.arange(size, device=t.device) % FEW], images)
        self.query = each(lambda t: t[:1], captions)

    def milliseconds(self) -> float:
        """Search once."""
        began = time.perf_counter()
        scores = in_blocks(self.model.similarity, self.gallery, self.query)[:, 0]
        scores.topk(min(BEST, self.size)).indices.tolist()  # which waits for a GPU
        return 1000 * (time.perf_counter() - began)


def megabytes(embedding: Embedding) -> float:
    """Return how much memory an embedding takes."""
    tensors = [embedding] if isinstance(embedding, torch.Tensor) else embedding
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def measure(searches: dict[Any, Search], rounds: int) -> dict[Any, float]:
    """Return the fastest time of each search in milliseconds."""
    times: dict[Any, list[float]] = {key: [] for key in searches}
    for _ in range(rounds):
        for key, search in searches.items():
            times[key].append(search.milliseconds())
    return {key: min(some) for key, some in times.items()}


def draw(path: str, grown: dict[str, list[tuple[int, float]]], device: str) -> None:
    """Plot time against gallery size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for (name, points), marker in zip(grown.items(), "osD^vPX*" * 3, strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="images in the gallery", ylabel="time of one caption's search, ms")
    axes.set_title(f"Retrieval of images by a caption ({device})")
    axes.grid(alpha=0.3)
    axes.legend(title="recipe")
    figure.savefig(path, dpi=150)


@click.command()
@click.option("--gallery", default=1000, show_default=True, help="Images, for all recipes.")
@click.option("--recipe", "recipes", multiple=True, help="Only these; else every recipe without a data set's name.")
@click.option("--grow", default="vse-infty,setdiv,scan", show_default=True, help="Recipes for growing galleries.")
@click.option("--sizes", default="100,1000,10000,100000", show_default=True, help="Images of the growing galleries.")
@click.option("--rounds", default=10, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--plot", metavar="FILE", help="Draw time against gallery size.")
@torch.no_grad()
def main(
    gallery: int,
    recipes: Sequence[str],
    grow: str,
    sizes: str,
    rounds: int,
    device: str,
    plot: str | None,
) -> None:
    """Print one JSON line a measurement."""
    chosen = recipes or [name for name in recipe_names() if "/" not in name]
    embedded = {name: embed(name, device) for name in dict.fromkeys([*chosen, *filter(None, grow.split(","))])}
    milliseconds = measure({name: Search(*embedded[name], gallery) for name in chosen}, rounds)
    base = milliseconds.get("vse-infty", min(milliseconds.values()))
    for name in sorted(chosen, key=milliseconds.__getitem__):
        model, images, captions = embedded[name]
        one = cost(images, captions, model.similarity)
        found = {"recipe": name, "images": gallery, "milliseconds": round(milliseconds[name], 3)}
        click.echo(json.dumps(found | {"ratio": round(milliseconds[name] / base, 2), **vars(one)}))
    grown: dict[str, list[tuple[int, float]]] = {}
    for name in filter(None, grow.split(",")):
        for size in map(int, sizes.split(",")):
            line = {"grow": name, "images": size, "gallery_mb": round(megabytes(embedded[name][1]) * size / FEW)}
            if line["gallery_mb"] > MOST_MB:
                click.echo(json.dumps(line | {"skipped": f"more than {MOST_MB:,} MB"}))
                continue
            found_ms = measure({name: Search(*embedded[name], size)}, rounds)[name]
            grown.setdefault(name, []).append((size, found_ms))
            click.echo(json.dumps(line | {"milliseconds": round(found_ms, 3)}))
    if plot:
        draw(plot, grown, device)


if __name__ == "__main__":
    main()
