"""What finding images by a caption takes: by every system, as the gallery grows, and of all pairs.

`query`: one caption against a gallery, and the ten best (README's column; MACs of a pair beside it). `grown`: the same
on galleries of several sizes (VSE-infinity, Figure 3). `pairs`: all images against all captions of Flickr30K's
validation part, and the ten best of both ways (SetDiv, appendix B.1, whose milliseconds, of a GPU, stand beside ours).

Embeddings are made before, by each system's own model with random weights, of 36 regions of 2,048 numbers and 12 words;
a gallery repeats a few of them, which changes no time. Rounds take turns; the fastest counts. One JSON line each;
`ratio` is over the time of vse-infty. --small shows in seconds that all of it runs; its times say nothing.

    python tests/benchmarks/retrieval_cost.py
"""

from collections.abc import Callable
from typing import Any

import click
import torch
from sizes import say, seconds_of, small

from xret.heads.diagnostics.embeddings import cost
from xret.heads.model import FeatureFacts, Model, build_model
from xret.heads.modules.embedding import Embedding, each
from xret.heads.modules.similarity import in_blocks
from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.reading.batches import Features

REGIONS, CHANNELS, WORDS, VOCABULARY = 36, 2048, 12, 10_000
FEW = 8  # samples that are embedded
BEST = 10
PAIRS = 1014, 5070  # images and captions of Flickr30K's validation part
PAPER = {"vse-infty": 159, "setdiv": 168, "scan": 198_121}  # milliseconds of `pairs`, SetDiv's appendix B.1


def embed(name: str, settings: tuple[str, ...]) -> tuple[Model, Embedding, Embedding]:
    """Return the model of a recipe, and the embeddings of a few random images and captions."""
    torch.manual_seed(0)
    recipe = load_recipe(name, ["augment.mix=0", "adapter.words.ends=false", *settings])
    facts = (FeatureFacts("roi", CHANNELS, CHANNELS),), (FeatureFacts("words", None, None, VOCABULARY),)
    model, local = build_model(recipe, *facts).eval(), torch.randn(FEW, REGIONS, CHANNELS)
    images = model.embed_images(Features(torch.full((FEW,), REGIONS), local, local.mean(1))).embedding
    token = torch.randint(VOCABULARY, (FEW, WORDS))
    return model, images, model.embed_captions(Features(torch.full((FEW,), WORDS), token=token)).embedding


def repeated(embedding: Embedding, size: int) -> Embedding:
    """Return so many embeddings, of the few that there are."""
    return each(lambda t: t[torch.arange(size) % FEW], embedding)


def search(model: Model, images: Embedding, captions: Embedding, both: bool) -> None:
    """Compare all with all, and take the best images of each caption; with `both` also captions of each image."""
    scores = in_blocks(model.similarity, images, captions)
    for one in (scores.T, scores) if both else (scores.T,):
        one.topk(min(BEST, one.shape[1])).indices.tolist()


def fastest(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the fastest time of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, do in work.items():
            times[name].append(1000 * seconds_of(do))
    return {name: min(some) for name, some in times.items()}


@click.command()
@small(gallery=20, galleries=(10, 20), pairs=(20, 100), rounds=1, settings=("model.dim=16",))
@torch.no_grad()
def main(
    gallery: int = 1000,
    galleries: tuple[int, ...] = (100, 1000, 10_000),
    pairs: tuple[int, int] = PAIRS,
    rounds: int = 10,
    settings: tuple[str, ...] = (),
) -> None:
    """Print one JSON line a measurement; all pairs, which take SCAN half an hour, are compared in a single round."""
    names = [name for name in recipe_names() if "/" not in name and name != "cca"]  # which has no head
    made = {name: embed(name, settings) for name in names}

    def measured(some: list[str], images: int, captions: int, rounds: int) -> dict[str, float]:
        work = {}
        for name in some:
            model, left, right = made[name]
            sides = repeated(left, images), repeated(right, captions)
            work[name] = lambda model=model, sides=sides: search(model, *sides, both=captions > 1)
        return fastest(work, rounds)

    def show(what: str, images: int, found: dict[str, float], **more: dict[str, Any]) -> None:
        base = found.get("vse-infty", min(found.values()))
        for name, taken in sorted(found.items(), key=lambda one: one[1]):
            line = {"what": what, "recipe": name, "images": images, "milliseconds": round(taken, 3)}
            beside = {key: values.get(name) for key, values in more.items()}
            say(**line, ratio=round(taken / base, 2), **beside)

    macs = {name: cost(images, captions, model.similarity)[0] for name, (model, images, captions) in made.items()}
    show("query", gallery, measured(names, gallery, 1, rounds), macs=macs)
    for size in galleries:
        show("grown", size, measured([*PAPER], size, 1, rounds))
    show("pairs", pairs[0], measured([*PAPER], *pairs, 1), paper=PAPER)


if __name__ == "__main__":
    main()
