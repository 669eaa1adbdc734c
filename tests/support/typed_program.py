"""What a user may write: `make check` runs mypy over it in strict mode, `test_python.py` looks at what it names."""

from pathlib import Path

import torch

import xret
from xret.errors import CacheError, XretError
from xret.losses import Triplet
from xret.metrics import Recalls, recalls
from xret.nn import Aggregated, Aggregator, ElementSlots
from xret.similarities import SmoothChamfer


class Mean(Aggregator):
    """An aggregator of one's own."""

    def forward(self, local: torch.Tensor, length: torch.Tensor, global_: torch.Tensor) -> Aggregated:
        """Return the global feature."""
        return Aggregated(global_)


def program(manifest: Path, store: Path) -> float:
    """Extract, train, evaluate and search."""
    try:
        extraction = xret.extract(manifest, store, visual="resnet18", text="words", splits="train,val", workers=2)
    except CacheError as error:
        raise SystemExit(str(error)) from error
    samples: int = extraction.sets[0].samples
    summary = xret.train(store, recipe="vsepp", out="run", settings={"model.dim": 256}, seed=samples)
    evaluation = xret.evaluate("run", store=store, ties="mean")
    hits = xret.load("run", store=store, device="cpu").search("two red cubes", k=5)
    names: list[str] = [hit.id for hit in hits]
    cells = xret.ablate(store, recipe="vsepp", vary={"model.dim": [64, 128]}, out="cells", jobs=2)
    tuning = xret.tune(store, recipe="vsepp", out="tuned", trials=3)
    print(names, cells, tuning, evaluation.results[0].rsum, xret.finetune("run", out="tuned", reattach="image"))
    return summary.best_rsum


def loop(store: str) -> Recalls:
    """Train by a loop of one's own."""
    slots, compare, loss = ElementSlots(16, 8), SmoothChamfer(), Triplet(negatives="all")
    dataset = xret.FeatureDataset(store, "train", fields=["local", "global"])
    batch: dict[str, torch.Tensor] = dataset.collate([dataset[0], dataset[1]])
    for one in xret.batches(store).epoch(unit="image", batch_size=8, seed=0, epoch=0):
        print(one.images.local, one.positives)
    made: Aggregated = slots(batch["image_local"], batch["image_length"], batch["image_global"])
    similarity: torch.Tensor = compare(made.embedding, made.embedding)
    loss(similarity, torch.eye(2, dtype=torch.bool)).backward()
    try:
        return recalls(similarity, torch.arange(2))
    except XretError as error:
        raise SystemExit(str(error)) from error
